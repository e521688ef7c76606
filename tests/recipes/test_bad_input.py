"""Bad input of every kind: one sentence, exit code 2 on every rank, no traceback, and as early as it can be known.

Each case is a working run with one thing wrong, started as 2 real ranks under `fsdp2_cpu`. The working run would need weights,
which its model folder does not have: a case that gets its own sentence was refused before weights are read. The cases in `EARLY`
have no data file either: they are refused before that one is looked for.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.recipes.bad_input import TIMEOUT_S, Case, WorkingRun, check, contents, model_files
from tests.recipes.bad_input_cases import AFTER_A_RUN, DATA, EARLY, NUM_ROWS, ROWS, T5
from tests.support.launch import LaunchResult, launch, run_on_ranks
from toolkit.errors import UserError

WORKING_RUN = WorkingRun(
    recipe="t5",
    files=model_files(T5, "model"),
    flags="--model.name_or_path {here}/model --data.source jsonl --data.files {here}/rows.jsonl --data.cache_dir {here}/cache "
    "--data.max_source_length_tokens 60 --data.max_target_length_tokens 30 --data.eval_fraction 0 "
    "--run.output_dir {here}/runs --train.max_steps 2 --train.global_batch_size_rows 4 --train.micro_batch_size_rows 2 "
    "--eval.generate false",
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LaunchResult]:
    """A folder with a run of two steps, on rows of which some are unusable and some too long; and how it went."""
    here = tmp_path_factory.mktemp("finished")
    messy = [
        {"source": None, "target": "beta"},
        {"source": "alpha", "target": "  "},
        {"target": "beta"},
        {"source": "alpha " * 200, "target": "beta " * 50},
    ]
    WORKING_RUN.write(here, {"rows.jsonl": ROWS + "".join(json.dumps(row) + "\n" for row in messy)})
    return here, WORKING_RUN.launch(here, Case(flags="--model.from_scratch true", sentence=""))


@pytest.mark.parametrize("name", EARLY)
def test_refused_before_data_is_read(tmp_path: Path, name: str) -> None:
    check(tmp_path, EARLY[name], WORKING_RUN.launch(tmp_path, EARLY[name]))


@pytest.mark.parametrize("name", DATA)
def test_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    WORKING_RUN.write(tmp_path, {"rows.jsonl": ROWS})
    check(tmp_path, DATA[name], WORKING_RUN.launch(tmp_path, DATA[name]))
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


@pytest.mark.parametrize("name", AFTER_A_RUN)
def test_a_run_that_is_refused_changes_nothing_of_the_run_before(finished_run: tuple[Path, LaunchResult], name: str) -> None:
    here, _ = finished_run
    before = contents(here / "runs")
    check(here, AFTER_A_RUN[name], WORKING_RUN.launch(here, AFTER_A_RUN[name]))
    assert contents(here / "runs") == before


def test_a_damaged_checkpoint_is_not_resumed_by_name(finished_run: tuple[Path, LaunchResult]) -> None:
    here, _ = finished_run
    damaged = shutil.copytree(here / "runs/run/checkpoints/step-00000002", here / "damaged", dirs_exist_ok=True)
    content = (damaged / "rng-00001.safetensors").read_bytes()
    (damaged / "rng-00001.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    case = Case(
        flags="--model.from_scratch true --checkpoint.resume {here}/damaged",
        sentence="checkpoint.resume is {here}/damaged, but damaged/rng-00001.safetensors does not have the sha256 of the "
        "manifest: its content changed: give a whole checkpoint, or auto for the newest",
    )
    check(here, case, WORKING_RUN.launch(here, case))


def test_unusable_and_long_rows_are_counted_and_reported_and_the_run_goes_on(finished_run: tuple[Path, LaunchResult]) -> None:
    here, result = finished_run
    rows = here / "rows.jsonl"
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    said = [
        f"skipped 2 of {NUM_ROWS + 4} rows of {rows} with an empty source (first: rows {NUM_ROWS + 1}, {NUM_ROWS + 3})",
        f"skipped 1 of {NUM_ROWS + 4} rows of {rows} with an empty target (row {NUM_ROWS + 2})",
        f"WARNING: cut the source of 1 of {NUM_ROWS + 1} training rows to data.max_source_length_tokens = 60: ",
        f"WARNING: cut the target of 1 of {NUM_ROWS + 1} training rows to data.max_target_length_tokens = 30: ",
    ]
    lines = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    assert [sum(line.startswith(sentence) for line in lines) for sentence in said] == [1, 1, 1, 1], result.stdout
    assert (here / "runs/run/checkpoints/step-00000002/manifest.json").is_file()


def test_accumulation_as_a_flag_of_the_launcher() -> None:
    with pytest.raises(UserError, match="accelerate launch: gradient_accumulation_steps is 4: leave it out"):
        run_on_ranks(build_with_accumulation, preset="single", timeout_s=TIMEOUT_S)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    caught = run_on_ranks(disagree, preset="fsdp2_cpu", timeout_s=TIMEOUT_S)
    assert caught == ["the file is missing on rank 1's node"] * 2


def test_an_error_of_one_rank_stops_all_with_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.recipes.test_bad_input import fail_on_rank_1\n"
        "from toolkit.errors import exit_on_user_error\n"
        "with exit_on_user_error():\n"
        "    fail_on_rank_1()\n"
    )
    case = Case(sentence="the file is missing on rank 1's node")
    check(tmp_path, case, launch(script, [], preset="fsdp2_cpu", timeout_s=TIMEOUT_S))


def build_with_accumulation() -> None:
    """On a rank, as `accelerate launch --gradient_accumulation_steps 4` would start it."""
    from toolkit.launch.accelerator import build_accelerator

    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
    build_accelerator()


def fail_on_rank_1() -> None:
    """On a rank: all of them work together, one finds an error."""
    from toolkit.distributed.comm import on_all_ranks, rank
    from toolkit.launch.accelerator import build_accelerator

    def work() -> None:
        if rank() == 1:
            raise UserError("the file is missing on rank 1's node")

    build_accelerator()
    on_all_ranks(work)


def disagree() -> str:
    """On a rank: the sentence it got."""
    try:
        fail_on_rank_1()
    except UserError as error:
        return str(error)
    return "no error"
