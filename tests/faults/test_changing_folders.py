"""The run folder, or a file of it, is removed under the run: it notices, restores what it can, and comes to its end."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import check_same, run_with
from tests.faults.workers.faulty_recipe import wrap
from tests.recipes.test_best_weights import WORSENING
from tests.support.workbench import Workbench, new_bench
from toolkit.checkpoint.load import find_checkpoint

CHANGES: dict[str, Any] = {
    "train__max_steps": 6,
    "checkpoint__every_steps": 2,
    "checkpoint__keep_last": 9,
    "eval__every_steps": 2,
    "eval__at_start": True,
    "log_row_ids": True,
}
TABLE = ["lead sentence", "constant", "before training", "step 6"]


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
    """The runs of this file; `metrics` loses its `metrics.jsonl` when step 4 begins."""
    bench = new_bench(tmp_path_factory, "changing")
    fault = partial(remove, bench.runs / "metrics/metrics.jsonl", step=4)
    (bench.runs / "metrics.txt").write_text(run_with(bench, "metrics", fault, **CHANGES, exports=True))
    return bench


def steps(bench: Workbench, name: str, kind: str) -> list[int]:
    return [line["step"] for line in bench.lines(name, kind)]


def table_rows(printed: str) -> list[str]:
    """The first words of the rows of the table at a run's end."""
    table = printed.partition("held-out rows; ROUGE counts")[2].partition("\n\n")[0].partition("% distinct\n")[2]
    return [line.partition("  ")[0].partition(' "')[0] for line in table.splitlines()]


def test_metrics_are_restored_whole(bench: Workbench) -> None:
    printed = (bench.runs / "metrics.txt").read_text()
    # The save of step 2 may still be under way, and then the sentence goes on.
    assert len(re.findall(r"metrics\.jsonl was removed during the run: its \d lines are restored", printed)) == 1
    assert steps(bench, "metrics", "train") == [1, 2, 3, 4, 5, 6]
    assert steps(bench, "metrics", "eval") == [0, 2, 4, 6]
    assert steps(bench, "metrics", "checkpoint") == [2, 4, 6]
    assert table_rows(printed) == TABLE and "generated:" in printed
    assert (bench.runs / "metrics/export/model.safetensors").exists() and (bench.runs / "metrics/curves.png").exists()


def test_a_folder_that_is_removed_while_a_checkpoint_is_written(bench: Workbench) -> None:
    """What was there is lost; the run is none the less the same to its end, and the save under way is done again."""
    run = bench.runs / "all"
    fault = partial(remove, run, step=4, in_save=True)
    # A save that training waits for: beside it, nobody knows which of the next steps' files are there by then.
    printed = run_with(bench, "all", fault, **CHANGES, checkpoint__async_save=False, exports=True)
    (said,) = [line for line in printed.splitlines() if "was removed during the run" in line]
    assert "lines are restored; so are its lock and config.yaml, and what else was in the folder is gone" in said
    assert f"checkpoint {run}/checkpoints/step-00000004 was removed while it was written: it was written again" in printed
    assert table_rows(printed) == TABLE and "generated:" in printed
    assert bench.checkpoints("all") == ["step-00000004", "step-00000006"]
    assert find_checkpoint(run, "auto") == (run / "checkpoints/step-00000006", [])
    for name in ("config.yaml", ".lock", "export/model.safetensors", "curves.png", "memory.json"):
        assert (run / name).exists(), name
    for rows in ("rows-00000.jsonl", "rows-00001.jsonl"):  # those of steps before are lost
        assert (bench.runs / "metrics" / rows).read_text().endswith((run / rows).read_text())
        (run / rows).write_text((bench.runs / "metrics" / rows).read_text())
    check_same(bench, "all", "metrics", 6)


def test_a_best_checkpoint_that_is_removed_is_no_longer_the_best(bench: Workbench) -> None:
    """The next evaluated step is better than all that are left, and is kept."""
    changes = WORSENING | {"eval__early_stopping_patience": None, "export__weights": "last", "checkpoint__async_save": False}
    run_with(bench, "best", partial(remove, bench.runs / "best/checkpoints/step-00000001", step=2), **changes)
    losses = {line["step"]: line["loss"] for line in bench.lines("best", "eval") if line["step"]}
    assert sorted(losses, key=lambda step: losses[step])[:2] == [1, 2]
    assert bench.checkpoints("best") == ["step-00000002", "step-00000005"]


def test_a_start_without_the_figures_of_the_steps_before(bench: Workbench) -> None:
    """The checkpoint knows its own evaluation."""
    (bench.runs / "metrics/metrics.jsonl").unlink()
    (bench.runs / "metrics/predictions-6.jsonl").unlink()
    printed = run_with(bench, "metrics", **CHANGES, exports=True)
    assert "metrics.jsonl has no figures of earlier steps but the checkpoint's own evaluation: it was removed" in printed
    assert "nothing left to train: the run is complete at step 6\n" in printed
    assert table_rows(printed) == [row for row in TABLE if row != "before training"]
    assert "predictions-6.jsonl is missing, or is not what the evaluation wrote\n" in printed
    assert steps(bench, "metrics", "eval") == [6]
