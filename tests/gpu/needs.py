"""What a GPU check needs, and its reason to be skipped elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def needs_gpus(number: int) -> Callable[[Any], Any]:
    """Decorator: mark a test `gpu`, and skip it where torch sees fewer CUDA GPUs."""
    seen = torch.cuda.device_count()
    skip = pytest.mark.skipif(seen < number, reason=f"needs {number} CUDA GPUs, torch sees {seen}")
    return lambda test: pytest.mark.gpu(skip(test))
