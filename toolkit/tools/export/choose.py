"""What `export` takes and where it goes: the run's config, the checkpoint, the folder. Nothing in the run folder changes."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.find import newest_valid
from toolkit.checkpoint.folders import list_checkpoints, step_folder, step_of_name
from toolkit.checkpoint.load import best_of_run
from toolkit.checkpoint.manifest import Checkpoint, read_checkpoint
from toolkit.config.load import RecipeConfig, load_config
from toolkit.config.python import CONFIGS
from toolkit.distributed.comm import on_rank_0
from toolkit.errors import UserError
from toolkit.export.cast import DTYPES
from toolkit.export.write import Places, check_place
from toolkit.models.lora import is_enabled
from toolkit.training.goal import goal_of

logger = logging.getLogger("toolkit")

MAY_CHANGE = (
    "model.name_or_path", "model.revision", "adapter.name_or_path", "export.max_shard_size", "export.merge_into",
    "eval.max_new_tokens", "eval.num_beams", "eval.no_repeat_ngram_size",
)  # fmt: skip
"""Settings of the run that an export may give otherwise: where the same model is now, how texts are generated."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's arguments."""

    run_folder: Path
    checkpoint: str | None
    """A step, `best` or `last`; None: as the run's `export.weights` says."""
    merge: bool
    dtype: str | None
    to: Path | None
    flags: list[str]
    """Of the run's config, those of `MAY_CHANGE`."""


def load_run_config(run_folder: Path, flags: list[str]) -> RecipeConfig:
    """The run's `config.yaml`. Attention kernels that this machine may lack are left out: they keep the same weights."""
    import yaml

    for flag in flags:
        if flag.startswith("-") and (key := flag.removeprefix("--").partition("=")[0]) not in MAY_CHANGE:
            raise UserError(f"{key} is not a setting of an export: of the run's, give one of {', '.join(MAY_CHANGE)}")

    path = run_folder / "config.yaml"
    try:
        keys = {*yaml.safe_load(path.read_text(encoding="utf-8"))["data"]}
    except FileNotFoundError:
        what = "has no config.yaml" if run_folder.is_dir() else "is not a folder"
        raise UserError(f"{run_folder} {what}: give the folder of a run, as in runs/t5_functions") from None
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what a run writes ({' '.join(str(error).split())}): give a run's folder") from None
    if "folder" in keys:
        raise UserError(f"{run_folder} is a run on images, which has no Hugging Face model: give one of recipes/t5.py or llm.py")
    config_class: Any = CONFIGS["llm" if "max_length_tokens" in keys else "t5"]
    config: RecipeConfig = load_config(config_class, [f"--config={path}", *flags])
    if config.model.attn_implementation in (None, "eager", "sdpa"):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attn_implementation=None))


def choose_checkpoint(options: Options, config: RecipeConfig) -> Checkpoint:
    """The checkpoint that is asked for, checked by hash. Collective.

    Raises:
        UserError: there is none, or it is damaged; on every rank.
    """
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
        goal = goal_of(config.eval, newest.manifest["measured_on"])
        best, choice = best_of_run(run_folder, goal, "--checkpoint" if options.checkpoint else "export.weights")
        logger.info(choice)
        return best or newest
    logger.info(f"exporting the weights of step {newest.step}, the newest valid checkpoint")
    return newest


def read_whole(folder: Path) -> Checkpoint:
    """A checkpoint, whose files are compared with its manifest by their hashes.

    Raises:
        UserError: it is damaged, or a run has removed it meanwhile.
    """
    try:
        return read_checkpoint(folder)
    except ValueError as error:
        if not folder.is_dir():
            raise UserError(f"{folder} was removed meanwhile, as by a run that keeps its newest ones: give another") from None
        raise UserError(f"checkpoint {folder} cannot be exported: {error}") from None


def choose_places(options: Options, config: RecipeConfig, step: int) -> Places:
    """The folder to write: the model's, or the adapter's alone.

    Raises:
        UserError: something is there.
    """
    parts = ["export", str(step), *(["merged"] if options.merge else []), *([options.dtype] if options.dtype else [])]
    folder = options.to or options.run_folder / "-".join(parts)
    for place in (folder, folder.with_name(f"{folder.name}.tmp")):
        check_place(place, "give another folder as --to")
        if place.is_dir() and os.listdir(place):
            left = ", perhaps left by an export that was stopped" if place != folder else ""
            raise UserError(f"{place} is there and not empty{left}: remove it, or give another folder as --to")
    dtype = DTYPES[options.dtype] if options.dtype else None
    if is_enabled(config.adapter) and not options.merge:
        return Places(adapter=folder, dtype=dtype)
    return Places(model=folder, dtype=dtype)
