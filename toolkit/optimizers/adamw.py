"""AdamW: its settings, how it is built, what it keeps, and an update written out.

The run config has these settings, so torch is imported at its first use, and the hints do not name it.
"""

import functools
from collections.abc import Callable
from typing import Any

from toolkit.optimizers.state import Layout, Part, Shape
from toolkit.private import private

TITLE = "AdamW"
DEFAULTS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
TAKES_FLAT = True


def layout(shape: Shape) -> Layout:
    """Two fp32 moments."""
    return {"exp_avg": Part(shape), "exp_avg_sq": Part(shape)}


def build(settings: Any, groups: list[dict[str, Any]]) -> Any:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) of torch.

    Where its `found_inf` is 1, a step changes no weight and no state, and still allocates the state, filled: every trainable
    parameter has state after the first step. `fused` needs one kernel for all parameters; it reads `found_inf` on the device.
    """
    import torch

    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
    optimizer._init_group = functools.partial(_collect_shards, private("_init_group", optimizer))  # type: ignore[method-assign]
    return optimizer


def write_out(
    settings: Any, weight: Any, gradient: Any, state: dict[str, Any], step: int, lr: float, weight_decay: float
) -> tuple[Any, dict[str, Any]]:
    """As `Optimizer.write_out`."""
    import numpy as np

    first = settings.beta1 * state.get("exp_avg", 0) + (1 - settings.beta1) * gradient
    second = settings.beta2 * state.get("exp_avg_sq", 0) + (1 - settings.beta2) * gradient**2
    root = np.sqrt(second / (1 - settings.beta2**step))
    change = -lr * weight_decay * weight - lr * first / (1 - settings.beta1**step) / (root + settings.eps)
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
