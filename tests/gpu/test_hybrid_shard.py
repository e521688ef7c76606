"""FSDP1's hybrid sharding over nccl on 4 GPUs of one machine, two of which each rank sees: torch takes these for its machine.

On CPU it silently shards nothing and is refused; `tests/distributed/test_fsdp1_hybrid.py` tries the rest of it there.
"""

import os
from collections.abc import Callable
from functools import partial

import numpy as np

from tests.distributed.test_fsdp1_hybrid import check_shards, train_both
from tests.distributed.test_invariants import report_shards
from tests.gpu.conftest import needs_gpus
from tests.support.small_run import figures

PRESET = "fsdp1_hybrid_shard"
AS_TWO_MACHINES = {"num_machines": 1, "main_process_ip": None, "main_process_port": 0, "num_processes": 4}
RELATIVE_TOLERANCE = 1e-4  # fp32; cuBLAS chooses other kernels for other batch shapes


def on_two_gpus_a_machine(function: Callable, *args):
    """On every rank, before CUDA starts: see the GPUs of its machine only."""
    rank = int(os.environ["RANK"])
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1" if rank < 2 else "2,3"
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank % 2), "2"
    return function(*args)


@needs_gpus(4)
def test_each_machine_holds_the_whole_and_each_of_its_ranks_a_half():
    check_shards(partial(on_two_gpus_a_machine, report_shards), PRESET, AS_TWO_MACHINES)


@needs_gpus(4)
def test_it_trains_as_one_gpu(tmp_path):
    curves = [figures(lines, "train") for lines, _ in train_both(tmp_path, on_two_gpus_a_machine, PRESET, AS_TWO_MACHINES)]
    for figure in ("loss", "grad_norm"):
        np.testing.assert_allclose(curves[0][figure], curves[1][figure], rtol=RELATIVE_TOLERANCE, err_msg=figure)
