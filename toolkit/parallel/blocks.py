"""Compilation and activation checkpointing of each repeated block, as the accelerate YAML asks.

Both replace the block's forward in place, inside FSDP's hooks, in the same way for all models and strategies.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit.models.experts import router_scores
from toolkit.parallel.units import repeated_blocks

logger = logging.getLogger("toolkit")

Route = tuple[torch.Tensor, torch.Tensor]
"""Of a router: scores (tokens, experts), which add up to 1, and the experts that each token is sent to, int64."""
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


@contextlib.contextmanager
def routes_noted(model: PreTrainedModel, *, notes: bool) -> Iterator[dict[str, list[Route]]]:
    """Around compilation and checkpointing of repeated blocks: a block returns its routers' routes inside of both, and notes them
    outside, those of its last forward, in what this yields. So a recomputation neither notes them nor keeps their graph."""
    noted: dict[str, list[Route]] = {}
    blocks, scores = repeated_blocks(model) if notes else {}, router_scores(model) if notes else {}

    def note(name: str, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        output, noted[name] = forward(*args, **inputs)
        return output

    for block in blocks.values():
        # peft keeps the original of a router that it trains (`modules_to_save`), and never calls it.
        named = {name: m for name, m in block.named_modules() if type(m) in scores}
        routers: list[Any] = [m for name, m in named.items() if "original_module" not in name.split(".")]
        setattr(block, "routers", routers)  # noqa: B010  # no field that mypy knows
        for router in routers:
            router.forward, router.scores = MethodType(_keeping_route, router), scores[type(router)]
        block.forward = MethodType(_returning_routes, block)
    yield noted
    for name, block in blocks.items():
        block.forward = functools.partial(note, name, block.forward)


def _returning_routes(block: nn.Module, *args: Any, **inputs: Any) -> tuple[Any, list[Route]]:
    """A method, of one code for all blocks: compiled ones share their graphs."""
    routers: Any = block.routers
    try:
        return type(block).forward(block, *args, **inputs), [router.route for router in routers]
    finally:  # a recomputation ends by an exception
        for router in routers:
            router.route = None


def _keeping_route(router: Any, *args: Any, **inputs: Any) -> Any:
    output = type(router).forward(router, *args, **inputs)
    logits_TE = output[0].float()
    is_softmax = router.scores == "softmax"
    router.route = logits_TE.softmax(-1) if is_softmax else F.normalize(logits_TE.sigmoid(), p=1.0, dim=-1), output[2]
    return output


def _compiled(block: nn.Module, forward: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """Compiled in training only. In generation, the growing cache of every layer would exhaust the recompilation limit, which
    all blocks share, and training would silently continue uncompiled."""
    return (compiled if block.training else forward)(*args, **inputs)


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **inputs)
    return checkpoint(forward, *args, use_reentrant=False, **inputs)
