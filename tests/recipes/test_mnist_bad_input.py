"""What is wrong with images or setup is one sentence on 2 real ranks, and nothing is left of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.bad_input import Case, check, fill
from tests.support.launch import launch
from tests.support.workbench import RECIPES

CASES = {
    "idx-file-missing": Case(
        flags="--data.source idx --data.folder {here}",
        sentence="data.folder {here} has neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz: check the path",
    ),
    "fewer-rows-than-ranks": Case(
        flags="--train.global_batch_size_rows 1",
        preset="ddp_cpu",
        sentence="train.global_batch_size_rows is 1, smaller than the 2 processes: give each at least one row, 2 or more",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_on_every_rank(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    flags = f"--train.max_steps 2 --run.output_dir {{here}}/runs {case.flags}"
    argv = [fill(flag, tmp_path) for flag in flags.split()]
    check(tmp_path, case, launch(RECIPES / "mnist.py", argv, preset=case.preset, overrides=case.overrides))
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))
