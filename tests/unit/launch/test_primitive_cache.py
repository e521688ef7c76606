"""oneDNN's cache of compiled products is as large as the shapes that come again need: a rank grew by each new shape."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

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
def test_capacity_follows_the_shapes_unless_the_user_has_set_it(
    monkeypatch: pytest.MonkeyPatch, num_shapes: int, capacity: str
) -> None:
    for own, expected in (({}, capacity), ({CAPACITY: "7"}, "7")):
        monkeypatch.setattr(os, "environ", {**own})
        bound_primitive_cache(num_shapes)
        assert os.environ == {CAPACITY: expected}


def test_shapes_of_a_plan_are_those_of_its_padded_micro_batches_and_packs_in_one_row_have_that_of_their_sum() -> None:
    train = TrainConfig(global_batch_size_rows=4, micro_batch_size_rows=2, max_steps=9)
    for lengths, shapes in ((np.full(40, 9), {(2, 9, 1)}), (np.repeat([5, 9], 20), {(2, 5, 1), (2, 9, 1)})):
        plan = BatchPlan(lengths, np.ones(40, int), train, world_size=1)
        assert {*plan.shapes((plan.num_tokens, plan.num_label_tokens), 10, 0)} == shapes
    lengths = np.array([5, 4, 6, 3, 5, 3, 4, 5])
    train = replace(train, global_batch_size_rows=8)
    plan = BatchPlan(lengths, lengths - 1, train, world_size=1, pack_length_tokens=9)
    packs = [[row for pack in micro_batch.packs for row in pack] for micro_batch in plan.iterate(1, 1, 0)]
    sums = {(1, int(lengths[rows].sum()), int((lengths - 1)[rows].sum())) for rows in packs}
    assert max(map(len, packs)) > 2 and {*plan.shapes((lengths, lengths - 1), 1, 0, one_row=True)} == sums


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
