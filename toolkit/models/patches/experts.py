"""Experts and routers of mixtures.

Replaces: the product that computes few tokens' experts; the forward of routers, for an auxiliary loss, and of the blocks that
hold them.
Why: grouped products change last bits with the routing of other tokens, and read sizes on the host in fp32; transformers pools
the layers' auxiliary losses, over the tokens of a micro-batch.
Until: transformers' routers hand out scores (5.24 does not).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Route = tuple[torch.Tensor, torch.Tensor]
"""Of a router: scores (tokens, experts), which add up to 1, and the experts that each token is sent to, int64."""


@contextlib.contextmanager
def experts_by_token(model: PreTrainedModel) -> Iterator[None]:
    """Compute the experts of each token by products of its own (`batched_mm`), for few tokens: each copies the weights of its
    experts. Grouped products change size with the routing of other tokens, which changes last bits; on the meta device they are
    in bf16 only.
    """
    config: Any = model.config
    parts = {key: part for key in config.sub_configs if hasattr(part := getattr(config, key, None), "to_dict")}
    before = {key: private("_experts_implementation", part) for key, part in {"": config, **parts}.items()}
    config._experts_implementation = "batched_mm"  # also in nested configs: a tower for images may take none
    try:
        yield
    finally:
        config._experts_implementation = before


def router_scores(model: PreTrainedModel) -> dict[type, str]:
    """What makes scores of logits, `softmax` or `sigmoid`, by the class of the routers: those whose first output, the logits,
    transformers records; weights and experts of each token follow. Empty where the code of one does not tell."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import OutputRecorder

    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    recorders = [(private("_can_record_outputs", owner) or {}).get("router_logits") for owner in owners]
    classes: list[Any] = [each.target_class for each in recorders if isinstance(each, OutputRecorder) and each.index == 0]
    present = {type(module) for module in model.modules()}
    sources = {each: inspect.getsource(each.forward) for each in classes if each in present}
    found = {each: re.findall("softmax|sigmoid", source) for each, source in sources.items()}
    # Gemma 4's first output are probabilities; Zaya sends the tokens that skip the experts to expert 0.
    are_logits = all(re.search(r"return \(?\s*\w*logits", source) and "skip" not in source for source in sources.values())
    is_known = are_logits and all(len(set(words)) == 1 for words in found.values())
    return {each: words[0] for each, words in found.items()} if is_known else {}


@contextlib.contextmanager
def routes_noted(model: PreTrainedModel, blocks: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Route]]]:
    """Around compilation and checkpointing of these blocks: a block returns its routers' routes inside of both, and notes them
    outside, those of its last forward, in what this yields. So a recomputation neither notes them nor keeps their graph."""
    noted: dict[str, list[Route]] = {}
    scores = router_scores(model) if blocks else {}

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
