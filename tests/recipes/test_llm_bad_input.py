"""Bad input of the LLM recipe: one sentence, exit code 2 on every rank, no traceback, and as early as it can be known.

As in test_bad_input.py, the working run's model has no weights, and for the cases in `EARLY` there is no data file either.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.recipes.bad_input import Case, Files, WorkingRun, check, contents, model_files
from tests.recipes.llm_bad_input_cases import AFTER_A_RUN, DATA, EARLY, FROM_SCRATCH, LLAMA, MODEL, NEXT, NUM_CHATS, chats
from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.launch import LaunchResult
from toolkit.models.documents import longest_eager


@cache
def working_run() -> WorkingRun:
    """Chats, and a tokenizer with a template for them."""
    tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML)
    files: Files = model_files(LLAMA, "model")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files |= {f"model/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}
    return WorkingRun(
        recipe="llm",
        files=files,
        flags="--model.name_or_path {here}/model --data.source jsonl --data.files {here}/rows.jsonl "
        "--data.cache_dir {here}/cache --data.max_length_tokens 100 --data.eval_fraction 0 --run.output_dir {here}/runs "
        "--train.max_steps 2 --train.global_batch_size_rows 4 --train.micro_batch_size_rows 2 --eval.generate false",
    )


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LaunchResult]:
    """A folder with a run of two steps, on chats of which some are unusable and some too long; and how it went."""
    here = tmp_path_factory.mktemp("finished")
    endless = "hello there " * 200
    messy = [say("a", " "), say(endless, "b"), say("a", endless), say(endless, "b"), []]
    return here, working_run().launch(here, Case(flags=FROM_SCRATCH, files=chats(*messy), sentence=""))


@pytest.mark.parametrize("name", EARLY)
def test_refused_before_data_is_read(tmp_path: Path, name: str) -> None:
    check(tmp_path, EARLY[name], working_run().launch(tmp_path, EARLY[name]))


@pytest.mark.parametrize("name", DATA)
def test_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    working_run().write(tmp_path, chats())
    check(tmp_path, DATA[name], working_run().launch(tmp_path, DATA[name]))


@pytest.mark.parametrize("name", MODEL)
def test_refused_before_the_first_step(tmp_path: Path, model_folders: dict[str, Path], name: str) -> None:
    (tmp_path / "base").symlink_to(model_folders["llama"])
    check(tmp_path, MODEL[name], working_run().launch(tmp_path, MODEL[name]))
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


@pytest.mark.parametrize("name", AFTER_A_RUN)
def test_a_run_that_is_refused_changes_nothing_of_the_run_before(finished_run: tuple[Path, LaunchResult], name: str) -> None:
    here, _ = finished_run
    before = contents(here / "runs")
    check(here, AFTER_A_RUN[name], working_run().launch(here, AFTER_A_RUN[name]))
    assert contents(here / "runs") == before


def test_lost_and_cut_chats_are_counted_and_reported_and_the_run_goes_on(finished_run: tuple[Path, LaunchResult]) -> None:
    here, result = finished_run
    file, num_read, num_used = here / "rows.jsonl", NUM_CHATS + 5, NUM_CHATS + 3
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    said = [
        "2 processes, each on the CPU (",
        f"skipped 1 of {num_read} rows of {file} with an empty assistant turn (row {NEXT})",
        f"skipped 1 of {num_read} rows of {file} with an empty chat (row {NEXT + 4})",
        f"WARNING: cut 3 of {num_used} training rows to data.max_length_tokens = 100: ",
        f"2 of {num_used} conversations lost their whole completion to data.max_length_tokens = 100 and were left out "
        "(training rows)",
        f"data        rows.jsonl: {NUM_CHATS + 1} training rows of ",
        "evaluation  no held-out rows",
        "steps       2, 5 an epoch, each of ",
    ]
    lines = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    assert [sum(line.startswith(sentence) for line in lines) for sentence in said] == [1] * len(said), result.stdout
    how = f"eager up to {longest_eager('cpu', torch.bfloat16):,} tokens, else one causal sdpa each"
    assert f"; attention: sdpa, and packed rows document by document ({how})" in result.stdout
    assert (here / "runs/run/checkpoints/step-00000002/manifest.json").is_file()
