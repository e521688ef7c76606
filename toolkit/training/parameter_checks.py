"""Checks in every run that frozen parameters stay frozen, trainable ones train, and ranks add up gradients of the same ones.

They look at local shards and reduce the result over the ranks, because a shard may be empty on one of them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.distributed.comm import reduce_on_cpu
from toolkit.errors import UserError, first_of
from toolkit.parallel.units import clean_name, local_tensor
from toolkit.private import private

UPDATES_UNTIL_MOVED = 3
"""Every trainable parameter must differ after this many updates that are large enough to show."""
SMALLEST_SHOWING_LR = 1e-6
"""Adam moves a weight by about the learning rate; at 1.0 an fp32 weight cannot move by less than 6e-8."""
SURE_TO_MOVE_ELEMENTS = 1 << 20
"""A weight in bf16 moves at random: of fewer elements, it may be that none moves in so few updates of this rate."""

PART_ELEMENTS = 1 << 24
"""Integers that are summed at once; their copy in int64 takes 128 MiB."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class ParameterWatch:
    """Keeps a checksum of every parameter from the start of a run, in which `num_skipped` updates were skipped so far.
    Collective: build and call it on every rank."""

    def __init__(self, model: nn.Module, num_skipped: int) -> None:
        self.model, self.num_skipped = model, num_skipped
        self.start = _checksums(model)
        self.num_showing = 0

    def check_gradients(self) -> None:
        """After the first backward: every trainable has a gradient on some rank, no frozen one has; a `UserError` names others
        of the trainable, a `RuntimeError` those of the frozen ones. Collective."""
        flags = [p.grad is not None for p in self.model.parameters()]
        self._check(flags, frozen="got a gradient")
        try:
            self._check(flags, trainable="got no gradient in the first step")
        except RuntimeError as error:
            ways_out = "freeze them by model.freeze, or name other layers in adapter.target_modules"
            raise UserError(f"{error}: the loss does not reach them: {ways_out}") from None

    def check_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """After the first update: every trainable has optimizer state, and nothing else has; a `RuntimeError` names others.
        Collective."""
        flags = [bool(optimizer.state.get(p)) for p in self.model.parameters()]
        self._check(flags, trainable="have no optimizer state after the first update", frozen="have optimizer state")

    def count_update(self, lr: float) -> bool:
        """Count an update, skipped or not; return whether `check_moved` is due, because enough were large enough to show."""
        self.num_showing += lr >= SMALLEST_SHOWING_LR
        return lr >= SMALLEST_SHOWING_LR and self.num_showing == UPDATES_UNTIL_MOVED

    def check_moved(self, num_skipped: int) -> None:
        """After the first updates: every trainable differs from the start; a `RuntimeError` names others. `num_skipped` updates
        of the run were skipped so far: they moved nothing, so as many more are waited for. Collective."""
        self.num_showing -= num_skipped - self.num_skipped
        self.num_skipped = num_skipped
        if self.num_showing == UPDATES_UNTIL_MOVED:
            # Rows of new tokens rest until one of them occurs.
            rest = [
                ".trainable_tokens_delta." in name or (p.dtype == torch.bfloat16 and p.numel() < SURE_TO_MOVE_ELEMENTS)
                for name, p in self.model.named_parameters()
            ]
            flags = [moved or may for moved, may in zip(self._have_moved(), rest, strict=True)]
            self._check(flags, trainable=f"have not moved after {UPDATES_UNTIL_MOVED} updates")

    def check_frozen(self) -> None:
        """At the end: every frozen parameter is bit-identical to the start; a `RuntimeError` names others. Collective."""
        self._check(self._have_moved(), frozen="have changed")

    def _have_moved(self) -> list[bool]:
        return (_checksums(self.model) != self.start).any(dim=1).tolist()

    def _check(self, flags: list[bool], trainable: str | None = None, frozen: str | None = None) -> None:
        """Raise, in these words, if a trainable parameter's flag is set on no rank, or a frozen one's on any. Collective."""
        on_any = reduce_on_cpu(torch.tensor(flags, dtype=torch.int32), dist.ReduceOp.MAX).bool().tolist()
        named = list(zip(self.model.named_parameters(), on_any, strict=True))
        for what, is_trainable in ((trainable, True), (frozen, False)):
            names = [
                clean_name(name) for (name, p), is_set in named if p.requires_grad == is_trainable and is_set != is_trainable
            ]
            if names and what is not None:
                raise RuntimeError(f"{'trainable' if is_trainable else 'frozen'} parameters {what}: {first_of(names)}")


class ReductionWatch:
    """Notes which gradients FSDP2 reduces on this rank, in which micro-batch.

    It reduces the parameters of a unit that have a gradient, in order. Where ranks have those of different parameters, it adds
    these up, without an error if their sizes are equal (_fully_shard/_fsdp_collectives.py:522). DDP raises by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = [clean_name(name) for name, _ in model.named_parameters()]
        self.places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        self.noted = [0] * len(self.names)
        """By parameter, a hash of the micro-batches in which it was reduced."""
        self.micro_batch = (0, 0)
        """Step and index of the current one. The loop sets it."""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Context of a training."""
        reduce, module = private("foreach_reduce"), private("_fsdp_param_group")

        def note_and_reduce(params: list[Any], *args: Any, **more: Any) -> Any:
            for place in [self.places[id(param.sharded_param)] for param in params]:
                self.noted[place] = hash((self.noted[place], *self.micro_batch))
            return reduce(params, *args, **more)

        module.foreach_reduce = note_and_reduce
        try:
            yield
        finally:
            module.foreach_reduce = reduce

    def fingerprint(self) -> int:
        """Of all noted so far, in 63 bits: ranks that differ once stay different."""
        return hash(tuple(self.noted)) & (2**63 - 1)

    def check(self) -> None:
        """Raise a UserError with the parameters of which not all ranks noted the same, if any. Collective."""
        most, least = (reduce_on_cpu(torch.tensor(self.noted), op) for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN))
        if names := [name for name, differs in zip(self.names, (most != least).tolist(), strict=True) if differs]:
            how = "FSDP2 adds up gradients of different parameters then; freeze them (model.freeze), or let each forward use them"
            what = "some ranks had a gradient of these parameters in a micro-batch where others had none"
            raise UserError(f"{what}: {first_of(names)}: {how}", printed_by="run")


@torch.no_grad()
def _checksums(model: nn.Module) -> torch.Tensor:
    """Two int64 per parameter, shape (parameters, 2), on the CPU; 0 where this rank's shard is empty.

    The first is the xor of the local bytes, the second their sum, both taken as integers, as wide as fit: in the xor, equal
    elements that move alike cancel. Floating-point numbers would be cast to be summed, which took a CPU 20 times as long.
    """
    sums = []
    for parameter in model.parameters():
        local = local_tensor(parameter).detach()
        if local.numel():
            bits = local.flatten()
            places = bits.nbytes | int(bits.storage_offset()) * bits.itemsize
            bits = bits.view(next(width for width in _INTEGERS if places % width.itemsize == 0))
            # In parts, because a sum of narrower ones casts all of its input first (ATen/native/ReduceOpsUtils.h:457).
            parts = bits.split(PART_ELEMENTS)
            sums.append(torch.stack([torch.hash_tensor(bits).view(torch.int64), torch.stack([p.sum() for p in parts]).sum()]))
        else:
            sums.append(local.new_zeros(2, dtype=torch.int64))
    return torch.stack(sums).cpu()
