"""Mixtures of experts: which of them train exactly here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.errors import UserError
from toolkit.models.patches.experts import router_scores

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
            what = f"model.name_or_path {name} has {len(children)} experts as separate modules ({path})"
            remedy = "take a model that holds them in one weight, such as Mixtral, Qwen3-MoE or gpt-oss"
            raise UserError(f"{what}, and FSDP2 would add up gradients of different ones: {remedy}")
