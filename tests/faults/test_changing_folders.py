"""The run folder, or a file of it, is removed under the run: it notices, and comes to its end, or ends with a sentence."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import attempt_with, run_with
from tests.faults.workers.faulty_recipe import wrap
from tests.recipes.test_best_weights import WORSENING
from tests.support.checkpoint_files import found_folder
from tests.support.workbench import Workbench, new_bench
from toolkit.errors import EXIT_USER_ERROR

CHANGES: dict[str, Any] = {
    "train__max_steps": 6,
    "checkpoint__every_steps": 2,
    "checkpoint__keep_last": 9,
    "eval__every_steps": 2,
    "eval__at_start": True,
    "log_row_ids": True,
}
TABLE = ["lead sentence", "constant", "after step 4", "after step 6"]


def remove(path: Path, step: int, in_save: bool = False) -> None:
    """Rank 0 removes a file or a folder when it begins a step, or once it has written its shards of the step's checkpoint."""
    from toolkit.checkpoint import save as checkpoint_writer
    from toolkit.distributed.comm import rank
    from toolkit.training import loop

    left = [1]

    def strike() -> None:
        if rank() == 0 and left:
            left.clear()
            print(f"removed {path}", flush=True)
            gone = path.rename(path.with_name(f"{path.name}.gone"))  # all of it at once
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()

    if in_save:
        wrap(checkpoint_writer, "describe_files", lambda folder, _: strike() if folder.stem == f"step-{step:08d}" else None)
    else:
        wrap(loop, "seed_all", lambda _, __, step_now, *___: strike() if step_now == step else None)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """The runs of this file; `all` loses its folder when step 4 begins."""
    bench = new_bench(tmp_path_factory, "changing")
    # Saves that training waits for: beside one, nobody knows which of the next steps' files are there by then.
    fault = partial(remove, bench.runs / "all", step=4)
    printed = run_with(bench, "all", fault, **CHANGES, checkpoint__async_save=False, exports=True)
    (bench.runs / "all.txt").write_text(printed)
    return bench


def steps(bench: Workbench, name: str, kind: str) -> list[int]:
    return [line["step"] for line in bench.lines(name, kind)]


def table_rows(printed: str) -> list[str]:
    """The first words of the rows of the table at a run's end."""
    table = printed.partition("% distinct")[2].partition("\n\n")[0].partition("\n")[2]
    return [line.partition("  ")[0].partition(' "')[0] for line in table.splitlines() if "  " in line]


def test_a_folder_that_is_removed_is_made_again(bench: Workbench) -> None:
    """What was there is lost; the run comes to its end, with every file that a run has."""
    run, printed = bench.runs / "all", (bench.runs / "all.txt").read_text()
    said = f"{run}/metrics.jsonl was removed or changed during the run: figures that it no longer has are lost"
    assert printed.count(said) == 1
    assert [steps(bench, "all", kind) for kind in ("train", "eval", "checkpoint")] == [[4, 5, 6], [4, 6], [4, 6]]
    assert table_rows(printed) == TABLE and "generated:" in printed
    assert bench.checkpoints("all") == ["step-00000004", "step-00000006"]
    assert found_folder(run, "auto") == (run / "checkpoints/step-00000006", [])
    for name in ("config.yaml", ".lock", "export/model.safetensors", "curves.png", "memory.json", "rows-00001.jsonl"):
        assert (run / name).exists(), name


def test_a_folder_that_is_removed_while_a_checkpoint_is_written(bench: Workbench) -> None:
    fault = partial(remove, bench.runs / "saving", step=4, in_save=True)
    outcome = attempt_with(bench, "saving", fault, **CHANGES)
    assert set(outcome.returncodes) == {EXIT_USER_ERROR}, outcome.stderr
    (said,) = [line for line in outcome.stderr.splitlines() if "could not be written" in line]
    assert f"checkpoint {bench.runs}/saving/checkpoints/step-00000004 could not be written: [Errno 2] No such file" in said


def test_a_best_checkpoint_that_is_removed_is_no_longer_the_best(bench: Workbench) -> None:
    """The next evaluated step is better than all that are left, and is kept."""
    changes = WORSENING | {"eval__early_stopping_patience": None, "export__weights": "last", "checkpoint__async_save": False}
    run_with(bench, "best", partial(remove, bench.runs / "best/checkpoints/step-00000001", step=2), **changes)
    losses = {line["step"]: line["loss"] for line in bench.lines("best", "eval") if line["step"]}
    assert sorted(losses, key=lambda step: losses[step])[:2] == [1, 2]
    assert bench.checkpoints("best") == ["step-00000002", "step-00000005"]


def test_a_start_without_the_figures_of_the_steps_before(bench: Workbench) -> None:
    """The checkpoint knows its own evaluation."""
    (bench.runs / "all/metrics.jsonl").unlink()
    (bench.runs / "all/predictions-6.jsonl").unlink()
    printed = run_with(bench, "all", **CHANGES, exports=True)
    assert "metrics.jsonl has no figures of earlier steps but the checkpoint's own evaluation: it was removed" in printed
    assert "nothing left to train: the run is complete at step 6\n" in printed
    assert table_rows(printed) == [row for row in TABLE if row != "after step 4"]
    assert "predictions-6.jsonl is missing, or is not what the evaluation wrote\n" in printed
    assert steps(bench, "all", "eval") == [6]
