"""Weights in the compute dtype under a single process and DDP, as FSDP gathers them in it: one copy of each for a forward and its
backward, made block by block with one launch, in place of a cast at each operation. Only models whose own code mixes dtypes are
cast at each operation too, under every strategy."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.models.freeze import FEW_TOKENS, meta_inputs
from toolkit.models.patches.experts import experts_by_token
from toolkit.models.patches.masks import silence_padding
from toolkit.parallel.units import repeated_blocks
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


class ComputeCopies:
    """Puts copies of a model's floating-point parameters into their places, and takes them out again. Gradients reach the
    parameters in their own dtype. Inputs of blocks are cast, as before an FSDP unit, because buffers are not."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self.dtype, self._is_held = dtype, False
        # Each parameter once, where it is first: a block's backward casts the gradients of all that it owns.
        self._groups: list[list[nn.Parameter]] = []
        known: set[int] = set()
        for module in (*blocks, model):
            own = [p for p in module.parameters() if p.is_floating_point() and p.dtype != dtype and id(p) not in known]
            known |= set(map(id, own))
            # One launch copies tensors of one dtype (torch._foreach_copy_); a group without gradients needs no backward.
            for key in {(p.dtype, p.requires_grad) for p in own}:
                self._groups.append([p for p in own if (p.dtype, p.requires_grad) == key])
        self._places = [
            (own, name, parameter)
            for own in (private("_parameters", module) for module in model.modules())
            for name, parameter in own.items()
            if id(parameter) in known
        ]
        for block in blocks:
            block.register_forward_pre_hook(functools.partial(cast_inputs, dtype), with_kwargs=True)
        run_within(model, self.held)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context in which the model has the copies: around forward and backward, where blocks are recomputed, and around
        `generate`, which calls parts of the model. A forward outside of it makes its own."""
        if self._is_held:
            yield
            return
        copies: dict[int, torch.Tensor] = {}
        for group in self._groups:
            copies |= zip(map(id, group), _Copy.apply(self.dtype, *group), strict=True)
        self._is_held = True
        for parameters, name, parameter in self._places:
            parameters[name] = copies[id(parameter)]  # type: ignore[assignment]  # as torch.func.functional_call does
        try:
            yield
        finally:
            self._is_held = False
            for parameters, name, parameter in self._places:
                parameters[name] = parameter


def cast_inputs(dtype: torch.dtype, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook that casts floating tensors to `dtype`, also those in tuples, lists and dicts, as FSDP2's mixed precision
    does before a shard unit."""

    def cast(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(cast, value))
        if type(value) is dict:
            return {name: cast(each) for name, each in value.items()}
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


class _Copy(torch.autograd.Function):
    """Copies of equal tensors' dtype in another one, and in the backward their gradients in the tensors' own: a launch each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = tensors[0].dtype
        return tuple(_cast(tensors, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = iter(_cast([each for each in gradients if each is not None], ctx.dtype))
        return None, *(None if each is None else next(found) for each in gradients)


def _cast(tensors: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        private("_foreach_copy_")(copies, list(tensors))
    return copies


def mixes_dtypes(skeleton: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether matrix products of a forward get operands of two dtypes where parameters are in `dtype` and buffers stay: masks of
    GPT-1, decays of MiniMax. Seen on the meta device, as far as a forward runs there; False of a model that is not from
    transformers."""
    if not hasattr(skeleton, "config"):
        return False
    memo: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in skeleton.buffers()}
    for parameter in skeleton.parameters():
        own = dtype if parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, dtype=own, device="meta"), requires_grad=False)
    probe: Any = copy.deepcopy(skeleton, memo)
    silence_padding(probe)
    for block in repeated_blocks(probe).values():
        block.register_forward_pre_hook(functools.partial(cast_inputs, dtype), with_kwargs=True)
    with contextlib.suppress(Exception), torch.no_grad(), experts_by_token(probe), _Products() as products:
        probe(**meta_inputs(probe, FEW_TOKENS), use_cache=False)
    return products.have_two_dtypes


def run_within(model: nn.Module, build_context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Let each of the model's forwards run within a context of its own, in place."""
    forward: Any = model.forward

    @functools.wraps(forward)  # generate inspects its signature
    def within(*args: Any, **inputs: Any) -> Any:
        with build_context():
            return forward(*args, **inputs)

    model.forward = within


class _Products(TorchDispatchMode):
    have_two_dtypes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in PRODUCTS:
            self.have_two_dtypes |= len({each.dtype for each in args if isinstance(each, torch.Tensor)}) > 1
        if self.have_two_dtypes:
            raise TypeError("found")  # before torch prints what a plan's fake tensors do with it
        return func(*args, **(kwargs or {}))
