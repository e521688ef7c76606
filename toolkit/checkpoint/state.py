"""The state of a run between steps, and the identity that a resume must match.

Tensors are those of the sharded model and its optimizer. The rest is a few numbers, which the manifest stores as JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from toolkit.checkpoint.dcp import Tensors
from toolkit.parallel.float8 import plain
from toolkit.parallel.units import clean_name
from toolkit.parallel.wrap import ShardedModel


@dataclass
class SkipHistory:
    """Skipped updates, and the spike guard's window."""

    num_skipped: int = 0
    num_in_a_row: int = 0
    """Updates skipped since the last one that was applied."""
    grad_norms: list[float | None] = field(default_factory=list)
    """The spike guard's window in memory order; None for a place not filled yet."""
    num_grad_norms: int = 0
    """Number of gradient norms that the window has ever received."""


@dataclass
class TrainState:
    """The state of a run between steps, without tensors."""

    step: int = 0
    """Number of completed steps."""
    best_value: float | None = None
    """Best `eval.best_metric` so far, without the evaluation before the first step; None: none measured yet."""
    num_evaluations_without_gain: int = 0
    start_value: float | None = None
    """`eval.best_metric` before the first step; None: not measured, or a NaN."""
    evaluation_due: bool = False
    """The evaluation at `step` is not finished; a resumed run starts with it."""
    skips: SkipHistory = field(default_factory=SkipHistory)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation at this step, if there was one."""

    def in_manifest(self) -> dict[str, Any]:
        """The state for the manifest, without step and metrics, which have fields of their own there."""
        return {key: value for key, value in asdict(self).items() if key not in ("step", "metrics")}

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> TrainState:
        """The state from a manifest."""
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
    """Hash of each frozen parameter, by name."""


def model_tensors(sharded: ShardedModel) -> Tensors:
    """This rank's shards of trainable parameters (each under one name) and buffers. Collective under FSDP1."""
    wanted = {clean_name(name) for name, p in sharded.unwrapped.named_parameters() if p.requires_grad}
    wanted |= {clean_name(name) for name, _ in sharded.unwrapped.named_buffers()}
    state: dict[str, Any] = get_model_state_dict(sharded.model, options=StateDictOptions())
    return {f"model.{name}": plain(tensor) for name, tensor in state.items() if name in wanted}


def state_tensors(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> Tensors:
    """All tensors of a run: the model's and the optimizer's moments. Hyperparameters follow from config and step. Collective."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(sharded.model, optimizer, options=options)
    moments = {f"optimizer.{name}": value for name, value in state.items() if name.startswith("state.")}
    return {**model_tensors(sharded), **moments}
