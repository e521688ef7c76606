"""Sharded checkpoints that exist whole or not at all, and the exact resume from them.

    checkpoints/step-00000120/
      manifest.json            step, config, fingerprints, metrics, and every other file's size and sha256; written last
      state/                   trainable parameters, buffers and optimizer moments, sharded (DCP)
      rng-00000.safetensors    random state of each rank

The learning rate and the place in the batch plan are functions of the step; the manifest's step restores them.
Frozen parameters are not in it: the base is recorded by its hash.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from toolkit import __version__
from toolkit.adapter_files import base_name
from toolkit.config_sections import CheckpointConfig
from toolkit.distributed import agreed, barrier, broadcast_object, gather_objects, print_rank0, raise_together, rank, world_size
from toolkit.errors import UserError
from toolkit.manifest import best_checkpoint, commit, describe_files, find_checkpoint, prune, read_manifest, step_folder
from toolkit.random_state import load_random_state, save_random_state
from toolkit.shard_units import clean
from toolkit.sharding import ShardedModel
from toolkit.tensor_files import Tensors, load_tensors, save_tensors

MAY_CHANGE_ON_RESUME = (
    "train.max_steps", "train.num_epochs", "train.micro_batch_size_rows", "log_every_steps", "log_row_ids",
    "data.num_tokenizer_workers", "data.num_loader_workers", "data.cache_dir", "data.files", "data.eval_files",
    "eval.", "checkpoint.", "export.", "tracking.", "profile.", "run.",
)  # fmt: skip
"""Config keys (or sections) that a resumed run may set differently. Data files are compared by content, not by path."""


@dataclass
class TrainState:
    """What a run remembers between steps besides tensors."""

    step: int = 0
    """Optimizer updates done."""
    best_value: float | None = None
    """Best `eval.best_metric` so far; None where none was measured yet."""
    num_evaluations_without_gain: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures of the evaluation at this step, if there was one."""


@dataclass(frozen=True)
class Identity:
    """What must be the same for a resume to be exact."""

    config: dict[str, Any]
    """Dotted keys of the run config, and the `mixed_precision` of the accelerate YAML."""
    model_config_hash: str
    data_fingerprint: str
    frozen_hashes: dict[str, str]
    """Of each frozen parameter, by name."""


def save_checkpoint(
    run_folder: Path, sharded: ShardedModel, optimizer: torch.optim.Optimizer, state: TrainState, identity: Identity
) -> Path:
    """Write the checkpoint after `state.step` updates. Collective.

    Raises:
        UserError: on every rank, where a rank cannot write (disk full, folder read-only).
    """
    folder = step_folder(run_folder, state.step)
    unfinished = folder.with_name(f"{folder.name}.tmp")

    def start() -> None:
        if rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # left behind by a crash
            (unfinished / "state").mkdir(parents=True)

    _together(start, folder)

    def write() -> dict[str, dict[str, Any]]:
        tensors = _state_tensors(sharded, optimizer)
        names = [f"state/{name}" for name in save_tensors(tensors, unfinished / "state")]
        names.append(save_random_state(unfinished))
        return describe_files(unfinished, names)

    files = gather_objects(_together(write, folder))
    manifest = {
        "step": state.step,
        "world_size": world_size(),
        "versions": {"toolkit": __version__, "torch": torch.__version__},
        "identity": {
            "config": identity.config,
            "model_config_hash": identity.model_config_hash,
            "data_fingerprint": identity.data_fingerprint,
            "frozen_hashes": identity.frozen_hashes,
        },
        "state": {"best_value": state.best_value, "num_evaluations_without_gain": state.num_evaluations_without_gain},
        "metrics": state.metrics,
        "files": {name: about for part in files for name, about in part.items()},
    }
    _together(lambda: commit(unfinished, folder, manifest) if rank() == 0 else None, folder)
    return folder


def prune_checkpoints(run_folder: Path, config: CheckpointConfig, metric: str, higher_is_better: bool) -> None:
    """Remove what `keep_last` and `keep_best` do not keep. On rank 0; the others wait. Collective."""

    def remove() -> None:
        if rank() == 0:
            prune(run_folder, config.keep_last, config.keep_best, metric, higher_is_better)

    _together(remove, run_folder)


def choose_checkpoint(run_folder: Path, resume: str, config: dict[str, Any]) -> Path | None:
    """The checkpoint to go on from; tells about newer ones that are not valid. Rank 0 chooses. Collective.

    Args:
        config: as in `Identity`; a difference that forbids the resume is told here, before anything loads.

    Raises:
        UserError: there are checkpoints but none is valid; a named one is not valid or the run has gone on from it; `never`
            in a folder that holds checkpoints; another run's config.
    """
    error: UserError | None = None
    choice: Path | None = None
    refused: list[str] = []
    if rank() == 0:
        try:
            choice, refused = find_checkpoint(run_folder, resume)
            if choice is not None:
                _check_config(choice, read_manifest(choice)["identity"]["config"], config)
        except UserError as e:
            error = e
    raise_together(error)
    for sentence in refused:
        print_rank0(sentence)
    return broadcast_object(choice)


def load_checkpoint(folder: Path, sharded: ShardedModel, optimizer: torch.optim.Optimizer, identity: Identity) -> TrainState:
    """Load weights, moments and random state in place, on any number of ranks. Collective.

    Raises:
        UserError: run or model config, data or frozen base differ from those of the checkpoint; the sentence names what.
    """
    manifest = read_manifest(folder)
    agreed(lambda: _check_identity(folder, manifest["identity"], identity))
    options = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
    tensors = _state_tensors(sharded, optimizer)
    _load(tensors, folder)
    _put_back(sharded, tensors)
    everything: dict[str, Any] = get_optimizer_state_dict(sharded.model, optimizer, options=options)
    everything |= {name.removeprefix("optimizer."): t for name, t in tensors.items() if name.startswith("optimizer.")}
    set_optimizer_state_dict(sharded.model, optimizer, everything, options=options)
    load_random_state(folder, manifest["world_size"])
    return _train_state(manifest, identity)


def load_weights(folder: Path, sharded: ShardedModel) -> None:
    """Load only the parameters of a checkpoint, in place. Collective."""
    tensors = _model_tensors(sharded)
    _load(tensors, folder)
    _put_back(sharded, tensors)


def best_of_run(run_folder: Path, metric: str, higher_is_better: bool) -> Path:
    """The checkpoint with the best metric, as rank 0 sees it. Collective.

    Raises:
        UserError: no kept checkpoint has that metric.
    """
    best = broadcast_object(best_checkpoint(run_folder, metric, higher_is_better) if rank() == 0 else None)
    if best is None:
        raise UserError(f"export.weights is best, but no checkpoint in {run_folder} has {metric}, or only NaN: set it to last")
    return best


def _check_identity(folder: Path, theirs: dict[str, Any], ours: Identity) -> None:
    """Refuse a resume that would not go on with the same run."""
    _check_config(folder, theirs["config"], ours.config)
    if theirs.get("model_config_hash") != ours.model_config_hash:
        raise UserError(f"the model's config.json is not the one {folder} was trained with: {_ways_out()}")
    if theirs["data_fingerprint"] != ours.data_fingerprint:
        raise UserError(f"the data is not what {folder} was trained on: {_ways_out()}")
    frozen = theirs["frozen_hashes"]
    changed = [name for name in {**frozen, **ours.frozen_hashes} if frozen.get(name) != ours.frozen_hashes.get(name)]
    if changed:
        raise UserError(
            f"the frozen base weights are not those {folder} was trained on: {len(changed)} differ, {base_name(changed[0])} "
            "first; give the same base, or take another run.name"
        )


def _check_config(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for key, value in ours.items():
        if not key.startswith(MAY_CHANGE_ON_RESUME) and _without_files(theirs.get(key)) != _without_files(value):
            raise UserError(f"{key} is {value!r}, but {folder} was made with {theirs.get(key)!r}: {_ways_out()}")


def _without_files(value: Any) -> Any:
    """Entries of `data.mix` without their files, which are compared by content."""
    if not isinstance(value, list):
        return value
    return [{k: v for k, v in item.items() if k != "files"} if isinstance(item, dict) else item for item in value]


def _train_state(manifest: dict[str, Any], identity: Identity) -> TrainState:
    """The state of a checkpoint; the best value is forgotten where this run goes by another metric."""
    state = TrainState(step=manifest["step"], metrics=manifest["metrics"], **manifest["state"])
    if manifest["identity"]["config"]["eval.best_metric"] != identity.config["eval.best_metric"]:
        state.best_value, state.num_evaluations_without_gain = None, 0
    return state


def _ways_out() -> str:
    return "set it back to resume, or take another run.name (model.init_from starts a new run from these weights)"


def _model_tensors(sharded: ShardedModel) -> Tensors:
    """Trainable parameters (each once, whatever its aliases) and buffers, as this rank holds them. Collective under FSDP1."""
    wanted = {clean(name) for name, p in sharded.plain.named_parameters() if p.requires_grad}
    wanted |= {clean(name) for name, _ in sharded.plain.named_buffers()}
    state: dict[str, Any] = get_model_state_dict(sharded.model, options=StateDictOptions())
    return {f"model.{name}": tensor for name, tensor in state.items() if name in wanted}


def _state_tensors(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> Tensors:
    """Everything of a run that is a tensor. Hyperparameters are not: they follow from config and step. Collective."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = get_optimizer_state_dict(sharded.model, optimizer, options=options)
    moments = {f"optimizer.{name}": value for name, value in state.items() if name.startswith("state.")}
    return {**_model_tensors(sharded), **moments}


def _put_back(sharded: ShardedModel, tensors: Tensors) -> None:
    """Loaded tensors are views of the parameters but under FSDP1; aliases and frozen ones are not among them. Collective."""
    state: dict[str, Any] = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    set_model_state_dict(sharded.model, state, options=StateDictOptions(strict=False))


def _load(tensors: Tensors, folder: Path) -> None:
    """Fill `tensors` in place; where a rank cannot, stop all with one sentence. Collective."""
    error = None
    try:
        load_tensors(tensors, folder / "state")
    except (ValueError, OSError, CheckpointException) as e:
        error = UserError(f"checkpoint {folder} cannot be loaded: {' '.join(str(e).split())}")
    raise_together(error)


def _together(work: Any, folder: Path) -> Any:
    """Run `work` on every rank; where the file system refuses on any, stop all with one sentence. Collective."""

    def guarded() -> Any:
        try:
            return work()
        except (OSError, SafetensorError, CheckpointException) as error:
            raise UserError(f"checkpoint {folder} could not be written: {' '.join(str(error).split())[:300]}") from None

    result = agreed(guarded)
    barrier()
    return result
