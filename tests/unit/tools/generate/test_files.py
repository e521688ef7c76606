"""Which texts `generate` finds in a file, and what it says where there are none. Its output is written by one process at a time,
and continued by the same command, whatever ended the last one."""

import dataclasses
import io
import json
import multiprocessing
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.chats import say
from tests.support.refusals import refusal
from toolkit.data.rows.example import Example
from toolkit.errors import UserError
from toolkit.export.usage import Usage
from toolkit.files.json_lines import load_json_lines
from toolkit.tools.generate.files import Options, append_texts, begin_output, end_output, open_rows, read_prompts
from toolkit.tools.generate.model import find_folder, in_own_words


def options(output: Path = Path("out"), **given) -> Options:
    names = [field.name for field in dataclasses.fields(Options)]
    return Options(**{**dict.fromkeys(names), "model": str(output.parent / "model"), "output": output, "texts": [], **given})


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def read_rows(
    file: str | None, column: str | None = None, usage: Usage | None = None, *, is_chat: bool = True, **given
) -> tuple[list[tuple[str, Example]], str]:
    """The rows of `--file`, and how they are read."""
    with in_own_words():
        rows, num_rows = open_rows(options(file=file, column=column, **given), usage or Usage(), has_chat_template=is_chat)
        read = list(read_prompts(rows))
        assert num_rows in (None, len(read))
        return read, rows.reading


def test_the_runs_own_column_is_read_and_the_others_are_named(tmp_path):
    file = write(tmp_path, "a.csv", 'id,body,source\n1,"one, two",no\n2,three,no\n')
    rows, how = read_rows(file, usage=Usage(source_column="body"))
    assert [(where, row.prompt) for where, row in rows] == [(f"{file}, row 1", "one, two"), (f"{file}, row 2", "three")]
    assert how == "prompts, from body; not read: id, source"


TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("row", "messages", "how"),
    [
        (
            # As JSON text, and without OpenAI's weights.
            {"messages": json.dumps([*say("2?"), say("", "2")[1] | {"weight": 0}]), "tools": json.dumps([TOOL])},
            [("user", "2?")],
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
def test_chats_are_read_as_for_training_and_lose_the_answer_that_they_are_to_be_given(tmp_path, row, messages, how):
    file = write(tmp_path, "a.jsonl", json.dumps(row))
    [(_, read)], said = read_rows(file)
    assert read.messages == [{"role": role, "content": content} for role, content in messages]
    assert said == how and read.tools == ([TOOL] if "tools" in row else None)
    if "instruction" in row:
        [(_, read)], _ = read_rows(file, is_chat=False)
        assert str(read.prompt).endswith("### Instruction:\nadd\n\n### Input:\n1, 2\n\n### Response:\n")


def test_standard_input_has_a_text_a_line_and_what_only_a_file_has_is_refused(monkeypatch):
    """Such flags were ignored; and a byte order mark, as Windows' shells write it, was text."""

    def read(content: bytes, **given) -> list[str | None]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "cp1252"))
        rows, how = read_rows("-", usage=Usage(encoding="cp1252"), **given)
        assert how == ""
        return [row.prompt for _, row in rows]

    assert read("\ufeffone\r\n\ufeff zwei ü".encode()) == ["one", "\ufeff zwei ü"]
    assert read(b"M\xfcller\n", encoding="cp1252") == ["Müller"]
    sentence = "standard input, row 2: byte 0xfc is not valid UTF-8: give --encoding, or convert it"
    assert refusal(read, b"one\nM\xfcller\n") == sentence
    assert refusal(read, b"one", encoding="utf-16").startswith("standard input is not valid UTF-16 (")
    said = refusal(read_rows, None, texts=["M\udcfcller"])
    assert said.startswith("--text, row 1, column text: character 2 is half a surrogate pair, which is no text")
    for name, flag, given in (("column", "--column", "body"), ("csv_delimiter", "--csv-delimiter", ";")):
        assert f"{flag} is '{given}', but there is no --file with columns" in refusal(read, b"", **{name: given})


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
        ("a.jsonl", '{"conversations": [{"from": "gpt", "value": "a"}]}', None, r"row 1 is a row in which the assistant speaks"),
        ("a.csv", "text\nNaN\n", None, r"row 1 is a row with a missing prompt"),
    ],
)
def test_a_file_without_texts_is_refused(tmp_path, name, text, column, sentence):
    with pytest.raises(UserError, match=sentence):
        read_rows(write(tmp_path, name, text), column)


def test_what_is_no_model_is_said_so(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    said = refusal(find_folder, str(tmp_path / "run"))
    assert "without an export: let the run end, or give the folder that " in said and "/run writes" in said
    file = write(tmp_path, "a.csv", "text\na\n")
    assert "a.csv is a file: give a run folder, an export or a model folder" in refusal(find_folder, file)


def test_a_file_need_not_be_written_as_the_runs_was(tmp_path):
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
    assert "its header has commas between names: set --csv-delimiter ','" in refusal(read_rows, file, usage=usage)
    assert read_rows(file, usage=usage, csv_delimiter=",")[0][0][1].prompt == "Müller"
    assert "--encoding is 'utf-9', which Python does not know" in refusal(read_rows, file, usage=usage, encoding="utf-9")


NUM_TEXTS, PATIENCE_S = 300, 600
TEXTS = [f"text {row} " * 20 for row in range(NUM_TEXTS)]
ALL_LINES = [{"row": row, "prediction": text} for row, text in enumerate(TEXTS, start=1)]
UNFINISHED = "is not what this command left unfinished"


def write_all(output: Path, how: str, pipe) -> None:
    """As a process of `generate` does; the pipe gets each moment, and the sentence of a refusal."""
    try:
        done = begin_output(options(output))
        pipe.send("started")
        if how == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        for first in range(done, NUM_TEXTS, 5):
            append_texts(output, first, TEXTS[first : first + 5], "")
            pipe.send("written")
            if how == "waits":
                pipe.recv()
        end_output(output)
    except UserError as error:
        pipe.send(str(error))
        os._exit(1)


@contextmanager
def writer(output: Path, how: str = "") -> Iterator[tuple]:
    """A process that writes all texts, a fork of this one, and its pipe."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=write_all, args=(output, how, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours
        process.join(PATIENCE_S)
    finally:
        process.kill()
        process.join()


def told(pipe) -> Iterator[str]:
    """All that a writer sends, until it has ended."""
    with suppress(EOFError):
        while True:
            yield pipe.recv()


def test_of_two_starts_one_writes(tmp_path):
    """Both used to, each all of its texts, and ended with status 0."""
    output = tmp_path / "out.jsonl"
    with writer(output, "waits") as (first, pipe):
        assert pipe.recv() == "started"
        with writer(output) as (second, said):
            assert said.recv() == f"another process is writing --output {output}: wait for its end, or name another file"
        assert second.exitcode == 1
        for _ in range(NUM_TEXTS // 5):
            pipe.send("go on")
    assert first.exitcode == 0 and load_json_lines(output) == ALL_LINES
    assert os.listdir(tmp_path) == ["out.jsonl"]
    assert refusal(begin_output, options(output)) == f"--output {output} exists, and {UNFINISHED}: name another file"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_no_text_is_lost_by_kills_at_any_moment(tmp_path):
    """The rewriting of what was there used to lose all of it."""
    output, moments = tmp_path / "out.jsonl", random.Random(0)
    num_kills, size, status = 0, 0, None
    while status != 0:
        with writer(output) as (process, pipe):
            for _ in zip(range(moments.randint(2, 30)), told(pipe), strict=False):
                pass
            process.kill()
        status = process.exitcode
        num_kills += status != 0
        if moments.random() < 0.5 and status != 0:
            with output.open("ab") as file:
                file.write(b'{"row": 1, "predic')
        assert output.stat().st_size >= size, "it only grows, except for a torn line"
        size = output.read_bytes().rfind(b"\n") + 1
    assert num_kills >= 2 and load_json_lines(output) == ALL_LINES


def test_what_is_there_is_never_written_again_and_an_output_that_is_removed_does_not_lose_its_first_texts(tmp_path):
    """Lines that are not the rows', as two processes wrote them or a power cut left them, are named."""
    output = tmp_path / "out.jsonl"
    assert begin_output(options(output)) == 0
    append_texts(output, 0, ["one", "two\u2028"], "")
    before = output.read_bytes()
    file_number = output.stat().st_ino
    output.write_bytes(before + b'{"row": 3, "prediction": "thr')
    assert begin_output(options(output)) == 2
    assert output.read_bytes() == before and output.stat().st_ino == file_number
    for line in (b'{"row": 2, "prediction": "twice"}\n', b"\0\0\0\n", b"[]\n"):
        output.write_bytes(before + line)
        said = refusal(begin_output, options(output))
        assert ", line 3: not " in said and said.endswith(": remove this line and all after it, and give the same command again")
    output.write_bytes(before)
    append_texts(output, 2, ["three"], "")
    assert load_json_lines(output)[0] == {"row": 1, "prediction": "one"} and output.read_bytes().startswith(before)
    output.unlink()
    assert "No such file or directory" in refusal(append_texts, output, 3, ["four"], "")
    assert not output.exists() and begin_output(options(output)) == 0
    end_output(output)
    assert not any(tmp_path.glob("*.unfinished"))


MODEL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
MODEL_FILES += ["adapter_model.safetensors", "base/config.json", "base/model.safetensors"]


@pytest.mark.parametrize("changed", ["max_new_tokens", "adapter_config.json", *MODEL_FILES])
def test_only_the_same_texts_are_continued(tmp_path, changed):
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
    assert UNFINISHED in refusal(begin_output, again)
    assert sorted(os.listdir(tmp_path)) == ["model", "out.jsonl", "out.jsonl.unfinished"]


def test_a_full_disk_keeps_what_was_written(tmp_path):
    """A limit of the file's size stands in for it: the write that reaches it tears a line."""
    output = tmp_path / "out.jsonl"
    with writer(output, "full disk") as (_, pipe):
        *_, said = told(pipe)
    assert said == f"--output {output} cannot be written (File too large): make room, and give the same command again"
    torn = output.read_bytes()
    assert len(torn) == 10_000 and not torn.endswith(b"\n")
    with writer(output):
        pass
    assert output.read_bytes().startswith(torn[: torn.rfind(b"\n") + 1])
    assert load_json_lines(output) == ALL_LINES
