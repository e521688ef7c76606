"""Which texts `generate` finds in a file, and what it says where there are none."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from toolkit.cli.generate.generate import Options, _read
from toolkit.cli.generate.inputs import read_items
from toolkit.cli.generate.model import find_folder
from toolkit.data.sources.text_files import Form
from toolkit.errors import UserError


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_the_runs_own_column_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    file = write(tmp_path, "a.csv", 'id,body,source\n1,"one, two",no\n2,three,no\n')
    items, how = read_items(file, [], None, "body", Form())
    assert [(item.where, item.text) for item in items] == [(f"{file}, row 1", "one, two"), (f"{file}, row 2", "three")]
    assert how == f"{file}: 2 rows, from body (not read: id, source)"


def test_a_chat_loses_the_answer_that_it_is_to_be_given(tmp_path: Path) -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    [item], _ = read_items(write(tmp_path, "a.jsonl", json.dumps({"messages": turns})), [], None, None, Form())
    assert item.messages == turns[:2]


def test_sharegpt_and_alpaca_are_read_as_for_training(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    [item], how = read_items(
        write(tmp_path, "a.json", json.dumps([{"conversations": turns, "system": "be"}])), [], None, None, Form()
    )
    assert item.messages == [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert how.endswith("a.json: 1 rows, from conversations and system")
    row = {"instruction": "add", "input": "1, 2", "output": "3"}
    [item], how = read_items(write(tmp_path, "b.jsonl", json.dumps(row)), [], None, None, Form())
    assert item.messages == [{"role": "user", "content": "add\n\n1, 2"}] and how.endswith("(not read: output)")
    assert item.text is not None and item.text.endswith("### Instruction:\nadd\n\n### Input:\n1, 2\n\n### Response:\n")


def test_standard_input_has_a_text_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert [item.text for item in read_items("-", [], None, None, Form())[0]] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "text", "column", "sentence"),
    [
        ("a.docx", "one", None, r"--file: .*a.docx has an unknown file ending: let its name end in one of .csv"),
        ("a.csv", "source;id\na;1\n", None, r"has the columns source;id: name .* --column; its header has semicolons"),
        ("a.csv", "source,prompt\na,b\n", None, r"has the columns source and prompt: name the one to generate for as --column"),
        ("a.csv", "a,b\nc,d\n", None, r"has the columns a, b: name the one"),
        ("a.csv", "a,b\nc,d\n", "e", r"has no column 'e' \(its columns: a, b\): correct --column"),
        ("a.csv", "text\n", None, r"has no rows"),
        ("a.jsonl", '{"text": "a"}\n{"text": ""}\n', None, r"a.jsonl, row 2, column text: '' is neither a text nor a chat"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "text", r"a.jsonl, line 2: a JSON array, not an object"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}\n', None, r"row 1, column messages: .* neither"),
        ("a.jsonl", "{torn\n", None, r"a.jsonl, line 1: not JSON"),
    ],
)
def test_a_file_without_texts_is_refused(tmp_path: Path, name: str, text: str, column: str | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_items(write(tmp_path, name, text), [], column, None, Form())


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"--file gone.csv does not exist"):
        read_items("gone.csv", [], None, None, Form())


def test_a_chat_is_read_as_for_training(tmp_path: Path) -> None:
    """As JSON text, with tools, with content in parts, with nulls as parquet has them, and without OpenAI's weights."""
    turns: list[dict] = [{"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]}]
    turns += [{"role": "assistant", "content": "2", "weight": 0}, {"role": "user", "content": "sure?", "name": None}]
    tool = {"type": "function", "function": {"name": "add"}}
    file = write(tmp_path, "a.jsonl", json.dumps({"messages": json.dumps(turns), "tools": json.dumps([tool]), "id": 1}))
    [item], how = read_items(file, [], None, None, Form())
    assert item.messages == [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"},
    ]
    assert item.tools == [tool] and item.text is None
    assert how.endswith("from messages and tools (not read: id)")
    write(tmp_path, "a.jsonl", json.dumps({"messages": [{"role": "developer", "content": "be brief"}, *turns]}))
    with pytest.raises(UserError, match="row 1, message 1: 'developer' is no role"):
        read_items(file, [], None, None, Form())


def test_what_is_no_model_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        UserError, match="without an export: let the run end, or give the folder that .*toolkit export .*/run writes"
    ):
        find_folder(str(tmp_path / "run"))
    with pytest.raises(UserError, match="a.csv is a file: give a run folder, an export or a model folder"):
        find_folder(write(tmp_path, "a.csv", "text\na\n"))


def options_for(folder: Path, file: str, **given: str) -> Options:
    """Of a run that was trained on a file with semicolons in cp1252."""
    (folder / "toolkit.json").write_text(json.dumps({"source_column": "text", "csv_delimiter": ";", "encoding": "cp1252"}))
    others: dict = {"texts": [], "column": None, "plain": False, "output": None, "batch_size_rows": None, "dtype": None}
    return Options(model=str(folder), file=file, settings={}, **others, **given)


def test_a_file_need_not_be_written_as_the_runs_was(tmp_path: Path) -> None:
    """It was read as the run's file without a way to say otherwise: Müller in UTF-8 became MÃ¼ller in silence."""
    file = write(tmp_path, "a.csv", "text;id\nMüller;1\n")
    [item], how = _read(options_for(tmp_path, file))
    assert item.text == "Müller" and how.endswith("from text (not read: id), read as utf-8")
    assert _read(options_for(tmp_path, file, encoding="cp1252"))[0][0].text == "MÃ¼ller"
    Path(file).write_text("text;id\nMüller;1\n", encoding="cp1252")
    [item], how = _read(options_for(tmp_path, file))
    assert item.text == "Müller" and how.endswith("from text (not read: id)")
    file = write(tmp_path, "b.csv", "text,id\nMüller,1\n")
    with pytest.raises(UserError, match=r"its header has commas between names: set --csv-delimiter ','"):
        _read(options_for(tmp_path, file))
    assert _read(options_for(tmp_path, file, csv_delimiter=","))[0][0].text == "Müller"
    with pytest.raises(UserError, match="--encoding is 'utf-9', which Python does not know"):
        _read(options_for(tmp_path, file, encoding="utf-9"))
