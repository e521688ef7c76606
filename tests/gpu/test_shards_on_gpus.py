"""Sharded loading onto GPUs and, under CPU offload, into pinned memory; `tests/distributed/test_weights.py` on CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_weights import COMPARED, HYBRID_CASES, build_folders, load_both_ways
from tests.gpu.needs import needs_gpus
from tests.support.launch import run_on_ranks


@needs_gpus(2)
@pytest.mark.parametrize("preset", ["fsdp2_full_shard", "fsdp2_offload"])
def test_shards_on_the_device_are_what_transformers_loads(tmp_path: Path, preset: str) -> None:
    (tmp_path / "models").mkdir()
    on_cpu = {"mixed_precision": "no", "use_cpu": True}
    folders = run_on_ranks(build_folders, preset="single", overrides=on_cpu, args=(tmp_path / "models",))[0]
    found = run_on_ranks(load_both_ways, preset=preset, num_processes=2, args=(folders, HYBRID_CASES), timeout_s=240)
    for case in HYBRID_CASES:
        assert sum(sum(of_rank[case]["reads"]) for of_rank in found) == found[0][case]["num_parameters"]
        assert all(of_rank[case]["differing"] == dict.fromkeys(COMPARED, []) for of_rank in found)
