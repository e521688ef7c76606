"""Adapters on mixtures of experts: which modules of them are adapted, and low ranks of each expert beside its products.

peft adds A·B to a weight of experts in each forward, in the weight's dtype: in bf16 most of a small adapter is rounded away. Here
x·A·B is added to the product. Names, files and formula are peft's. Shapes: S tokens, one for each expert that they are routed to,
E experts.

peft is imported at the top: import this where a model gets an adapter.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora import ParamWrapper
from torch import nn

from toolkit.errors import UserError
from toolkit.models.experts import expert_counts
from toolkit.models.quantized import QuantizedWeight
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RANK_MULTIPLE = 8
"""A grouped product wants rows of a multiple of 16 bytes."""


def choose_linears(model: PreTrainedModel, excluded: str) -> list[str] | None:
    """Ends of the names of all linear layers of a mixture of experts but head, routers and what an expression excludes; None if
    it is none.

    peft's `all-linear` also takes experts and routers in some models, and in the place of dense layers with the names of experts.
    """
    if not expert_counts(model):
        return None
    head = model.get_output_embeddings()
    named = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    named = [name for name in named if not re.fullmatch(excluded, name)]  # a tower's may end in a number, as decoder layers do
    dense = [name for name in named if not any(part.endswith(("gate", "router")) for part in name.split("."))]
    ends = sorted({name.rpartition(".")[2] for name in dense})
    return sorted({*ends} - taken_for_experts(model, ends))


def taken_for_experts(model: PreTrainedModel, ends: list[str]) -> set[str]:
    """The ends of modules' names that peft takes for experts or routers of a model of this kind, whatever has the name there."""

    def is_taken(end: str) -> bool:
        lora = LoraConfig(target_modules=[end])
        try:
            private("convert_peft_config_for_transformers")(lora, model, None)
        except ValueError:  # it wants all of an expert's names together
            return True
        return not lora.target_modules

    return set(filter(is_taken, ends))


def compute_beside(model: nn.Module, what: str) -> None:
    """Let the adapters of experts that peft has injected compute beside the products, in place; an adapter `what` that is on
    another parameter is a `UserError`."""
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            if module.parameter_name not in weights_of(module.get_base_layer()):
                held = f"{module.parameter_name} of {name}"
                raise UserError(f"{what} adapts {held}, which is not a weight of experts: adapt its layer by target_modules")
            module.__class__ = LowRankBeside
            beside: Any = module
            beside.products = private("_grouped_linear"), private("_batched_linear")


def weights_of(module: Any) -> tuple[str, ...]:
    """Names of the weights, in order, if the module holds those of all experts of a layer, which transformers computes by its
    `grouped_mm` (`use_experts_implementation`, integrations/moe.py); else none."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj") if hasattr(module, "is_transposed") else ()


class LowRankBeside(ParamWrapper):
    """peft's wrapper of a weight of experts; those of both weights are nested."""

    products: tuple[Any, Any]

    def forward(self, hidden_TD: torch.Tensor, *routing_TK: torch.Tensor, **outer: LowRankBeside) -> torch.Tensor:  # type: ignore[override]
        """As the experts' forward, by transformers' `grouped_mm` or `batched_mm`, with adapters. Nothing is read on the host.
        `outer` are the wrappers around this one, by the weights' names."""
        adapters: dict[str, Any] = {**outer} if self.disable_adapters or self.merged else {**outer, self.parameter_name: self}
        experts: Any = self.base_layer
        if isinstance(experts, LowRankBeside):
            return experts(hidden_TD, *routing_TK, **adapters)
        chosen_TK, weights_TK = routing_TK
        grouped, batched = self.products
        by_token = private("_experts_implementation", experts.config) == "batched_mm"
        experts_S, order_S = chosen_TK.flatten().sort()
        numbers_E = torch.arange(experts.num_experts, device=experts_S.device)
        ends_E = torch.searchsorted(experts_S, numbers_E, right=True, out_int32=True)

        def linear(inputs_S: torch.Tensor, weight_E: Any, *rest: Any) -> torch.Tensor:
            if isinstance(weight_E, QuantizedWeight):
                if not by_token:
                    return weight_E.product(inputs_S.to(hidden_TD.dtype), ends=ends_E)
                weight_E = weight_E.weight
            if by_token:
                return batched(inputs_S.to(weight_E.dtype), weight_E[experts_S], *rest)
            return grouped(inputs_S, weight_E, ends_E, *rest)

        def adapted(inputs_S: torch.Tensor, name: str) -> torch.Tensor:
            bias_S = getattr(experts, f"{name}_bias")[experts_S] if experts.has_bias else None
            outputs_S = linear(inputs_S, getattr(experts, name), bias_S, experts.is_transposed)
            if name not in adapters:
                return outputs_S
            a_E, b_E, scale = adapters[name].factors(outputs_S.dtype)
            # In fp32 up to the next product: added to what is rounded to bf16, a small number would be rounded away.
            return outputs_S + scale * linear(linear(inputs_S, a_E), b_E).float()

        first, last = weights_of(experts)
        activate = private("_apply_gate", experts) if experts.has_gate else experts.act_fn
        outputs_S = adapted(activate(adapted(hidden_TD[order_S // chosen_TK.shape[1]], first)), last)
        if experts.has_post_expert_norm:
            outputs_S = experts.post_expert_norm(outputs_S)
        weighted_S = outputs_S * weights_TK.flatten()[order_S].unsqueeze(1)
        return weighted_S[order_S.argsort()].view(*chosen_TK.shape, -1).sum(dim=1).to(hidden_TD.dtype)

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
        """A (experts, rank, in), B (experts, out, rank) and the scale; the rank is filled up with zeros to `RANK_MULTIPLE`."""
        own: Any = self
        a_E = own.lora_A["default"].weight.to(dtype).view(self.num_experts, -1, own.in_features)
        b_E = own.lora_B["default"].weight.to(dtype).view(own.out_features, -1, self.num_experts).permute(2, 0, 1)
        missing = -a_E.shape[1] % RANK_MULTIPLE
        return F.pad(a_E, (0, 0, 0, missing)), F.pad(b_E, (0, missing)).contiguous(), self.scaling["default"]
