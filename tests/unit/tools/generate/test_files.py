"""Which texts `generate` finds in a file, and what it says where there are none. Its output is written by one process at a time,
and continued by the same command, whatever ended the last one."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.rows.example import Example
from toolkit.errors import UserError
from toolkit.export.usage import Usage
from toolkit.tools.generate.files import Options, append_texts, begin_output, end_output, open_rows, read_prompts
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


NUM_TEXTS = 300
WRITER = """
import sys
from pathlib import Path
from tests.unit.tools.generate.test_files import NUM_TEXTS, options, text
from toolkit.tools.generate.files import append_texts, begin_output, end_output
from toolkit.errors import UserError

output, how = Path(sys.argv[1]), sys.argv[2]
try:
    done = begin_output(options(output))
    print("started", flush=True)
    if how == "full disk":
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    for first in range(done, NUM_TEXTS, 5):
        append_texts(output, first, [text(row) for row in range(first, min(first + 5, NUM_TEXTS))], "")
        print("written", flush=True)
        if how == "waits":
            sys.stdin.readline()
    end_output(output)
except UserError as error:
    sys.exit(str(error))
"""


def options(output: Path, **given: Any) -> Options:
    names = [field.name for field in dataclasses.fields(Options)]
    return Options(**{**dict.fromkeys(names), "model": str(output.parent / "model"), "output": output, "texts": [], **given})


def text(row: int) -> str:
    return f"text {row} " * 20


def writer(output: Path, how: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(output), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(output: Path) -> list[tuple[int, str]]:
    return [(line["row"], line["prediction"]) for line in map(json.loads, output.read_text().splitlines())]


def test_of_two_starts_one_writes(tmp_path: Path) -> None:
    """Both used to, each all of its texts, and ended with status 0."""
    output = tmp_path / "out.jsonl"
    with writer(output, "waits") as first:
        assert first.stdout is not None and first.stdout.readline() == "started\n"
        with writer(output) as second:
            _, said = second.communicate()
        assert second.returncode == 1
        assert said == f"another process is writing --output {output}: wait for its end, or name another file\n"
        first.communicate("\n" * NUM_TEXTS)
    assert first.returncode == 0
    assert rows(output) == [(row + 1, text(row)) for row in range(NUM_TEXTS)]
    assert os.listdir(tmp_path) == ["out.jsonl"]
    with pytest.raises(UserError, match="exists, and is not what this command left unfinished: name another file$"):
        begin_output(options(output))
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_no_text_is_lost_by_kills_at_any_moment(tmp_path: Path) -> None:
    """The rewriting of what was there used to lose all of it."""
    output, moments = tmp_path / "out.jsonl", random.Random(0)
    num_kills, size, status = 0, 0, None
    while status != 0:
        with writer(output) as process:
            assert process.stdout is not None
            for _ in range(moments.randint(2, 30)):
                process.stdout.readline()
            process.kill()
        status = process.returncode
        num_kills += status != 0
        if moments.random() < 0.5 and status != 0:
            with output.open("ab") as file:
                file.write(b'{"row": 1, "predic')
        assert output.stat().st_size >= size, "it only grows, except for a torn line"
        size = output.read_bytes().rfind(b"\n") + 1
    assert num_kills >= 2
    assert rows(output) == [(row + 1, text(row)) for row in range(NUM_TEXTS)]


def test_what_is_there_is_never_written_again_and_an_output_that_is_removed_does_not_lose_its_first_texts(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert begin_output(options(output)) == 0
    append_texts(output, 0, ["one", "two\u2028"], "")
    before = output.read_bytes()
    file_number = output.stat().st_ino
    output.write_bytes(before + b'{"row": 3, "prediction": "thr')
    assert begin_output(options(output)) == 2
    assert output.read_bytes() == before and output.stat().st_ino == file_number
    append_texts(output, 2, ["three"], "")
    assert rows(output)[0] == (1, "one") and output.read_bytes().startswith(before)
    output.unlink()
    with pytest.raises(UserError, match="No such file or directory"):
        append_texts(output, 3, ["four"], "")
    assert not output.exists() and begin_output(options(output)) == 0
    end_output(output)
    assert not any(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("line", [b'{"row": 2, "prediction": "twice"}\n', b"\0\0\0\n", b"[]\n"])
def test_lines_that_are_not_the_rows_are_named(tmp_path: Path, line: bytes) -> None:
    """As two processes wrote them, or a power cut left them."""
    output = tmp_path / "out.jsonl"
    begin_output(options(output))
    append_texts(output, 0, ["one", "two"], "")
    with output.open("ab") as file:
        file.write(line)
    with pytest.raises(UserError, match=r", line 3: not .*: remove this line and all after it, and give the same command again$"):
        begin_output(options(output))


MODEL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
MODEL_FILES += ["adapter_model.safetensors", "base/config.json", "base/model.safetensors"]


@pytest.mark.parametrize("changed", ["max_new_tokens", "adapter_config.json", *MODEL_FILES])
def test_only_the_same_texts_are_continued(tmp_path: Path, changed: str) -> None:
    output, model = tmp_path / "out.jsonl", tmp_path / "model"
    (model / "base").mkdir(parents=True)
    for name in MODEL_FILES:
        (model / name).write_text("before")
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model / "base")}))
    begin_output(options(output, settings={"max_new_tokens": 3}))
    append_texts(output, 0, ["one"], "")
    again = options(output, settings={"max_new_tokens": 3}, batch_size_rows=7)
    assert begin_output(again) == 1
    if changed == "max_new_tokens":
        again = options(output, settings={"max_new_tokens": 4})
    else:
        with (model / changed).open("a") as file:
            file.write(" ")
    with pytest.raises(UserError, match="is not what this command left unfinished"):
        begin_output(again)
    assert sorted(os.listdir(tmp_path)) == ["model", "out.jsonl", "out.jsonl.unfinished"]


def test_a_full_disk_keeps_what_was_written(tmp_path: Path) -> None:
    """A limit of the file's size stands in for it: the write that reaches it tears a line."""
    output = tmp_path / "out.jsonl"
    with writer(output, "full disk") as process:
        _, said = process.communicate()
    assert said == f"--output {output} cannot be written (File too large): make room, and give the same command again\n"
    torn = output.read_bytes()
    assert len(torn) == 10_000 and not torn.endswith(b"\n")
    with writer(output) as process:
        process.communicate()
    assert output.read_bytes().startswith(torn[: torn.rfind(b"\n") + 1])
    assert rows(output) == [(row + 1, text(row)) for row in range(NUM_TEXTS)]
