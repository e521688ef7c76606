"""Mixtures of experts: which of them train exactly here."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.errors import UserError
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""A config's names for the number of experts of a layer."""


def expert_counts(model: nn.Module) -> set[int]:
    """Numbers of experts, above 1, that a model's config names, or one nested in it (`text_config`, DBRX's `ffn_config`)."""

    def find(settings: dict[str, Any]) -> set[int]:
        own = {count for key in EXPERT_COUNTS if isinstance(count := settings.get(key), int) and count > 1}
        return own.union(*(find(value) for value in settings.values() if isinstance(value, dict)))

    config: Any = getattr(model, "config", None)
    return find(config.to_dict()) if config is not None else set()


@contextlib.contextmanager
def experts_by_token(model: PreTrainedModel) -> Iterator[None]:
    """Compute the experts of each token by products of its own (`batched_mm`), for few tokens: each copies the weights of its
    experts. Grouped products change size with the routing of other tokens, which changes last bits; on the meta device they are
    in bf16 only.
    """
    before = private("_experts_implementation", model.config)
    model.config._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        model.config._experts_implementation = before


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


def check_routers(model: PreTrainedModel, setting: str, name: str) -> None:
    """Refuse `optim.router_aux_loss` for a model without what it needs, by a `UserError`; `name` is the model's path."""
    missing = "no routers of experts whose scores are known" * (not router_scores(model))
    if not getattr(model.config.get_text_config(), "router_aux_loss_coef", None):
        missing = missing or "no router_aux_loss_coef above 0 in its config.json: set it there, as in 0.001"
    if setting != "off" and missing:
        raise UserError(f"optim.router_aux_loss is {setting}, but model.name_or_path {name} has {missing}; or set it to off")


def check_experts(model: PreTrainedModel, name: str) -> None:
    """Refuse a model whose experts are modules, of which a forward runs those that its tokens are routed to; `name` is its path.

    FSDP2 reduces the parameters that have a gradient in the order of a rank: where one rank runs expert 0 and another expert 1,
    both get the sum of both gradients, without an error. Experts that are the rows of one parameter all have a gradient. The
    `UserError` names the modules.
    """
    counts = expert_counts(model)
    for path, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        shapes = {(type(child), *(p.shape for p in child.parameters())) for child in children}
        is_nested = any(part.isdigit() for part in path.split("."))  # the list of blocks may be as long
        if is_list and is_nested and len(children) in counts and len(shapes) == 1:
            raise UserError(
                f"model.name_or_path {name} has {len(children)} experts as separate modules ({path}): a rank runs only those "
                "that its tokens are routed to, and FSDP2 would add up gradients of different experts: take a model that holds "
                "them in one weight, such as Mixtral, Qwen3-MoE or gpt-oss"
            )
