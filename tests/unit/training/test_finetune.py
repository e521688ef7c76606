"""What a run prints beside an error of torch."""

from __future__ import annotations

import traceback

import pytest
import torch

from toolkit.training.finetune import FULL_MEMORY, _released_on_error


def test_below_an_out_of_memory_error_stands_what_to_do() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised, _released_on_error():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    printed = "".join(traceback.format_exception(raised.value))
    assert printed.endswith(f"OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n{FULL_MEMORY}\n")
