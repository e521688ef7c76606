"""oneDNN's cache of compiled products is as large as the shapes that come again need: a rank grew by each new shape."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.launch import REPOSITORY
from toolkit.config.schema import TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.launch.accelerator import bound_primitive_cache

CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


@pytest.mark.parametrize(
    ("num_shapes", "capacity"), [(1, "128"), (4, "128"), (5, "150"), (34, "1020"), (35, "128"), (3000, "128")]
)
def test_capacity_follows_the_shapes(monkeypatch: pytest.MonkeyPatch, num_shapes: int, capacity: str) -> None:
    monkeypatch.setattr(os, "environ", {})
    bound_primitive_cache(num_shapes)
    assert os.environ == {CAPACITY: capacity}


def test_the_users_own_capacity_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {CAPACITY: "7"})
    bound_primitive_cache(3000)
    assert os.environ == {CAPACITY: "7"}


def test_shapes_of_a_plan_are_those_of_its_padded_micro_batches() -> None:
    train = TrainConfig(global_batch_size_rows=4, micro_batch_size_rows=2, max_steps=9)
    plans = [BatchPlan(lengths, np.ones(40, int), train, world_size=1) for lengths in (np.full(40, 9), np.repeat([5, 9], 20))]
    assert [set(plan.shapes((plan.num_tokens, plan.num_label_tokens), 10, 0)) for plan in plans] == [
        {(2, 9, 1)},
        {(2, 5, 1), (2, 9, 1)},
    ]


def test_packs_that_become_one_row_have_the_shape_of_their_sum() -> None:
    train = TrainConfig(global_batch_size_rows=8, micro_batch_size_rows=2, max_steps=9)
    lengths = np.array([5, 4, 6, 3, 5, 3, 4, 5])
    plan = BatchPlan(lengths, lengths - 1, train, world_size=1, pack_length_tokens=9)
    packs = [[list(pack) for pack in micro_batch.packs] for micro_batch in plan.iterate(1, 1, 0)]
    sums = {
        (1, *(int(sum(counts[row] for pack in of_one for row in pack)) for counts in (lengths, lengths - 1))) for of_one in packs
    }
    assert max(map(len, packs)) == 2
    assert set(plan.shapes((lengths, lengths - 1), 1, 0, one_row=True)) == sums


def test_onednn_keeps_no_more_though_torch_is_imported_before() -> None:
    """200 shapes twice: in a cache of 128, which drops the oldest, none is there the second time; in oneDNN's own, all are."""
    script = (
        "import torch\n"
        "from toolkit.launch.accelerator import bound_primitive_cache\n"
        "bound_primitive_cache(3000)\n"
        "weight_3x3 = torch.ones(16, 16, 3, 3)\n"
        "for width in 2 * [*range(8, 208)]:\n"
        "    torch.nn.functional.conv2d(torch.ones(16, 16, 3, width), weight_3x3)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != CAPACITY}
    environment |= {"PYTHONPATH": str(REPOSITORY), "ONEDNN_VERBOSE": "profile_create", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    made = [line for line in done.stdout.splitlines() if "primitive,create:cache_miss,cpu,convolution" in line]
    assert len(made) == 2 * 200, done.stdout[-2000:]
