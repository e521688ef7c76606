"""What a GPU check needs; a test that needs more GPUs, or newer ones, than torch sees is skipped, with the reason."""

import pytest
import torch


def needs_gpus(number: int, capability: tuple[int, int] = (8, 0)) -> pytest.MarkDecorator:
    """Decorator: mark a test `gpu`, for machines with so many CUDA GPUs of this capability or newer; 8.0 is the first with bf16.

    It asks torch nothing: ranks import the tests' modules before they set `CUDA_VISIBLE_DEVICES`, which CUDA reads once.
    """
    return pytest.mark.gpu(number, capability)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (mark := item.get_closest_marker("gpu")) is None:
        return
    number, capability = mark.args
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < number:
        pytest.skip(f"needs {number} CUDA GPUs, torch sees {seen}")
    if (has := torch.cuda.get_device_capability()) < capability:
        pytest.skip(f"needs compute capability {capability}, {torch.cuda.get_device_name()} has {has}")
