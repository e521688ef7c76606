"""What a GPU check needs, and its reason to be skipped elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def needs_gpus(number: int, capability: tuple[int, int] = (8, 0)) -> Callable[[Any], Any]:
    """Decorator: mark a test `gpu`, and skip it where torch sees fewer CUDA GPUs, or older ones; 8.0 is the first with bf16."""
    seen = torch.cuda.device_count()
    if seen < number:
        reason = f"needs {number} CUDA GPUs, torch sees {seen}"
    elif torch.cuda.get_device_capability() < capability:
        reason = f"needs compute capability {capability}, {torch.cuda.get_device_name()} has {torch.cuda.get_device_capability()}"
    else:
        reason = ""
    skip = pytest.mark.skipif(bool(reason), reason=reason or "the GPUs are here")
    return lambda test: pytest.mark.gpu(skip(test))
