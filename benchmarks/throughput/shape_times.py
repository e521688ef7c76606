"""Times sdpa's forward and backward on shapes that are new, and on the same ones again, with cuDNN's kernel and without.

python -m benchmarks.throughput.shape_times
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from benchmarks.measuring import build_parser
from toolkit.distributed.device import synchronize
from toolkit.launch.accelerator import cudnn_attention

HEADS, HEAD_SIZE, ROWS = 16, 64, 8
LENGTHS = range(136, 392, 8)


def main() -> None:
    build_parser("Time sdpa on new and on repeated shapes; it needs a GPU.").parse_args()
    for allowed in (True, False):
        new_us, repeated_us = measure(torch.device("cuda"), allowed=allowed)
        print(describe(new_us, repeated_us, allowed=allowed))


def measure(device: torch.device, *, allowed: bool, lengths: range = LENGTHS) -> tuple[int, int]:
    """Median microseconds of a forward and backward on a new shape, and on one that was there before."""
    with cudnn_attention(allowed):
        attend(device, lengths[0] - 8)  # what loads once
        new_us, repeated_us = ([attend(device, length) for length in lengths] for _ in range(2))
    return round(statistics.median(new_us)), round(statistics.median(repeated_us))


def describe(new_us: int, repeated_us: int, *, allowed: bool) -> str:
    """The line that `make gpu` expects."""
    return f"{'with' if allowed else 'without'} cuDNN a new shape takes {new_us} us, a repeated one {repeated_us} us"


def attend(device: torch.device, length: int) -> float:
    """Microseconds of attention with a mask of padding, as an encoder calls it."""
    states = torch.randn(3, ROWS, HEADS, length, HEAD_SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(ROWS, 1, 1, length, device=device, dtype=torch.bool)
    synchronize(device)
    start_s = time.perf_counter()
    F.scaled_dot_product_attention(*states, attn_mask=mask).sum().backward()
    synchronize(device)
    return 1e6 * (time.perf_counter() - start_s)


if __name__ == "__main__":
    main()
