"""Compilation and activation checkpointing of each repeated block, as the two YAMLs ask.

Both replace the block's forward in place, inside FSDP's hooks, in the same way for all models and strategies.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from toolkit.config.schema import Checkpointing
from toolkit.errors import UserError
from toolkit.launch.accelerator import fsdp_version
from toolkit.parallel.units import repeated_blocks
from toolkit.private import private

logger = logging.getLogger("toolkit")

RECOMPILE_LIMIT = 64
"""Graphs of one class of blocks. T5's are of four kinds, each with a graph for the first shapes, for changing lengths and for
changing numbers of rows: beyond torch's limit of 8, blocks would run uncompiled, without an error."""
PRODUCTS = ("mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
"""Not the batched ones: they compute eager attention's scores, which take the most memory, and to which T5 adds in place."""
LEAST_INNER_SHARE = 1 / 8
"""Of a product's width: with a smaller inner size, as an adapter's second matrix has, it costs less than its result weighs."""
ATTENTIONS = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward", "_varlen_attn", "_flash_attn_")
"""How the names of kernels begin: sdpa's, those inside torch's varlen call, and those of the package flash-attn."""

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


def compiles(accelerator: Accelerator) -> bool:
    """Whether the accelerate YAML asks for compiled blocks, which are not compiled yet."""
    return accelerator.state.dynamo_plugin.backend.value != "NO"


def compile_blocks(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Compile each repeated block's forward, as the YAML's dynamo section says; FSDP's hooks stay outside.

    Equal blocks share their graphs. Shapes change from batch to batch. Without `dynamo_use_dynamic`, torch learns which
    dimensions do from the first batches.
    """
    from accelerate.utils import DynamoBackend

    plugin = accelerator.state.dynamo_plugin
    if not compiles(accelerator):
        return
    if accelerator.device.type == "cpu" and plugin.backend == DynamoBackend.INDUCTOR:
        what = "blocks are compiled (dynamo_backend INDUCTOR), which on a CPU takes minutes and slows steps with dropout"
        logger.warning(f"{what}: leave dynamo_config out of the accelerate YAML, unless the run is long and without dropout")
        # torch's key of kernels on disk names no vector length (FxGraphHashDetails, _inductor/codecache.py:1264): kernels that a
        # machine with another processor has left there would write past the ends of their tensors.
        vectors, tag = str(private("pick_vec_isa")()), torch.compiler.config.cache_key_tag
        torch.compiler.config.cache_key_tag = tag if tag.endswith(vectors) else f"{tag} {vectors}"
    options = {
        "backend": plugin.backend.value.lower(),
        "mode": None if plugin.mode == "default" else plugin.mode,
        "fullgraph": plugin.fullgraph,
        "dynamic": plugin.dynamic or None,
        "recompile_limit": RECOMPILE_LIMIT,
    }
    if plugin.backend == DynamoBackend.INDUCTOR:
        # Random numbers by eager's kernels. In 2.13 a compiled dropout may draw equal masks for several columns, and others in a
        # recomputation (pytorch#198333: `rand4x` of one-dimensional kernels, _inductor/codegen/triton.py:2087).
        options["options"] = private("list_mode_options")(options.pop("mode") or "default") | {"fallback_random": True}
    for block in repeated_blocks(model).values():
        compiled = torch.compile(block.forward, **options)
        block.forward = functools.partial(_compiled, block, block.forward, compiled)
    plugin.backend = DynamoBackend.NO  # otherwise `prepare_model` compiles again


def choose_checkpointing(setting: Checkpointing, *, in_accelerate_yaml: bool, is_compiled: bool) -> Checkpointing:
    """What a run recomputes, from `train.activation_checkpointing` and the accelerate YAML's `fsdp_activation_checkpointing`.
    Both together are a `UserError`, and so is selective recomputation of compiled blocks."""
    asked = f"train.activation_checkpointing is {setting}"
    if setting != "none" and in_accelerate_yaml:
        raise UserError(f"{asked}, and fsdp_activation_checkpointing is true in the accelerate YAML: set that one to false")
    if setting == "selective" and is_compiled:
        reason = "but blocks are compiled (dynamo_config), and torch's compiler chooses itself what is cheap to compute again"
        raise UserError(f"{asked}, {reason}: write none, or full")
    return "full" if in_accelerate_yaml else setting


def checkpoint_activations(accelerator: Accelerator, model: PreTrainedModel, checkpointing: Checkpointing) -> None:
    """Let each repeated block drop activations and recompute them in the backward, with the same dropout masks.

    It is non-reentrant and runs inside FSDP's hooks. accelerate's FSDP2 path draws other masks in the recomputation
    (`preserve_rng_state=False`), which makes gradients wrong.
    """
    if fsdp_version(accelerator) and accelerator.state.fsdp_plugin.activation_checkpointing:
        checkpointing = "full"
        accelerator.state.fsdp_plugin.activation_checkpointing = False  # otherwise `prepare_model` does it again
    if checkpointing == "none":
        return
    contexts = _selective_contexts if checkpointing == "selective" else noop_context_fn
    if not (blocks := repeated_blocks(model)):
        raise UserError(f"activation checkpointing is {checkpointing}, but {type(model).__name__} has no blocks: write none")
    for block in blocks.values():
        block.forward = functools.partial(_checkpointed, block, block.forward, contexts)


def _compiled(block: nn.Module, forward: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """Compiled in training only. In generation, the growing cache of every layer would exhaust the recompilation limit, which
    all blocks share, and training would silently continue uncompiled."""
    return (compiled if block.training else forward)(*args, **inputs)


def _checkpointed(block: nn.Module, forward: Callable[..., Any], contexts: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **inputs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **inputs)


def _selective_contexts() -> tuple[Any, Any]:
    """Contexts of a block's forward and recomputation. Results of matrix products and attention are kept, except those that the
    block writes to later, as biased experts do: torch would end the run, since the recomputation would write again."""
    kept: dict[int, tuple[Any, int]] = {}

    def choose(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        for declared, value in zip(operator._schema.arguments, args, strict=False):
            if declared.is_write and isinstance(value, torch.Tensor) and (place := kept.pop(_storage_of(value), None)):
                caching.storage[place[0]][place[1]] = private("_RECOMPUTE")
        if not _is_kept(context, operator, *args, **options):
            return CheckpointPolicy.PREFER_RECOMPUTE
        results = context.op_output  # of an attention, the first
        kept[_storage_of(results[0] if isinstance(results, tuple) else results)] = operator, caching.func_counter[operator] - 1
        return CheckpointPolicy.MUST_SAVE

    caching, cached = create_selective_checkpoint_contexts(choose)
    return caching, cached


def _storage_of(tensor: torch.Tensor) -> int:
    return int(private("_cdata", tensor.untyped_storage()))


def _is_kept(context: Any, operator: Any, *args: Any, **options: Any) -> bool:
    """Whether it is a matrix product or an attention. One that draws dropout is computed again: torch would take its kept result
    without drawing, and every later mask of the block would be another one."""
    name = operator.name().partition("::")[2].partition(".")[0]
    if name in PRODUCTS:
        return bool(args[name == "addmm"].shape[-1] >= LEAST_INNER_SHARE * context.op_output.shape[-1])
    if name.startswith(ATTENTIONS):
        signatures: Any = get_signature_for_torch_op(operator)  # one
        return not signatures[0].bind(*args, **options).arguments.get("dropout_p")
    return False
