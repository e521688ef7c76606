"""`python -m toolkit export`: any checkpoint of a run as a Hugging Face folder, by the proof of a run's own export.

The run folder is only read, so a run may be training in it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.find import whole_checkpoints
from toolkit.checkpoint.init_from import find_weights
from toolkit.checkpoint.load import check_identity, load_weights
from toolkit.config.load import RecipeConfig
from toolkit.data.tokens.languages import start_generation
from toolkit.distributed.comm import on_all_ranks, on_rank_0, rank, world_size
from toolkit.distributed.watchdog import working
from toolkit.errors import UserError
from toolkit.evaluation.rows import EvaluationRows
from toolkit.export.card import Origin
from toolkit.export.next_commands import list_commands
from toolkit.export.run_data import load_run_data
from toolkit.export.write import export_model
from toolkit.launch.accelerate_yaml import find_accelerate_yaml
from toolkit.launch.accelerator import build_accelerator, connect_devices, frozen_dtype
from toolkit.launch.environment import is_launched
from toolkit.launch.same_run import describe_config
from toolkit.models.lora import is_enabled
from toolkit.parallel.wrap import shard_model
from toolkit.tools.export.choose import Options, choose_checkpoint, choose_places, load_run_config
from toolkit.tools.report.facts import read_runs
from toolkit.training.model import build_skeleton, identity_of, load_model
from toolkit.training.run import release
from toolkit.training.setup import RunContext

logger = logging.getLogger("toolkit")


def export(run_flags: list[str], **given: Any) -> None:
    """Export a checkpoint. Collective.

    Args:
        given: `Options`.

    Raises:
        UserError: no such run or checkpoint, a damaged one, another base than the run's, or a folder that cannot be written; on
            every rank.
    """
    options = Options(flags=run_flags, **given)
    config = load_run_config(options.run_folder, options.flags)
    if options.merge and not is_enabled(config.adapter):
        raise UserError(f"--merge is given, but {options.run_folder} trained no adapter: leave it out")
    try:
        _export(options, config)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the model does not fit this device ({str(error).splitlines()[0]}): set ACCELERATE_USE_CPU=true to export on the "
            "CPU, or use accelerate launch with a preset that shards it"
        ) from None
    finally:
        if world_size() == 1:
            release()


def _export(options: Options, config: RecipeConfig) -> None:
    from datasets import Dataset

    # Processes, the checkpoint, and whether its folder may be written.
    precision = None
    if not is_launched() and find_accelerate_yaml() is None:  # one process; weights that were frozen in bf16 compute in it
        whole, _ = whole_checkpoints(options.run_folder)
        precision = "bf16" if whole and whole[-1].settings.get("model.frozen_dtype") == "bfloat16" else "no"
    chosen = {f"--{name}": value for name, value in vars(options).items() if not isinstance(value, Path)}
    started_with = describe_config(config) | chosen
    accelerator = build_accelerator(config.run.timeout_s, config.run.num_threads, precision, started_with=started_with)
    connect_devices(accelerator)
    working("choosing the checkpoint")
    checkpoint = choose_checkpoint(options, config)
    settings = checkpoint.settings
    places = on_rank_0(lambda: choose_places(options, config, checkpoint.step))

    # The model as the run built it, still without weights.
    of_adapter: Any = {"has_adapter": is_enabled(config.adapter), "base_dtype": config.adapter.base_dtype}
    stored = settings.get("model.frozen_dtype", "float32")
    dtype = on_all_ranks(lambda: frozen_dtype(accelerator, stored, **of_adapter))
    init_from = find_weights(config.model.init_from) if config.model.init_from and config.model.freeze else None
    context = RunContext(accelerator, dtype, options.run_folder, settings, checkpoint, init_from, metrics=())
    config, model_config, skeleton = build_skeleton(config, context)

    # What the run kept of its rows.
    fingerprint = checkpoint.manifest["identity"]["data_fingerprint"]
    data, tokenizer = on_all_ranks(lambda: load_run_data(options.run_folder, fingerprint))
    collator = config.task.build_collator(skeleton, tokenizer.pad_token_id)
    evaluation = EvaluationRows(Dataset.from_list(data.check_rows), tokenizer, collator, tuple(data.stop_token_ids))

    # The checkpoint's weights in the model.
    model, sources = load_model(config, context, model_config, skeleton)
    start_generation(model, tokenizer, collator)
    identity = identity_of(context, model_config, data.fingerprint, model, sources)
    on_rank_0(lambda: check_identity(checkpoint, identity, "give the run's own model as --model.name_or_path"))
    sharded = shard_model(accelerator, model, sources)
    load_weights(checkpoint.folder, sharded)

    # The folder, and what to do with it.
    computed_in = "float32" if settings.get("mixed_precision", "no") == "no" else "bfloat16"
    about = _load_about(options.run_folder) if rank() == 0 else ([], None)
    origin = Origin(checkpoint.step, computed_in, checkpoint.manifest["world_size"], data, *about, identity.frozen_hashes)
    export_model(config, sharded, evaluation, origin, places)
    logger.info(f"exported to {places.model or places.adapter}")
    for line in list_commands(config, sharded.skeleton, tokenizer, origin, places):
        logger.info(line)
    release()


def _load_about(run_folder: Path) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    """The run's figures so far and the versions that it ran with, for the model card."""
    [facts] = read_runs([run_folder])
    if "curves" in facts.missing:
        logger.warning(f"the model card has no figures: {facts.missing['curves']}")
    versions = facts.record.get("versions")
    return facts.lines, {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else None
