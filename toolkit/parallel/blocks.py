"""Compilation and activation checkpointing of each repeated block, as the accelerate YAML asks.

Both replace the block's forward in place, inside FSDP's hooks, in the same way for all models and strategies.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit.parallel.units import repeated_blocks

logger = logging.getLogger("toolkit")

RECOMPILE_LIMIT = 64
"""Graphs of one class of blocks. T5's are of four kinds, each with a graph for the first shapes, for changing lengths and for
changing numbers of rows: beyond torch's limit of 8, blocks would run uncompiled, without an error."""

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


def compile_blocks(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Compile each repeated block's forward, as the YAML's dynamo section says; FSDP's hooks stay outside.

    Equal blocks share their graphs. Shapes change from batch to batch. Without `dynamo_use_dynamic`, torch learns which
    dimensions do from the first batches.
    """
    from accelerate.utils import DynamoBackend

    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return
    if accelerator.device.type == "cpu" and plugin.backend == DynamoBackend.INDUCTOR:
        logger.warning(
            "blocks are compiled (dynamo_backend INDUCTOR), which on a CPU takes minutes and slows steps with dropout: leave "
            "dynamo_config out of the accelerate YAML, unless the run is long and without dropout"
        )
    options = {
        "backend": plugin.backend.value.lower(),
        "mode": None if plugin.mode == "default" else plugin.mode,
        "fullgraph": plugin.fullgraph,
        "dynamic": plugin.dynamic or None,
        "recompile_limit": RECOMPILE_LIMIT,
    }
    for block in repeated_blocks(model).values():
        compiled = torch.compile(block.forward, **options)
        block.forward = functools.partial(_compiled, block, block.forward, compiled)
    plugin.backend = DynamoBackend.NO  # otherwise `prepare_model` compiles again


def checkpoint_activations(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Let each repeated block drop its activations and recompute them in the backward, with the same dropout masks.

    It is non-reentrant and runs inside FSDP's hooks. accelerate's FSDP2 path draws other masks in the recomputation
    (`preserve_rng_state=False`), which makes gradients wrong.
    """
    plugin = accelerator.state.fsdp_plugin
    if not plugin.activation_checkpointing:
        return
    for block in repeated_blocks(model).values():
        block.forward = functools.partial(_checkpointed, block, block.forward)
    plugin.activation_checkpointing = False  # otherwise `prepare_model` does it again


def _compiled(block: nn.Module, forward: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """Compiled in training only. In generation, the growing cache of every layer would exhaust the recompilation limit, which
    all blocks share, and training would silently continue uncompiled."""
    return (compiled if block.training else forward)(*args, **inputs)


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **inputs)
    return checkpoint(forward, *args, use_reentrant=False, **inputs)
