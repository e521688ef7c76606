"""Records every place where the host reads a tensor's value, which on a GPU waits for all work before it.

Real tensors on the CPU, because transformers takes fake ones for a trace and skips its reads. A read of a tensor that lies on
the host in a run on GPUs does not count: `toolkit/data/collate.py` runs on the host.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

READING_OPERATORS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select", "argwhere",
    "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
}  # fmt: skip
"""aten operators whose result, or the shape of it, the host must wait for."""
READING_METHODS = ("tolist", "numpy", "cpu")
"""They dispatch nothing for a tensor on the CPU; `item`, `bool`, `int` and `float` dispatch `_local_scalar_dense`."""
ON_HOST = "toolkit/data/collate.py"


@contextlib.contextmanager
def recorded(reads: Counter[str], *, in_bf16: bool = False) -> Iterator[None]:
    """Context that counts reads by place: `file:function what`, the innermost frame of a library that is not torch. In a run in
    fp32 grouped products read, and are not counted; in one in bf16 those that are left in fp32 are."""
    with contextlib.ExitStack() as patches:
        for name in READING_METHODS:
            patches.enter_context(patch.object(torch.Tensor, name, _reporting(getattr(torch.Tensor, name), name, reads)))
        patches.enter_context(patch.object(torch.Tensor, "to", _reporting_cpu(torch.Tensor.to, reads)))
        # torch.tensor(…, device=…) is a copy from memory that is not pinned: the host waits for it too.
        patches.enter_context(patch.object(torch, "tensor", _reporting_device(torch.tensor, reads)))
        patches.enter_context(_Operators(reads, in_bf16))
        yield


class _Operators(TorchDispatchMode):
    def __init__(self, reads: Counter[str], in_bf16: bool) -> None:
        super().__init__()
        self.reads, self.in_bf16 = reads, in_bf16

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # the call comes again with the local tensors
        name = func._schema.name.removeprefix("aten::")
        if name in READING_OPERATORS or (name == "repeat_interleave" and func._overloadname == "Tensor"):
            _note(self.reads, name)
        if name == "histc" and args[2:3] == args[3:4]:  # without limits, its range is that of the values
            _note(self.reads, name)
        # On a GPU, ATen/native/GroupedMMUtils.h:124 reads the groups' ends.
        if self.in_bf16 and name == "_grouped_mm" and args[0].dtype != torch.bfloat16:
            _note(self.reads, f"{name} in {args[0].dtype}")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                _note(self.reads, f"{name} by a boolean mask")
        return func(*args, **(kwargs or {}))


def _reporting(method, name: str, reads: Counter[str]):
    @functools.wraps(method)
    def report(tensor: torch.Tensor, *args, **kwargs):
        _note(reads, name)
        return method(tensor, *args, **kwargs)

    return report


def _reporting_cpu(to, reads: Counter[str]):
    """`to("cpu")`; a model's device is passed as an object."""

    @functools.wraps(to)
    def report(tensor: torch.Tensor, *args, **kwargs):
        if "cpu" in (*(arg for arg in args if isinstance(arg, str)), kwargs.get("device")):
            _note(reads, "to cpu")
        return to(tensor, *args, **kwargs)

    return report


def _reporting_device(function, reads: Counter[str]):
    @functools.wraps(function)
    def report(*args, **kwargs):
        if kwargs.get("device") is not None:
            _note(reads, "torch.tensor on a device")
        return function(*args, **kwargs)

    return report


def _note(reads: Counter[str], what: str) -> None:
    places = []
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith(ON_HOST):
            return
        if path != __file__:
            places.append((path, frame.f_code.co_name))
        frame = frame.f_back
    path, function = next(((p, f) for p, f in places if "/torch/" not in p), places[0])
    short = Path(path).parts
    reads[f"{'/'.join(short[-2:])}:{function} {what}"] += 1
