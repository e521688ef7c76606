"""What a run remembers from one step to the next, and what must be the same for another process to go on with it.

Tensors are those of the sharded model and its optimizer; everything else is a few numbers, which go into the manifest as JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from toolkit.checkpoint.dcp import Tensors
from toolkit.parallel.float8 import plain
from toolkit.parallel.units import clean
from toolkit.parallel.wrap import ShardedModel


@dataclass
class SkipHistory:
    """Updates that were not taken, and what the spike guard has seen."""

    num_skipped: int = 0
    num_in_a_row: int = 0
    """Skipped updates up to now without one in between that was taken."""
    grad_norms: list[float | None] = field(default_factory=list)
    """The spike guard's window as it lies in memory; None where no step has filled it yet."""
    num_grad_norms: int = 0
    """Gradient norms the window has ever taken in."""


@dataclass
class TrainState:
    """What a run remembers between steps besides tensors."""

    step: int = 0
    """Steps done."""
    best_value: float | None = None
    """Best `eval.best_metric` of the steps so far, the start not among them; None where none was measured yet."""
    num_evaluations_without_gain: int = 0
    start_value: float | None = None
    """`eval.best_metric` before the first step; None where it was not measured, or a NaN."""
    evaluation_due: bool = False
    """The evaluation at `step` was not finished: a resumed run starts with it."""
    skips: SkipHistory = field(default_factory=SkipHistory)
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures of the evaluation at this step, if there was one."""

    def in_manifest(self) -> dict[str, Any]:
        """All but step and metrics, which have places of their own in a manifest."""
        return {key: value for key, value in asdict(self).items() if key not in ("step", "metrics")}

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> TrainState:
        """As `in_manifest` gave it; what an older format lacks is as at the start of a run."""
        saved = dict(manifest["state"])
        skips = SkipHistory(**saved.pop("skips", {}))
        return cls(step=manifest["step"], metrics=dict(manifest["metrics"]), skips=skips, **saved)


@dataclass(frozen=True)
class Identity:
    """What must be the same for a resume to be exact."""

    config: dict[str, Any]
    """Dotted keys of the run config, and the `mixed_precision` of the accelerate YAML."""
    model_config_hash: str
    data_fingerprint: str
    frozen_hashes: dict[str, str]
    """Of each frozen parameter, by name."""


def model_tensors(sharded: ShardedModel) -> Tensors:
    """Trainable parameters (each once, whatever its aliases) and buffers, as this rank holds them. Collective under FSDP1."""
    wanted = {clean(name) for name, p in sharded.plain.named_parameters() if p.requires_grad}
    wanted |= {clean(name) for name, _ in sharded.plain.named_buffers()}
    state: dict[str, Any] = get_model_state_dict(sharded.model, options=StateDictOptions())
    return {f"model.{name}": plain(tensor) for name, tensor in state.items() if name in wanted}


def state_tensors(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> Tensors:
    """Everything of a run that is a tensor. Hyperparameters are not: they follow from config and step. Collective."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(sharded.model, optimizer, options=options)
    moments = {f"optimizer.{name}": value for name, value in state.items() if name.startswith("state.")}
    return {**model_tensors(sharded), **moments}
