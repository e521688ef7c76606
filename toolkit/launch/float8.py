"""Checks of what a machine needs for float8: torchao, and GPUs that multiply it."""

from __future__ import annotations

import importlib.util

import torch

from toolkit.errors import UserError

LEAST_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability of GPUs that multiply float8: Ada, Hopper and newer."""


def check_torchao() -> None:
    """Raise a UserError if torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError("mixed_precision is fp8, but torchao is not installed: run pip install 'torchao>=0.18', or write bf16")


def check_capability() -> None:
    """Raise a UserError if this process has no GPU that multiplies float8."""
    wanted = ".".join(map(str, LEAST_CAPABILITY))
    needed = f"mixed_precision is fp8, which needs a CUDA GPU of compute capability {wanted} (Ada, Hopper) or newer"
    if not torch.cuda.is_available():
        raise UserError(f"{needed}; torch sees none: write bf16, or take such a machine")
    if (capability := torch.cuda.get_device_capability()) < LEAST_CAPABILITY:
        has = f"{torch.cuda.get_device_name()} has {'.'.join(map(str, capability))}"
        raise UserError(f"{needed}; {has}: write bf16, or take such a machine")
