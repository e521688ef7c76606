"""The model of a run: a skeleton that is checked early, then weights, adapter, shards, optimizer, and checks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoint.load import check_settings, find_weights, open_checkpoint
from toolkit.checkpoint.state import Identity
from toolkit.config.load import RecipeConfig, dotted_keys
from toolkit.distributed.comm import on_all_ranks, rank, world_size
from toolkit.distributed.device import GIB, describe_device, smallest_gpu_bytes
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError
from toolkit.launch.accelerator import compute_dtype, fsdp_version
from toolkit.launch.rank_consistency import compare_ranks
from toolkit.models import load
from toolkit.models.config import hash_model_config, hub_commit, load_model_config
from toolkit.models.experts import check_experts, check_routers
from toolkit.models.freeze import cast_frozen, cast_trained, freeze, freeze_as, freeze_unreached
from toolkit.models.generation import choose_generation
from toolkit.models.lora import add_adapter, is_enabled
from toolkit.models.patches.chunked_loss import has_own_forward, holds_all_logits, text_part
from toolkit.models.patches.documents import choose_packed_attention, describe_attention, warn_of_full_rows
from toolkit.models.patches.masks import attends_by_document, choose_packing
from toolkit.models.quantized import choose_kernel
from toolkit.models.tensor_reader import TensorReaders
from toolkit.models.weights import complete_readers, hash_frozen, open_weights
from toolkit.objectives.model_checks import check_loss
from toolkit.optimizers import check_sharding, state_bytes
from toolkit.parallel.wrap import check_wrap, shard_model
from toolkit.private import private
from toolkit.training.optim import build_optimizer
from toolkit.training.setup import Run
from toolkit.training.user_functions import check_own_loss

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger("toolkit")

ROOMY_SHARE = 0.25
"""A GPU with three quarters left for activations, which the micro-batch decides, has room to spare."""


def build_skeleton(run: Run) -> None:
    """Build the model on the meta device, to check its config, wrap classes, freezing and adapter early: what is wrong is a
    `UserError` on every rank. Completes the config by `data.packing` and the base's generation settings. Collective."""
    enter_phase("building the model", counts_cpu=True)
    config, objective, accelerator = run.config, run.objective, run.accelerator
    model_config = on_all_ranks(lambda: load_model_config(config.model, objective))
    of_hub = {"the commit of model.name_or_path": on_all_ranks(lambda: hub_commit(config.model))}
    settings = {f"{key} of the model's config": value for key, value in model_config.to_diff_dict().items() if key[0] != "_"}
    compare_ranks(settings | of_hub)
    if run.resume_from and run.resume_from.settings.get("attention") == "eager":  # as T5 on CPUs before this version
        model_config._attn_implementation = run.settings["attention"] = "eager"
    is_one_graph = bool(accelerator.state.dynamo_plugin.fullgraph)
    skeleton, config = on_all_ranks(lambda: _prepare_skeleton(run, model_config, is_one_graph=is_one_graph))
    run.config, run.model_config, run.skeleton = config, model_config, skeleton
    if config.model.init_from and config.model.freeze:  # frozen weights are in no checkpoint: a resume needs them too
        run.init_from = run.init_from or find_weights(config.model.init_from)
    # The attention of packed rows; a line on it and on the processes' devices.
    device, dtype, why_dense = accelerator.device, compute_dtype(accelerator), ""
    if config.packs:
        named = config.model.attn_implementation
        why_dense = choose_packed_attention(skeleton, named, device.type, dtype, is_one_graph=is_one_graph)
    attention = describe_attention(skeleton, device, dtype, packing=config.packs)
    logger.info(f"{describe_device(device)}; attention: {attention}")
    all_logits = "the loss takes all logits of a micro-batch at once:"
    if has_own_forward(skeleton):
        name = type(skeleton).__name__
        logger.warning(f"{all_logits} {name} has a forward of its own, which an export does not have: load it as {name}")
    elif holds_all_logits(skeleton):
        kind, vocab_size = skeleton.config.model_type, skeleton.config.get_text_config().vocab_size
        # With the gradient and a copy, as a chunk's.
        cost = f"{3 * vocab_size * torch.float32.itemsize / 2**20:.2f} MiB for each token of a micro-batch"
        logger.info(f"{all_logits} {kind} does not compute them by chunks, which takes about {cost}")
    if config.packs and (warning := warn_of_full_rows(skeleton, why_dense)):
        logger.warning(warning)
    _note_needless_shards(accelerator, skeleton, run.frozen_dtype, config.optim.name)


def _prepare_skeleton(run: Run, model_config: PretrainedConfig, *, is_one_graph: bool) -> tuple[PreTrainedModel, RecipeConfig]:
    """The model on the meta device, frozen and adapted, and the config completed by it. Completes `run.settings` too."""
    config, name = run.config, run.config.model.name_or_path
    skeleton = load.build_skeleton(config.model, model_config, run.objective)
    if type(skeleton.config) is not type(model_config):  # its class takes the text's part, and may ignore tensors of others
        ours = type(skeleton).__name__
        logger.warning(f"{name} is a {model_config.model_type} model: only {ours}, its part for text, is trained and exported")
    config = replace(config, eval=choose_generation(config.eval, skeleton, config.model))
    run.settings.update({f"eval.{key}": getattr(config.eval, key) for key in ("num_beams", "no_repeat_ngram_size")})
    check_experts(skeleton, name)
    load.check_kept(skeleton, name)
    config = freeze_unreached(skeleton, config)
    _adapt(skeleton, config)
    if is_enabled(config.adapter) and (part := text_part(skeleton)):
        logger.info(f"the adapter is on {part}, the part of the model that texts pass")
    check_routers(skeleton, config.optim.router_aux_loss, name)
    check_wrap(run.accelerator, skeleton, config.train.activation_checkpointing)
    check_sharding(config.optim.name, is_flat=fsdp_version(run.accelerator) == 1)
    config = choose_packing(config, skeleton, is_one_graph=is_one_graph)
    if "data.packing" in dotted_keys(config):
        run.settings.update(chosen := {"data.packing": config.data.packing})
        if run.resume_from is not None:
            check_settings(run.resume_from, chosen, type(config))
    return skeleton, config


def build_model(run: Run) -> None:
    """Load the model, add its adapter, shard it, build the optimizer, and check the result on two short rows. Collective. Weights
    that do not load, or a model that cannot be trained or evaluated as the config says, are a `UserError` on every rank."""
    config, objective, device, collator = run.config, run.objective, run.accelerator.device, run.evaluation.collator
    if config.adapter.base_dtype == "nf4":
        logger.info(f"nf4 is dequantized by {choose_kernel(device)}")
    model, readers = load_model(run)
    objective.start_generation(model, run.rows.tokenizer, collator)
    complete_identity = begin_identity(run, run.rows.fingerprint, model, readers)
    notes, checkpointing = config.optim.router_aux_loss != "off", config.train.activation_checkpointing
    run.sharded = sharded = shard_model(run.accelerator, model, readers, notes=notes, checkpointing=checkpointing)
    run.identity = complete_identity()
    run.optimizer = build_optimizer(config.optim, sharded.model, config.train.seed)
    objective.check_model(sharded, collator, config)
    if run.hooks.loss is not None:
        check_own_loss(run.hooks.loss, sharded.unwrapped.config.get_text_config().vocab_size, device)
    elif config.has_own_objective:
        shortest = run.rows.train[int(run.rows.train.with_format("numpy")["num_tokens"][:].argmin())]
        check_loss(sharded, objective, collator, shortest, config.optim.label_smoothing)


def load_model(run: Run) -> tuple[PreTrainedModel, TensorReaders]:
    """The model on the meta device, adapted and frozen like its skeleton, and the readers that `shard_model` takes its weights
    from; weights that do not load, or are not the model's, are a `UserError` on every rank. Collective."""
    from transformers.utils.logging import disable_progress_bar

    enter_phase("loading the model", counts_cpu=True)
    config, skeleton, seed = run.config, run.skeleton, run.config.train.seed
    if rank() != 0 or not sys.stderr.isatty():  # bars are for terminals
        disable_progress_bar()
    quantized_as, name = config.adapter.base_dtype, config.model.name_or_path
    # With an adapter the base is frozen; codes are those of the stored weights, whatever a run computes in.
    loaded_dtype = run.frozen_dtype if is_enabled(config.adapter) and not quantized_as else torch.float32
    init_from = run.init_from
    exported = init_from if init_from is not None and (init_from / "config.json").is_file() else None

    def note_in_full(reason: str) -> None:
        if quantized_as:
            what = f"adapter.base_dtype is {quantized_as}, which quantizes weights while they are read in slices"
            raise UserError(f"{what}, but {name} can only be loaded in full ({reason}): leave it out")
        if fsdp_version(run.accelerator) == 2 and not config.model.from_scratch:
            logger.info(f"every rank loads all of {name} before it is sharded: {reason}")

    about = config.model, run.model_config, run.objective, skeleton
    model, weights = open_weights(*about, loaded_dtype, seed, exported, note_in_full)
    if init_from is not None and exported is None:
        if not any(reader.is_held for reader in weights.values()):
            note_in_full(f"model.init_from {init_from} is a checkpoint, which says what it lacks only when it is loaded")
        weights = open_checkpoint(model, weights, init_from)
    disable_progress_bar()  # an export has one of its own
    # Adapter, freezing and dtypes.
    on_all_ranks(lambda: _adapt(model, config))
    if attends_by_document(skeleton):
        model.set_attn_implementation(private("_attn_implementation", skeleton.config))
    model.generation_config = skeleton.generation_config
    freeze_as(model, skeleton)
    cast_frozen(model, run.frozen_dtype)
    cast_trained(model, config.model.trained_dtype)
    return model, complete_readers(model, weights, config.adapter, config.model, seed)


def begin_identity(run: Run, data_fingerprint: str, model: PreTrainedModel, readers: TensorReaders) -> Callable[[], Identity]:
    """What a resume must find unchanged: call what this returns when `shard_model` has taken `readers`. These and `model` are
    those of `load_model`. Both are collective."""
    enter_phase("hashing frozen weights", counts_cpu=True)
    # Ranks that read all of the weights may have read their own, and hash them as they do.
    fills_all = fsdp_version(run.accelerator) != 2 or world_size() == 1
    reads_all = fills_all or any(reader.is_held for reader in readers.values())
    frozen_hashes = hash_frozen(model, readers, on_each_rank=reads_all, while_read=fills_all)

    def complete() -> Identity:
        hashes = frozen_hashes()
        compare_ranks({f"the frozen {name}": digest for name, digest in hashes.items()})
        return Identity(run.settings, hash_model_config(run.model_config.to_diff_dict()), data_fingerprint, hashes)

    return complete


def _note_needless_shards(accelerator: Accelerator, skeleton: PreTrainedModel, frozen_dtype: torch.dtype, optimizer: str) -> None:
    """Log a line if FSDP shards a model whose training state takes at most `ROOMY_SHARE` of the smallest GPU. Collective."""
    if fsdp_version(accelerator) is None or accelerator.mixed_precision == "fp8":  # which needs FSDP2
        return
    gpu_bytes = smallest_gpu_bytes(accelerator.device)
    needed = sum(
        8 * p.numel() + state_bytes(optimizer, tuple(p.shape))  # more than `model.trained_dtype` in bf16 needs
        if p.requires_grad
        else min(frozen_dtype.itemsize, p.itemsize) * p.numel()
        for p in skeleton.parameters()
    )
    if gpu_bytes is not None and needed <= ROOMY_SHARE * gpu_bytes:
        logger.info(
            f"the preset shards a model that one GPU holds with room to spare: weights, gradients and moments take "
            f"{needed / GIB:.1f} of {gpu_bytes / GIB:.0f} GiB; {'ddp' if world_size() > 1 else 'single'}.yaml gathers nothing"
        )


def _adapt(model: PreTrainedModel, config: RecipeConfig) -> None:
    """Add the adapter, which freezes the base, or freeze what `model.freeze` names."""
    if is_enabled(config.adapter):
        add_adapter(model, config.adapter, config.model)
    else:
        freeze(model, config.model.freeze)
        embedding: Any = model.get_input_embeddings()
        if config.model.add_tokens and not embedding.weight.requires_grad:
            raise UserError("model.freeze freezes the embedding, where the rows of model.add_tokens are to train: leave it out")
