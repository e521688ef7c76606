"""`python -m toolkit export`: any checkpoint of a run as a Hugging Face folder, by the proof of a run's own export.

The run folder is only read, so a run may be training in it.
"""

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from toolkit.checkpoint.find import complete_checkpoints, newest_valid
from toolkit.checkpoint.load import best_of_run, check_identity, find_weights, load_weights
from toolkit.checkpoint.manifest import Checkpoint, list_checkpoints, read_checkpoint, step_folder, step_of_name
from toolkit.config.facts import facts_of
from toolkit.config.load import RecipeConfig, load_config
from toolkit.config.python import CONFIGS
from toolkit.distributed.comm import on_all_ranks, on_rank_0, rank, world_size
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError
from toolkit.evaluation.rows import EvaluationRows
from toolkit.export.card import Origin
from toolkit.export.paths import ExportPaths, check_place, check_push, push
from toolkit.export.run_data import load_run_data
from toolkit.export.usage import list_commands
from toolkit.export.write import export_model
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
from toolkit.launch.accelerator import build_accelerator, connect_devices, frozen_dtype
from toolkit.launch.environment import is_launched
from toolkit.launch.rank_consistency import describe_config
from toolkit.models.lora import is_enabled
from toolkit.objectives import objective_of
from toolkit.objectives.objective import Objective
from toolkit.parallel.wrap import shard_model
from toolkit.tools.recipes import OF_PAIRS
from toolkit.tools.report.facts import read_runs
from toolkit.training.best_metric import best_metric_of
from toolkit.training.model import begin_identity, build_skeleton, load_model
from toolkit.training.run import release
from toolkit.training.setup import Run

logger = logging.getLogger("toolkit")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's arguments."""

    run_folder: Path
    checkpoint: str | None
    """A step, `best` or `last`; None: as the run's `export.weights` says."""
    merge: bool
    dtype: str | None
    to: Path | None
    push_to_hub: str | None
    private: bool
    flags: list[str]
    """Of the run's config, those that `may_change` names."""


def export(run_flags: list[str], **given: Any) -> None:
    """Export a checkpoint, as `Options` say. No such run or checkpoint, a damaged one, another base than the run's, or a folder
    that cannot be written are a `UserError` on every rank; so is a hub that does not take the export, on rank 0. Collective."""
    options = Options(flags=run_flags, **given)
    config = load_run_config(options.run_folder, options.flags)
    objective = objective_of(config)
    if options.push_to_hub is not None:  # what would fail after the export
        check_push(config, options.push_to_hub, "--push-to-hub", merge=options.merge, remedy="add --merge")
    try:
        folder = _export(options, config, objective)
    except torch.OutOfMemoryError as error:
        what = f"the model does not fit this device ({str(error).splitlines()[0]}): set ACCELERATE_USE_CPU=true to export"
        raise UserError(f"{what} on the CPU, or use accelerate launch with a preset that shards it") from None
    finally:
        if world_size() == 1:
            release()
    if options.push_to_hub and folder is not None:  # no rank waits for the upload
        push(folder, options.push_to_hub, private=options.private)


def _export(options: Options, config: RecipeConfig, objective: Objective) -> Path | None:
    """Returns the exported folder, on rank 0."""
    from datasets import Dataset

    # Processes, the checkpoint, and whether its folder may be written.
    precision = None
    if not is_launched() and find_accelerate_yaml() is None:  # one process; weights that were frozen in bf16 compute in it
        whole, _ = complete_checkpoints(options.run_folder)
        precision = "bf16" if whole and whole[-1].settings.get("model.frozen_dtype") == "bfloat16" else "no"
    chosen = {f"--{name}": value for name, value in vars(options).items() if not isinstance(value, Path)}
    started_with = describe_config(config) | chosen
    accelerator = build_accelerator(config.run.timeout_s, config.run.num_threads, precision, started_with=started_with)
    connect_devices(accelerator)
    enter_phase("choosing the checkpoint", counts_cpu=True)
    checkpoint = choose_checkpoint(options, config)
    settings = checkpoint.settings
    places = on_rank_0(lambda: choose_export_paths(options, config, checkpoint.step))

    # The model as the run built it, still without weights.
    of_adapter: Any = {"has_adapter": is_enabled(config.adapter), "base_dtype": config.adapter.base_dtype}
    stored = settings.get("model.frozen_dtype", "float32")
    dtype = on_all_ranks(lambda: frozen_dtype(accelerator, stored, **of_adapter))
    init_from = find_weights(config.model.init_from) if config.model.init_from and config.model.freeze else None
    run = Run(config, objective, accelerator, dtype, options.run_folder, settings, checkpoint, init_from)
    build_skeleton(run)
    config = run.config

    # What the run kept of its rows.
    fingerprint = checkpoint.manifest["identity"]["data_fingerprint"]
    data, tokenizer = on_all_ranks(lambda: load_run_data(options.run_folder, fingerprint))
    collator = objective.build_collator(run.skeleton, tokenizer.pad_token_id)
    evaluation = EvaluationRows(Dataset.from_list(data.check_rows), tokenizer, collator, objective, tuple(data.stop_token_ids))

    # The checkpoint's weights in the model.
    model, readers = load_model(run)
    objective.start_generation(model, tokenizer, collator)
    complete_identity = begin_identity(run, data.fingerprint, model, readers)
    sharded = shard_model(accelerator, model, readers)
    identity = complete_identity()
    on_rank_0(lambda: check_identity(checkpoint, identity, "give the run's own model as --model.name_or_path"))
    load_weights(checkpoint.folder, sharded)

    # The folder, and what to do with it.
    computed_in = "float32" if settings.get("mixed_precision", "no") == "no" else "bfloat16"
    about = _load_about(options.run_folder) if rank() == 0 else ([], None)
    origin = Origin(checkpoint.step, computed_in, checkpoint.manifest["world_size"], data, *about, identity.frozen_hashes)
    export_model(config, sharded, evaluation, origin, places)
    logger.info(f"exported to {places.model or places.adapter}")
    for line in list_commands(objective, config, sharded.skeleton, tokenizer, origin, places):
        logger.info(line)
    folder = (places.model or places.adapter) if rank() == 0 else None
    release()
    return folder


def _load_about(run_folder: Path) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    """The run's figures so far and the versions that it ran with, for the model card."""
    [facts] = read_runs([run_folder])
    if "lines" in facts.missing:
        logger.warning(f"the model card has no figures: {facts.missing['lines']}")
    versions = facts.record.get("versions")
    return facts.lines, {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else None


def may_change() -> list[str]:
    """Settings of a run that an export may give otherwise: where the same model is now, how texts are generated."""
    return [key for key, facts in facts_of(RecipeConfig).items() if facts.export]


def load_run_config(run_folder: Path, flags: list[str]) -> RecipeConfig:
    """The run's `config.yaml`. Attention kernels that this machine may lack are left out: they keep the same weights."""
    for flag in flags:
        if flag.startswith("-") and (key := flag.removeprefix("--").partition("=")[0]) not in may_change():
            raise UserError(f"{key} is not a setting of an export: of the run's, give one of {', '.join(may_change())}")

    path = run_folder / "config.yaml"
    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
        keys = {*written["data"]}
    except FileNotFoundError:
        what = "has no config.yaml" if run_folder.is_dir() else "is not a folder"
        raise UserError(f"{run_folder} {what}: give the folder of a run, as in runs/t5_functions") from None
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what a run writes ({' '.join(str(error).split())}): give a run's folder") from None
    if "folder" in keys:
        raise UserError(f"{run_folder} is a run on images, which has no Hugging Face model: give one of recipes/t5.py or llm.py")
    recipe = "llm" if "max_length_tokens" in keys else "t5"
    recipe = OF_PAIRS[recipe] if "preference" in written else recipe
    config_class: Any = CONFIGS[recipe]
    config: RecipeConfig = load_config(config_class, [f"--config={path}", *flags])
    if config.model.attn_implementation in (None, "eager", "sdpa"):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attn_implementation=None))


def choose_checkpoint(options: Options, config: RecipeConfig) -> Checkpoint:
    """The checkpoint that is asked for, checked by hash; none, or a damaged one, is a `UserError` on every rank. Collective."""
    run_folder, wanted = options.run_folder, options.checkpoint or config.export.weights
    steps = on_rank_0(lambda: [step for step, _ in list_checkpoints(run_folder)])
    if not steps:
        raise UserError(f"{run_folder} holds no checkpoint: let the run reach its first one")
    if wanted not in ("best", "last"):
        step = int(wanted) if wanted.isdecimal() else step_of_name(wanted)
        if step not in steps:
            raise UserError(f"--checkpoint is {wanted}: give best, last or one of the steps {', '.join(map(str, steps))}")
        logger.info(f"exporting the weights of step {step}")
        return on_rank_0(lambda: read_whole(step_folder(run_folder, step)))
    newest, refused = on_rank_0(lambda: newest_valid(run_folder))
    for sentence in refused:
        logger.warning(sentence)
    if newest is None:
        raise UserError(f"no checkpoint in {run_folder} is valid: {'; '.join(refused)}")
    if wanted == "best":
        best_metric = best_metric_of(config.eval, newest.manifest["measured_on"])
        best, choice = best_of_run(run_folder, best_metric, "--checkpoint" if options.checkpoint else "export.weights")
        logger.info(choice)
        return best or newest
    logger.info(f"exporting the weights of step {newest.step}, the newest valid checkpoint")
    return newest


def read_whole(folder: Path) -> Checkpoint:
    """A checkpoint whose files match its manifest by their hashes; a `UserError` if it is damaged, or a run has removed it
    meanwhile."""
    try:
        return read_checkpoint(folder)
    except ValueError as error:
        if not folder.is_dir():
            raise UserError(f"{folder} was removed meanwhile, as by a run that keeps its newest ones: give another") from None
        raise UserError(f"checkpoint {folder} cannot be exported: {error}") from None


def choose_export_paths(options: Options, config: RecipeConfig, step: int) -> ExportPaths:
    """The folder to write: the model's, or the adapter's alone. Something that is there already is a `UserError`."""
    parts = ["export", str(step), *(["merged"] if options.merge else []), *([options.dtype] if options.dtype else [])]
    folder = options.to or options.run_folder / "-".join(parts)
    for place in (folder, folder.with_name(f"{folder.name}.tmp")):
        check_place(place, "give another folder as --to")
        if place.is_dir() and os.listdir(place):
            left = ", perhaps left by an export that was stopped" if place != folder else ""
            raise UserError(f"{place} is there and not empty{left}: remove it, or give another folder as --to")
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if is_enabled(config.adapter) and not options.merge:
        return ExportPaths(adapter=folder, dtype=dtype)
    return ExportPaths(model=folder, dtype=dtype)
