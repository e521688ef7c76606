"""Which texts `generate` finds in a file, and what it says where there are none."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.rows.example import Example
from toolkit.errors import UserError
from toolkit.export.usage import Usage
from toolkit.tools.generate.inputs import Options, open_rows
from toolkit.tools.generate.model import find_folder, in_own_words


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def read_rows(
    file: str, column: str | None = None, usage: Usage | None = None, *, is_chat: bool = True, **given: Any
) -> tuple[list[tuple[str, Example]], str]:
    """The rows of `--file`, and how they are read."""
    others: dict = {"texts": [], "plain": False, "output": None, "batch_size_rows": None, "dtype": None, "settings": {}}
    with in_own_words():
        rows = open_rows(
            Options(model="", file=file, column=column, **others, **given), usage or Usage(), has_chat_template=is_chat
        )
        read = list(rows.read())
        assert rows.num_rows in (None, len(read))
        return read, rows.how


def test_the_runs_own_column_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    file = write(tmp_path, "a.csv", 'id,body,source\n1,"one, two",no\n2,three,no\n')
    rows, how = read_rows(file, usage=Usage(source_column="body"))
    assert [(where, row.prompt) for where, row in rows] == [(f"{file}, row 1", "one, two"), (f"{file}, row 2", "three")]
    assert how == f"{file}: 2 rows, read as prompts, from body; not read: id, source"


def test_a_chat_loses_the_answer_that_it_is_to_be_given(tmp_path: Path) -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    [(_, row)], _ = read_rows(write(tmp_path, "a.jsonl", json.dumps({"messages": turns})))
    assert row.messages == turns[:2]


def test_sharegpt_and_alpaca_are_read_as_for_training(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    file = write(tmp_path, "a.json", json.dumps([{"conversations": turns, "system": "be"}]))
    [(_, row)], how = read_rows(file)
    assert row.messages == [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert how.endswith("a.json: 1 rows, read as sharegpt, from conversations and system; no other columns")
    file = write(tmp_path, "b.jsonl", json.dumps({"instruction": "add", "input": "1, 2", "output": "3", "history": [["a", "b"]]}))
    [(_, row)], how = read_rows(file)
    assert [message["content"] for message in row.messages or []] == ["a", "b", "add\n\n1, 2"]
    assert how.endswith("read as alpaca, as chats for the chat template, from instruction, input and history; not read: output")
    [(_, row)], _ = read_rows(file, "instruction", is_chat=False)
    assert row.messages is None and str(row.prompt).endswith("### Instruction:\nadd\n\n### Input:\n1, 2\n\n### Response:\n")


def test_standard_input_has_a_text_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = io.TextIOWrapper(io.BytesIO("one\r\n zwei ü".encode()), "cp1252")
    monkeypatch.setattr("sys.stdin", texts)
    with in_own_words():
        others: dict = {"texts": [], "plain": False, "output": None, "batch_size_rows": None, "dtype": None, "settings": {}}
        rows = open_rows(Options(model="", file="-", column=None, **others), Usage(encoding="cp1252"))
    assert rows.num_rows is None and [row.prompt for _, row in rows.read()] == ["one", " zwei ü"]


@pytest.mark.parametrize(("name", "given"), [("column", "body"), ("csv_delimiter", ";")])
def test_what_only_a_file_has_is_refused_for_standard_input(name: str, given: str) -> None:
    """It was ignored."""
    with pytest.raises(UserError, match=rf"--{name.replace('_', '-')} is '{given}', but there is no --file with columns"):
        read_rows("-", **{name: given})


@pytest.mark.parametrize(
    ("name", "text", "column", "sentence"),
    [
        ("a.docx", "one", None, r"--file: .*a.docx has an unknown file ending: let its name end in one of .csv"),
        ("a.csv", "source;id\na;1\n", None, r"has the columns source;id: name .* --column; its header has semicolons"),
        ("a.csv", "source,prompt\na,b\n", None, r"has the columns source, prompt: name the one to generate for as --column"),
        ("a.csv", "a,b\nc,d\n", None, r"has the columns a, b: name the one"),
        ("a.csv", "a,b\nc,d\n", "e", r"has no column 'e' \(its columns: a, b\): correct --column"),
        ("a.csv", "text\n", None, r"has no rows"),
        ("a.jsonl", '{"text": "a"}\n{"text": ""}\n', None, r"a.jsonl, row 2 is a row with an empty prompt, which has nothing"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "text", r"a.jsonl, line 2: \[1\] is not a JSON object"),
        (
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": "a"}]}\n',
            None,
            r"row 1, message 1: roles out of order, the assistant",
        ),
        ("a.jsonl", '{"messages": [{"role": "system", "content": "a"}]}\n', None, r"row 1 is a row without a turn to answer"),
        ("a.jsonl", '{"conversations": [{"from": "gpt", "value": "a"}]}', None, r"row 1 is a row in which the assistant speaks"),
        ("a.jsonl", '{"conversations": "[]"}', None, r"row 1 is a row without an assistant turn"),
        ("a.jsonl", '{"turns": [{"from": "human", "value": "a"}]}', None, r"let the column be named conversations"),
        ("a.jsonl", '{"messages": "hello"}', None, r"row 1, column messages: not JSON"),
        ("a.csv", "text\nNaN\n", None, r"row 1 is a row with a missing prompt"),
        ("a.jsonl", "{torn\n", None, r"a.jsonl, line 1: not JSON"),
    ],
)
def test_a_file_without_texts_is_refused(tmp_path: Path, name: str, text: str, column: str | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_rows(write(tmp_path, name, text), column)


def test_a_chat_is_read_as_for_training(tmp_path: Path) -> None:
    """As JSON text, with tools, with content in parts, with nulls as parquet has them, and without OpenAI's weights."""
    turns: list[dict] = [{"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]}]
    turns += [{"role": "assistant", "content": "2", "weight": 0}, {"role": "user", "content": "sure?", "name": None}]
    tool = {"type": "function", "function": {"name": "add"}}
    file = write(tmp_path, "a.jsonl", json.dumps({"messages": json.dumps(turns), "tools": json.dumps([tool]), "id": 1}))
    [(_, item)], how = read_rows(file)
    assert item.messages == [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"},
    ]
    assert item.tools == [tool] and item.prompt is None
    assert how.endswith("read as messages, from messages and tools; not read: id")
    write(tmp_path, "a.jsonl", json.dumps({"messages": [{"role": "narrator", "content": "be brief"}, *turns]}))
    with pytest.raises(UserError, match="row 1, message 1: 'narrator' is not a role"):
        read_rows(file)


def test_what_is_no_model_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        UserError, match="without an export: let the run end, or give the folder that .*toolkit export .*/run writes"
    ):
        find_folder(str(tmp_path / "run"))
    with pytest.raises(UserError, match="a.csv is a file: give a run folder, an export or a model folder"):
        find_folder(write(tmp_path, "a.csv", "text\na\n"))


def test_a_file_need_not_be_written_as_the_runs_was(tmp_path: Path) -> None:
    """It was read as the run's file without a way to say otherwise: Müller in UTF-8 became MÃ¼ller in silence."""
    usage = Usage(source_column="text", csv_delimiter=";", encoding="cp1252")
    file = write(tmp_path, "a.csv", "text;id\nMüller;1\n")
    [(_, row)], how = read_rows(file, usage=usage)
    assert row.prompt == "Müller" and how.endswith("from text; not read: id, read as utf-8")
    assert read_rows(file, usage=usage, encoding="cp1252")[0][0][1].prompt == "MÃ¼ller"
    Path(file).write_text("text;id\nMüller;1\n", encoding="cp1252")
    [(_, row)], how = read_rows(file, usage=usage)
    assert row.prompt == "Müller" and how.endswith("from text; not read: id")
    file = write(tmp_path, "b.csv", "text,id\nMüller,1\n")
    with pytest.raises(UserError, match=r"its header has commas between names: set --csv-delimiter ','"):
        read_rows(file, usage=usage)
    assert read_rows(file, usage=usage, csv_delimiter=",")[0][0][1].prompt == "Müller"
    with pytest.raises(UserError, match="--encoding is 'utf-9', which Python does not know"):
        read_rows(file, usage=usage, encoding="utf-9")
