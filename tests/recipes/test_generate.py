"""`generate` writes what the evaluation predicted, for any batch size and number of processes."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY, launch
from tests.support.model_folders import save_jsonl
from tests.support.python_in_card import python_in_card, texts_of_python
from tests.support.workbench import FP32, call_toolkit
from toolkit.files.json_lines import load_json_lines
from toolkit.tools.generate import generate as command
from toolkit.tools.generate.model import Generator

CHATML = REPOSITORY / "recipes" / "chat_templates" / "chatml_generation.jinja"
GENERATES = {"eval__max_new_tokens": 6, "eval__num_beams": 2, "eval__no_repeat_ngram_size": 2}


def texts(output: Path) -> list[str]:
    lines = load_json_lines(output)
    assert [line["row"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["prediction"] for line in lines]


def test_summaries_are_those_of_the_evaluation(workbench, tmp_path):
    rows = load_json_lines(workbench.data / "rows.jsonl")
    held_out = save_jsonl(tmp_path / "held_out.jsonl", rows[:7])
    options = {"data__prefix": "sum: ", "data__max_source_length_tokens": 16, "eval__num_rows": None, "eval__batch_size_rows": 4}
    printed_by_run = workbench.run("run", data__eval_files=held_out, **options, **GENERATES)
    run = tmp_path / "run"
    expected = [line["prediction"] for line in load_json_lines(run / "predictions-3.jsonl")]
    assert len(expected) == 7 and len(set(expected)) > 1

    # One process, batches of other sizes; the labels beside the sources are not read.
    for size in (1, 5):
        output = tmp_path / f"{size}.jsonl"
        assert call_toolkit("generate", run, "--file", held_out, "--output", output, "--batch-size-rows", size) == 0
        assert texts(output) == expected
    # Two processes.
    output = tmp_path / "two.jsonl"
    words = ["generate", run, "--file", held_out, "--output", output]
    result = launch(REPOSITORY / "toolkit" / "__main__.py", list(map(str, words)), preset="ddp_cpu", overrides=FP32)
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    assert texts(output) == expected

    # A finished output is not overwritten.
    assert call_toolkit("generate", run, "--file", held_out, "--output", output) == 2

    # The Python that the card and the run's end show does the same with plain transformers.
    lines = python_in_card(run / "export")
    assert lines.replace("folder, texts = '.'", f"folder, texts = '{run}/export'") in printed_by_run
    assert texts_of_python(lines, run / "export", [row["source"] for row in rows[:7]]) == expected


@pytest.mark.parametrize("form", ["chat", "prompt"])
def test_answers_are_those_of_the_evaluation(llm_workbench, tmp_path, monkeypatch, capsys, form):
    rows = pairs = load_json_lines(llm_workbench.data / "prompts.jsonl")
    if form == "chat":
        roles = ("user", "prompt"), ("assistant", "completion")
        rows = [{"messages": [{"role": role, "content": pair[side].strip()} for role, side in roles]} for pair in pairs]
    train, held_out = save_jsonl(tmp_path / "train.jsonl", rows[7:]), save_jsonl(tmp_path / "held_out.jsonl", rows[:7])
    options = {"data__max_length_tokens": 256, "eval__num_rows": None, "eval__batch_size_rows": 4, "data__chat_template": CHATML}
    if form == "prompt":
        options |= {"adapter__method": "lora", "adapter__rank": 4, "optim__lr": 1e-2}
    printed_by_run = llm_workbench.run("run", data__files=train, data__eval_files=held_out, **options, **GENERATES)
    run = tmp_path / "run"
    plain = ("--plain",) if form == "prompt" else ()
    use = " ".join(["--file FILE.csv --output OUT.jsonl", *plain])
    assert f"use it: python -m toolkit generate {run}/export {use}\n" in printed_by_run
    flags = ("--batch-size-rows", 3, *plain)
    assert call_toolkit("generate", run, "--file", held_out, "--output", tmp_path / "out.jsonl", *flags) == 0
    expected = [line["prediction"] for line in load_json_lines(run / "predictions-3.jsonl")]
    assert [text.strip() for text in texts(tmp_path / "out.jsonl")] == [text.strip() for text in expected]
    prompts = [pair["prompt"].strip() if form == "chat" else pair["prompt"] for pair in pairs[:7]]
    assert texts_of_python(python_in_card(run / "export"), run / "export", prompts) == expected
    # From the command line, only the answer is on stdout.
    capsys.readouterr()
    assert call_toolkit("generate", run, "--text", "hello\n", "--max-new-tokens", 2) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 and "max_new_tokens 2, num_beams 2" in printed.err
    # A reader that has seen enough ends it: the first batch of three is generated, the others are not.
    generated: list[int] = []
    generate = Generator.generate
    monkeypatch.setattr(Generator, "generate", lambda self, rows: generated.append(len(rows)) or generate(self, rows))
    monkeypatch.setattr(command, "BATCHES_AT_ONCE", 1)
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as within, os.fdopen(writing, "w") as closed_pipe:
        within.setattr(sys, "stdout", closed_pipe)
        assert call_toolkit("generate", run, "--file", held_out, "--batch-size-rows", 3, "--max-new-tokens", 1) == 0
    assert generated == [3]
