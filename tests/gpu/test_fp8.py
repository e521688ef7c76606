"""The preset `fsdp2_fp8` on 2 GPUs that multiply float8: real products, compiled blocks, nccl.

`tests/distributed/test_float8_training.py` runs the same checks on CPUs, where torchao emulates the products.
"""

from __future__ import annotations

from pathlib import Path

from tests.distributed.test_float8_training import BF16, PRESET, check_run, check_step, take_step
from tests.gpu.needs import needs_gpus
from tests.support.launch import run_on_ranks
from tests.support.small_run import train_and_record_gradients

ON_GPUS = {"num_processes": 2}
RESUME_TOLERANCE = 1e-3
"""Of a loss: kernels that add in no fixed order may round a float8 weight to its neighbour."""


@needs_gpus(2, capability=(8, 9))
def test_linears_of_blocks_compute_in_float8_and_masters_stay_fp32() -> None:
    float8 = run_on_ranks(take_step, preset="fsdp2_fp8", overrides=ON_GPUS, args=("llama",), timeout_s=300)[0]
    bf16 = run_on_ranks(take_step, preset=PRESET, overrides={**ON_GPUS, **BF16}, args=("llama",), timeout_s=300)[0]
    check_step(float8, bf16)


@needs_gpus(2, capability=(8, 9))
def test_a_run_learns_as_in_bf16_resumes_and_exports_plain_weights(tmp_path: Path) -> None:
    check_run(tmp_path, train_and_record_gradients, ON_GPUS, resume_tolerance=RESUME_TOLERANCE)
