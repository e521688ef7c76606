"""What a GPU check needs; `conftest.py` here skips it elsewhere, with the reason."""

from __future__ import annotations

import pytest


def needs_gpus(number: int, capability: tuple[int, int] = (8, 0)) -> pytest.MarkDecorator:
    """Decorator: mark a test `gpu`, for machines with so many CUDA GPUs of this capability or newer; 8.0 is the first with bf16.

    It asks torch nothing: ranks import the tests' modules before they set `CUDA_VISIBLE_DEVICES`, which CUDA reads once.
    """
    return pytest.mark.gpu(number, capability)
