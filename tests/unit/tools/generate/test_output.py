"""The output of `generate`: written by one process at a time, continued by the same command, whatever ended the last one."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.tools.generate.files import append_texts, begin_output, end_output
from toolkit.tools.generate.generate import Options

NUM_TEXTS = 300
WRITER = """
import sys
from pathlib import Path
from tests.unit.tools.generate.test_output import NUM_TEXTS, options, text
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
