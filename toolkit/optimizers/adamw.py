"""AdamW: its settings, how it is built, what it keeps, and an update written out.

The run config has these settings, so torch is imported at its first use, and the hints do not name it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat

from toolkit.private import private


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2)."""

    name = "adamw"
    state_bytes = 8
    """Bytes of state of a trainable parameter: two fp32 moments."""
    lr: PositiveFloat = 1e-3  # type: ignore[valid-type]
    """Peak learning rate."""
    beta1: ClosedUnitInterval = 0.9  # type: ignore[valid-type]
    """Decay rate of the first moment."""
    beta2: ClosedUnitInterval = 0.999  # type: ignore[valid-type]
    """Decay rate of the second moment."""
    eps: PositiveFloat = 1e-8  # type: ignore[valid-type]
    """Term added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0  # type: ignore[valid-type]
    """Decoupled weight decay. Norms and biases are excluded."""

    def build(self, groups: list[dict[str, Any]]) -> Any:
        """The torch optimizer of these groups of parameters, which are DTensors under FSDP2.

        Where its `found_inf` is 1, a step changes no weight and no state, and still allocates the state, filled: every trainable
        parameter has state after the first step (torch's SGD leaves its buffers unfilled then: fill them here). `fused` needs one
        kernel for all parameters; it reads `found_inf` on the device. Where a kernel has no strategy for DTensors, as SGD's,
        give it local shards, and keep DTensors in `state` under the parameters, also where torch writes state back after a step.
        """
        import torch

        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)
        optimizer._init_group = functools.partial(_collect_shards, private("_init_group", optimizer))  # type: ignore[method-assign]
        return optimizer

    def write_out(
        self, weight: Any, gradient: Any, state: dict[str, Any], step: int, lr: float, weight_decay: float
    ) -> tuple[Any, dict[str, Any]]:
        """The formula, for checks: the change of a weight in the 1-based `step`, and the state after it.

        Args:
            weight: fp64 array; `gradient` and what is in `state` have its shape.
            state: before the step, by torch's names; empty before the first.
        """
        import numpy as np

        first = self.beta1 * state.get("exp_avg", 0) + (1 - self.beta1) * gradient
        second = self.beta2 * state.get("exp_avg_sq", 0) + (1 - self.beta2) * gradient**2
        root = np.sqrt(second / (1 - self.beta2**step))
        change = -lr * weight_decay * weight - lr * first / (1 - self.beta1**step) / (root + self.eps)
        return change, {"exp_avg": first, "exp_avg_sq": second}


def _collect_shards(collect: Callable[..., bool], group: dict[str, Any], *collected: list[Any]) -> bool:
    """Collect what AdamW's kernel takes (torch/optim/adam.py:139), with this rank's shards in place of DTensors.

    A dispatch over DTensors takes the host 4 to 10 ms a step. Weights, gradients and moments stay DTensors, over the same memory.
    """
    from torch.distributed.tensor import DTensor

    has_complex = collect(group, *collected)
    for tensors in collected:
        tensors[:] = [private("_local_tensor", t) if isinstance(t, DTensor) else t for t in tensors]
    return has_complex
