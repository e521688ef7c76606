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
from toolkit.tools.generate.files import Options, open_rows, read_prompts
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
        options = Options(model="", file=file, column=column, **others, **given)
        rows, num_rows = open_rows(options, usage or Usage(), has_chat_template=is_chat)
        read = list(read_prompts(rows))
        assert num_rows in (None, len(read))
        return read, rows.reading


def test_the_runs_own_column_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    file = write(tmp_path, "a.csv", 'id,body,source\n1,"one, two",no\n2,three,no\n')
    rows, how = read_rows(file, usage=Usage(source_column="body"))
    assert [(where, row.prompt) for where, row in rows] == [(f"{file}, row 1", "one, two"), (f"{file}, row 2", "three")]
    assert how == "prompts, from body; not read: id, source"


PARTS = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("row", "messages", "how"),
    [
        (
            # As JSON text, with content in parts, with nulls as parquet has them, and without OpenAI's weights.
            {
                "messages": json.dumps(
                    [{"role": "user", "content": PARTS, "name": None}, {"role": "assistant", "content": "2", "weight": 0}]
                ),
                "tools": json.dumps([TOOL]),
            },
            [("user", "1 + 1?")],
            "messages, from messages and tools; no other columns",
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": "be"},
            [("system", "be"), ("user", "hi")],
            "sharegpt, from conversations and system; no other columns",
        ),
        (
            {"instruction": "add", "input": "1, 2", "output": "3", "history": [["a", "b"]]},
            [("user", "a"), ("assistant", "b"), ("user", "add\n\n1, 2")],
            "alpaca, as chats for the chat template, from instruction, input and history; not read: output",
        ),
    ],
)
def test_chats_are_read_as_for_training_and_lose_the_answer_that_they_are_to_be_given(
    tmp_path: Path, row: dict[str, Any], messages: list[tuple[str, str]], how: str
) -> None:
    file = write(tmp_path, "a.jsonl", json.dumps(row))
    [(_, read)], said = read_rows(file)
    assert read.messages == [{"role": role, "content": content} for role, content in messages]
    assert said == how and read.tools == ([TOOL] if "tools" in row else None)


@pytest.mark.parametrize(("name", "given"), [("column", "body"), ("csv_delimiter", ";")])
def test_what_only_a_file_has_is_refused_for_standard_input_which_has_a_text_a_line(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ignored."""
    with pytest.raises(UserError, match=rf"--{name.replace('_', '-')} is '{given}', but there is no --file with columns"):
        read_rows("-", **{name: given})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("one\r\n zwei ü".encode()), "cp1252"))
    rows, how = read_rows("-", usage=Usage(encoding="cp1252"))
    assert [row.prompt for _, row in rows] == ["one", " zwei ü"] and how == ""


@pytest.mark.parametrize(
    ("name", "text", "column", "sentence"),
    [
        ("a.docx", "one", None, r"--file: .*a.docx has an unknown file ending: let its name end in one of .csv"),
        ("a.csv", "source;id\na;1\n", None, r"has the columns source;id: name .* --column; its header has semicolons"),
        ("a.csv", "source,prompt\na,b\n", None, r"has the columns source, prompt: name the one to generate for as --column"),
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
        ("a.jsonl", '{"conversations": [{"from": "gpt", "value": "a"}]}', None, r"row 1 is a row in which the assistant speaks"),
        ("a.csv", "text\nNaN\n", None, r"row 1 is a row with a missing prompt"),
    ],
)
def test_a_file_without_texts_is_refused(tmp_path: Path, name: str, text: str, column: str | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_rows(write(tmp_path, name, text), column)


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
