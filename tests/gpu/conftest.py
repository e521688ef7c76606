"""Skips a test that needs more GPUs, or newer ones, than torch sees."""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (mark := item.get_closest_marker("gpu")) is None:
        return
    number, capability = mark.args
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < number:
        pytest.skip(f"needs {number} CUDA GPUs, torch sees {seen}")
    if (has := torch.cuda.get_device_capability()) < capability:
        pytest.skip(f"needs compute capability {capability}, {torch.cuda.get_device_name()} has {has}")
