"""Bad input of every kind: one sentence, exit code 2 on every rank, no traceback, and as early as it can be known.

Each case is a working run with one thing wrong. One or two of each layer start as 2 real ranks, the others one after another in
one process. A working run would need weights, which its model folder does not have: a case that gets its own sentence was
refused before weights are read. Cases in `EARLY` and `ALONE` have no data file either, unless it is about that.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.recipes import llm_bad_input_cases as llm
from tests.recipes.bad_input import Case, Files, WorkingRun, check, check_said, contents, fill, model_files
from tests.recipes.bad_input_cases import AFTER_A_RUN, ALONE, DATA, EARLY, NUM_ROWS, ROWS, T5
from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.launch import LaunchResult, launch, run_on_ranks
from tests.support.small_run import run_in_this_process
from tests.support.workbench import RECIPES, output_of
from toolkit.errors import EXIT_USER_ERROR, UserError

WORKING_RUN = WorkingRun(
    recipe="t5",
    files=model_files(T5, "model"),
    flags="--model.name_or_path {here}/model --data.source jsonl --data.files {here}/rows.jsonl --data.cache_dir {here}/cache "
    "--data.max_source_length_tokens 60 --data.max_target_length_tokens 30 --data.eval_fraction 0 "
    "--run.output_dir {here}/runs --train.max_steps 2 --train.global_batch_size_rows 4 --train.micro_batch_size_rows 2 "
    "--eval.generate false",
)


@cache
def llm_run() -> WorkingRun:
    """Chats, and a tokenizer with a template for them."""
    files: Files = model_files(llm.LLAMA, "model")
    with tempfile.TemporaryDirectory() as folder:
        build_chat_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML).save_pretrained(folder)
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


@pytest.fixture(scope="module")
def finished_llm_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LaunchResult]:
    """The same on chats."""
    here = tmp_path_factory.mktemp("finished")
    endless = "hello there " * 200
    messy = [say("a", " "), say(endless, "b"), say("a", endless), say(endless, "b"), []]
    return here, llm_run().launch(here, Case(flags=llm.FROM_SCRATCH, files=llm.chats(*messy), sentence=""))


@pytest.mark.parametrize("name", EARLY)
def test_refused_before_data_is_read(tmp_path: Path, name: str) -> None:
    check(tmp_path, EARLY[name], WORKING_RUN.launch(tmp_path, EARLY[name]))


@pytest.mark.parametrize("name", DATA)
def test_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    WORKING_RUN.write(tmp_path, {"rows.jsonl": ROWS})
    check(tmp_path, DATA[name], WORKING_RUN.launch(tmp_path, DATA[name]))
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


@pytest.mark.parametrize("name", llm.MODEL)
def test_refused_before_the_first_step(tmp_path: Path, model_folders: dict[str, Path], name: str) -> None:
    (tmp_path / "base").symlink_to(model_folders["llama"])
    check(tmp_path, llm.MODEL[name], llm_run().launch(tmp_path, llm.MODEL[name]))
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


def test_images_that_are_not_there_are_refused(tmp_path: Path) -> None:
    flags = "--train.max_steps 2 --run.output_dir {here}/runs --data.source idx --data.folder {here}"
    argv = [fill(flag, tmp_path) for flag in flags.split()]
    sentence = "data.folder {here} has neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz: check the path"
    check(tmp_path, Case(sentence=sentence), launch(RECIPES / "mnist.py", argv, preset="fsdp2_cpu"))
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


@pytest.fixture(scope="module")
def refused_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """By case of either recipe, its folder, and the exit code and stderr of its run."""
    runs, folders = [], {}
    for working_run, cases in ((WORKING_RUN, ALONE), (llm_run(), llm.ALONE)):
        for name, case in cases.items():
            folders[name] = tmp_path_factory.mktemp("alone")
            runs.append((working_run.recipe, working_run.arguments(folders[name], case)))
    ended = run_on_ranks(run_each, preset="single_cpu", args=(runs,))[0]
    return {name: (folder, *end) for (name, folder), end in zip(folders.items(), ended, strict=True)}


def run_each(runs: list[tuple[str, list[str]]]) -> list[tuple[int, str]]:
    """In one process: how each run of a recipe ends, and what it says."""
    ended = []
    for recipe, argv in runs:
        with output_of() as said, pytest.raises(SystemExit) as end:
            run_in_this_process(recipe, argv)
        ended.append((int(end.value.code or 0), said[0]))
    return ended


@pytest.mark.parametrize("name", [*ALONE, *llm.ALONE])
def test_refused_in_one_process(refused_alone: dict[str, tuple[Path, int, str]], name: str) -> None:
    here, code, stderr = refused_alone[name]
    assert code == EXIT_USER_ERROR
    check_said(here, (ALONE | llm.ALONE)[name], stderr)
    assert not (here / "runs/run/metrics.jsonl").exists()


@pytest.mark.parametrize("name", AFTER_A_RUN)
def test_a_run_that_is_refused_changes_nothing_of_the_run_before(finished_run: tuple[Path, LaunchResult], name: str) -> None:
    here, _ = finished_run
    damaged = shutil.copytree(here / "runs/run/checkpoints/step-00000002", here / "damaged", dirs_exist_ok=True)
    content = (damaged / "rng-00001.safetensors").read_bytes()
    (damaged / "rng-00001.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    check_nothing_changes(here, AFTER_A_RUN[name], WORKING_RUN)


@pytest.mark.parametrize("name", llm.AFTER_A_RUN)
def test_a_refused_run_on_chats_changes_nothing_either(finished_llm_run: tuple[Path, LaunchResult], name: str) -> None:
    check_nothing_changes(finished_llm_run[0], llm.AFTER_A_RUN[name], llm_run())


def check_nothing_changes(here: Path, case: Case, working_run: WorkingRun) -> None:
    before = contents(here / "runs")
    check(here, case, working_run.launch(here, case))
    assert contents(here / "runs") == before


def test_unusable_and_long_rows_are_counted_and_reported_and_the_run_goes_on(finished_run: tuple[Path, LaunchResult]) -> None:
    rows = finished_run[0] / "rows.jsonl"
    check_reported(
        finished_run,
        f"skipped 2 of {NUM_ROWS + 4} rows of {rows} with an empty source (first: rows {NUM_ROWS + 1}, {NUM_ROWS + 3})",
        f"skipped 1 of {NUM_ROWS + 4} rows of {rows} with an empty target (row {NUM_ROWS + 2})",
        f"WARNING: cut the source of 1 of {NUM_ROWS + 1} training rows to data.max_source_length_tokens = 60: ",
        f"WARNING: cut the target of 1 of {NUM_ROWS + 1} training rows to data.max_target_length_tokens = 30: ",
    )


def test_lost_and_cut_chats_are_counted_and_reported_and_the_run_goes_on(finished_llm_run: tuple[Path, LaunchResult]) -> None:
    file, num_read, num_used = finished_llm_run[0] / "rows.jsonl", llm.NUM_CHATS + 5, llm.NUM_CHATS + 3
    check_reported(
        finished_llm_run,
        "2 processes, each on the CPU (",
        f"skipped 1 of {num_read} rows of {file} with an empty assistant turn (row {llm.NEXT})",
        f"skipped 1 of {num_read} rows of {file} with an empty chat (row {llm.NEXT + 4})",
        f"WARNING: cut 3 of {num_used} training rows to data.max_length_tokens = 100: ",
        f"2 of {num_used} conversations lost their whole completion to data.max_length_tokens = 100 and were left out "
        "(training rows)",
        f"data        rows.jsonl: {llm.NUM_CHATS + 1} training rows of ",
        "evaluation  no held-out rows",
        "steps       2, 5 an epoch, each of ",
    )
    assert "; attention: sdpa, and packed rows document by document (" in finished_llm_run[1].stdout


def check_reported(finished: tuple[Path, LaunchResult], *said: str) -> None:
    """A run ended well, and has said each of these once."""
    here, result = finished
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    lines = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    assert [sum(line.startswith(sentence) for line in lines) for sentence in said] == [1] * len(said), result.stdout
    assert (here / "runs/run/checkpoints/step-00000002/manifest.json").is_file()


def test_accumulation_as_a_flag_of_the_launcher() -> None:
    with pytest.raises(UserError, match="accelerate launch: gradient_accumulation_steps is 4: leave it out"):
        run_on_ranks(build_with_accumulation, preset="single_cpu")


def build_with_accumulation() -> None:
    """On a rank, as `accelerate launch --gradient_accumulation_steps 4` would start it."""
    from toolkit.launch.accelerator import build_accelerator

    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
    build_accelerator()


def test_an_error_of_one_rank_stops_all_with_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.recipes.test_bad_input import fail_on_rank_1\n"
        "from toolkit.errors import exit_on_user_error\n"
        "with exit_on_user_error():\n"
        "    fail_on_rank_1()\n"
    )
    case = Case(sentence="the file is missing on rank 1's node")
    check(tmp_path, case, launch(script, [], preset="fsdp2_cpu"))


def fail_on_rank_1() -> None:
    """On a rank: all of them work together, one finds an error."""
    from toolkit.distributed.comm import on_all_ranks, rank
    from toolkit.launch.accelerator import build_accelerator

    def work() -> None:
        if rank() == 1:
            raise UserError("the file is missing on rank 1's node")

    build_accelerator()
    on_all_ranks(work)
