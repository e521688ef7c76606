"""Chooses the checkpoint to resume from, and resumes from it exactly; and reads the weights of `model.init_from`, another run's.
docs/checkpoints.md names the files.

The learning rate and the position in the batch plan are functions of the manifest's step. Frozen parameters are not saved;
the manifest has their hashes.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from toolkit.checkpoint.dcp import Tensors, load_tensors, stored_names
from toolkit.checkpoint.find import BestMetric, complete_checkpoints, find_checkpoint, newest_valid, rank_checkpoints
from toolkit.checkpoint.manifest import Checkpoint, Unread, read_checkpoint, read_manifest
from toolkit.checkpoint.state import Identity, TrainState, model_tensors, state_tensors
from toolkit.config.data import MixEntry
from toolkit.config.facts import facts_of
from toolkit.config.paths import split_own_source
from toolkit.config.validate import FILE_SOURCES
from toolkit.distributed.comm import on_all_ranks, on_rank_0
from toolkit.distributed.rng import load_random_state
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError
from toolkit.files.durable import denials_named
from toolkit.launch.rank_consistency import installed_versions
from toolkit.models.config import check_weight_files
from toolkit.models.lora_files import CONFIG_FILE, base_name
from toolkit.models.tensor_reader import TensorReaders, fill_buffers, hash_readers, state_readers
from toolkit.parallel.float8 import refresh_scales
from toolkit.parallel.wrap import ShardedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("toolkit")

ADDED_SINCE = {"optim.name": "adamw", "optim.router_aux_loss": "off", "model.trained_dtype": "float32"}
"""What a checkpoint without the key was made with."""


def choose_checkpoint(run_folder: Path, resume: str, settings: dict[str, Any], config_class: type) -> Checkpoint | None:
    """The checkpoint to resume from, chosen by rank 0; prints which newer ones are not valid, and why. Collective.

    `settings`, of `Identity.config`, are compared here, so that a wrong config fails before anything loads; fields of
    `config_class` say which may change. Errors are `UserError`s on every rank, those of `find_checkpoint` and `check_settings`.
    """

    def choose() -> tuple[Checkpoint | None, list[str]]:
        choice, refused = find_checkpoint(run_folder, resume)
        if choice is not None:
            check_settings(choice, settings, config_class)
        return choice, refused

    choice, refused = on_rank_0(choose)
    for sentence in refused:
        logger.warning(sentence)
    return choice


def check_settings(checkpoint: Checkpoint, settings: dict[str, Any], config_class: type) -> None:
    """Refuse to resume with settings other than the checkpoint's, except fields of the config that may change: a `UserError`
    names the first. Data is compared by its tokens, not by its files."""
    free = {key for key, facts in facts_of(config_class).items() if facts.resume}
    for key, value in settings.items():
        # One added since counts as None, a number as 0.
        before = checkpoint.settings.get(key, ADDED_SINCE.get(key, value if value == 0 else None))
        if key not in free and _without_places(before) != _without_places(value):
            where = " in the accelerate YAML ('no' without one)" if key == "mixed_precision" else ""
            raise UserError(f"{key} is {value!r}, but {checkpoint.folder} was made with {before!r}: {_remedies(where)}")


def load_checkpoint(
    checkpoint: Checkpoint, sharded: ShardedModel, optimizer: torch.optim.Optimizer, identity: Identity
) -> TrainState:
    """Load weights, moments and random state in place, on any number of ranks. Collective. What `check_identity` refuses, or a
    checkpoint that cannot be read, is a `UserError` on every rank."""
    state = on_all_ranks(lambda: check_identity(checkpoint, identity))
    tensors = load_weights(checkpoint.folder, sharded, optimizer)
    # The checkpoint has no hyperparameters: take those of the optimizer.
    options = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)
    everything: dict[str, Any] = get_optimizer_state_dict(sharded.model, optimizer, options=options)
    everything |= {name.removeprefix("optimizer."): t for name, t in tensors.items() if name.startswith("optimizer.")}
    set_optimizer_state_dict(sharded.model, optimizer, everything, options=options)
    load_random_state(checkpoint.folder, checkpoint.manifest["world_size"])
    return state


def load_weights(folder: Path, sharded: ShardedModel, optimizer: torch.optim.Optimizer | None = None) -> Tensors:
    """Load a checkpoint's parameters and buffers in place; returns them, with the moments of `optimizer`, if given. One that
    cannot be read is a `UserError` on every rank. Collective."""
    enter_phase("loading the checkpoint")  # FSDP1 gathers over the device here, where waiting takes a core like work
    tensors = model_tensors(sharded) if optimizer is None else state_tensors(sharded, optimizer)
    enter_phase("loading the checkpoint", counts_cpu=True)
    load_tensors(tensors, folder / "state", f"checkpoint {folder} cannot be loaded")
    enter_phase("loading the checkpoint")
    # Only under FSDP1 are they not views of the parameters already.
    state: dict[str, Any] = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    set_model_state_dict(sharded.model, state, options=StateDictOptions(strict=False))
    refresh_scales(sharded.model)
    return tensors


def forget_unequal(state: TrainState, manifest: dict[str, Any], best_metric: BestMetric) -> str | None:
    """Drop saved values that this run's must not be compared with; returns a sentence if a best value was dropped."""
    if manifest["measured_on"] != best_metric.measured_on:
        state.metrics = {}  # if saved again, they would count as measured on this run's rows
    metric = manifest["identity"]["config"].get("eval.best_metric")
    changes = best_metric.changes(manifest["measured_on"])
    is_now = {key: f"eval.{key} has other code now" for key in changes if key.startswith("metrics/")}
    is_now |= {"rows": "other rows are evaluated", "sets": "the evaluation sets have other rows"}
    reasons = [is_now.get(key, f"eval.{key} is {best_metric.measured_on[key]} now") for key in changes]
    reasons += [f"eval.best_metric is {best_metric.name} now"] if metric != best_metric.name else []
    if not reasons:
        return None
    best, state.best_value, state.start_value, state.num_evaluations_without_gain = state.best_value, None, None, 0
    if best is None:
        return None
    return f"the best {metric} so far, {best:.4g}, is not compared with later values: {', '.join(reasons)}"


def describe_versions(manifest: dict[str, Any]) -> str | None:
    """A sentence if the libraries are not those that the checkpoint was made with."""
    now, then = installed_versions(), manifest.get("versions", {})
    changed = [f"{name} {then[name]} ({now[name]} now)" for name in now if then.get(name, now[name]) != now[name]]
    return f"the checkpoint was made with {', '.join(changed)}: later losses may differ a little" if changed else None


def best_of_run(run_folder: Path, best_metric: BestMetric, setting: str = "export.weights") -> tuple[Checkpoint | None, str]:
    """The best checkpoint that rank 0 finds, checked by hash, and a sentence on the choice. Collective.

    The checkpoint is None if all of them have been removed: then only the weights in memory are left. If no kept one has that
    metric, or the best one is damaged, that is a `UserError` on every rank, which names the `setting`.
    """
    enter_phase("choosing the best checkpoint", counts_cpu=True)

    def find() -> tuple[Checkpoint | None, str]:
        whole, others = complete_checkpoints(run_folder)
        if not whole and not others:
            return None, f"{run_folder} has no checkpoint any more to take the best from: exporting the last weights"
        ranked = rank_checkpoints(whole, best_metric)
        if not ranked:
            raise UserError(f"{setting} is best, but no checkpoint in {run_folder} has {best_metric.name}, or only NaN: use last")
        best, value, is_comparable = ranked[0]
        try:
            best = read_checkpoint(best.folder)
        except ValueError as error:
            raise UserError(f"{setting} is best, but {error}: set it to last") from None
        parts = [f"exporting the weights of step {best.step}, the best {best_metric.name} ({value:.4g}) of the checkpoints kept"]
        unlike = sorted(other.checkpoint.folder.name for other in ranked if not other.is_comparable)
        if not is_comparable:
            parts.append("none was measured on the rows, or with the settings, that this run evaluates with now")
        elif unlike:
            parts.append(f"not compared, as measured on other rows or with other settings: {', '.join(unlike)}")
        return best, "; ".join([*parts, *(f"left out, as {sentence}" for sentence in others)])

    return on_rank_0(find)


def check_identity(checkpoint: Checkpoint, ours: Identity, remedy: str = "") -> TrainState:
    """Refuse a checkpoint of another model, data or frozen base, by a `UserError` that names what differs; returns its state.
    `remedy` replaces those of a resume."""
    folder, theirs = checkpoint.folder, checkpoint.manifest["identity"]
    if theirs.get("model_config_hash") != ours.model_config_hash:
        raise UserError(f"the model's config.json is not the one {folder} was trained with: {remedy or _remedies()}")
    if theirs["data_fingerprint"] != ours.data_fingerprint:
        where = "in its rows or in the tokens that this version makes of them"
        kept = f"the tokenizer that it began with is {folder.parent.parent / 'tokenizer'}, for model.tokenizer"
        raise UserError(f"the data is not what {folder} was trained on, {where}: {_remedies()}; {kept}")
    frozen = theirs["frozen_hashes"]
    changed = [name for name in {**frozen, **ours.frozen_hashes} if frozen.get(name) != ours.frozen_hashes.get(name)]
    if changed:
        how = f"{len(changed)} differ, {base_name(changed[0])} first; {remedy or 'give the same base, or take another run.name'}"
        raise UserError(f"the frozen base weights are not those {folder} was trained on: {how}")
    try:
        return TrainState.from_manifest(checkpoint.manifest)
    except TypeError as error:
        raise UserError(f"checkpoint {folder} cannot be loaded: its state is not of this version ({error})") from None


def _without_places(value: Any) -> Any:
    """Entries of `data.mix` without names and files, own sources without their folder: the data fingerprint covers the rows."""
    if isinstance(value, str) and split_own_source(value):
        return value.rpartition("/")[2]
    if not isinstance(value, list):
        return None if value in ("", *FILE_SOURCES) else value  # the kind of a file may follow from its ending
    return [
        {k: _without_places(v) for k, v in item.items() if not facts_of(MixEntry)[k].resume and v is not None}
        if isinstance(item, dict)
        else item
        for item in value
    ]


def _remedies(where: str = "") -> str:
    return f"set it back{where} to resume, or take another run.name (model.init_from starts a new run from these weights)"


def find_weights(path: str) -> Path:
    """The folder that `path` names: an exported model, a checkpoint, or a run folder's newest valid checkpoint; a `UserError` if
    rank 0 finds none, or may not read it, on every rank. Collective."""
    folder = Path(path)

    @denials_named(f"model.init_from {path}")
    def find() -> Path:
        if (folder / "config.json").is_file():
            check_weight_files(folder, f"model.init_from {folder}")
            return folder
        if (folder / CONFIG_FILE).is_file():
            raise UserError(f"model.init_from {folder} is an adapter: give it as adapter.name_or_path, with its adapter.method")
        if (folder / "manifest.json").is_file():
            try:
                return read_checkpoint(folder).folder
            except ValueError as error:
                remedy = "" if isinstance(error, Unread) else ": give a whole checkpoint, or its run folder"
                raise UserError(f"model.init_from {folder}: {error}{remedy}") from None
        found, refused = newest_valid(folder)
        if found is None:
            why = f" ({'; '.join(refused)})" if refused else ""
            raise UserError(f"model.init_from {folder} holds no valid checkpoint{why}: give one, its run, or an exported model")
        return found.folder

    return on_rank_0(find)


def open_checkpoint(model: PreTrainedModel, weights: TensorReaders, folder: Path) -> TensorReaders:
    """The readers of a model on the meta device: of what a checkpoint has, which every rank loads in full, and else those of
    `weights`. Fills the model's buffers. One of another model, or whose run froze weights that differ from the model's, is a
    `UserError` on every rank. Collective."""
    trouble = f"model.init_from {folder} does not fit {model.name_or_path}"
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}

    def find_stored() -> set[str]:
        try:
            stored = {name for name in stored_names(folder / "state") if name.startswith("model.")}
        except (ValueError, OSError) as error:
            raise UserError(f"model.init_from {folder} cannot be read: {' '.join(str(error).split())}") from None
        unknown = sorted(stored - state.keys())
        if unknown and base_name(unknown[0]) is None:
            remedy = "give its export as adapter.name_or_path, or its merged model (export.merge) as model.name_or_path"
            raise UserError(f"model.init_from {folder} is of a run that trained an adapter: {remedy}")
        if unknown:
            raise UserError(f"{trouble}: it also has {unknown[0].removeprefix('model.')}")
        return stored

    tensors = {name: torch.empty_like(state[name], device="cpu") for name in sorted(on_all_ranks(find_stored))}
    load_tensors(tensors, folder / "state", trouble)
    stored = state_readers({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    fill_buffers(model, stored)
    # It lacks its run's frozen weights.
    absent = {name: parameter.dtype for name, parameter in model.named_parameters() if name not in stored}
    if hash_readers(weights, absent) != read_manifest(folder)["identity"]["frozen_hashes"]:
        raise UserError(f"{trouble}: its run had other frozen weights; take that run's model.name_or_path, or its exported model")
    return weights | stored
