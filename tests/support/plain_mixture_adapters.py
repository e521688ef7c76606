"""The reference of adapters on mixtures of experts: a few steps of plain transformers and peft on one process, in fp64.

Nothing of the toolkit is imported here. Experts are computed by the model's own loop, with weights that peft has added A·B to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.support.plain_mixture import BETA1, BETA2, EPS, LR, NUM_STEPS, WEIGHT_DECAY
from tests.support.plain_pytorch import Row, _loss_sum, _num_labels, _row

KINDS = ("attention", "experts")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
RANK = 3
"""Ranks share its rows unevenly."""


@dataclass
class Expected:
    """What a run must come to."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    """Of the first step, numpy, by the names of what trains."""
    adapter: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the last step, by the names that peft writes."""
    merged: dict[str, torch.Tensor] = field(default_factory=dict)
    """The merged model after it, by the names that `save_pretrained` writes."""


def load_plain(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The model of `folder`, with experts in the model's own loop."""
    how: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how).eval()


def start_adapter(folder: Path, kind: str, to: Path) -> None:
    """Save an adapter with random values on the attention of a model, or on that and the experts, as peft does."""
    torch.manual_seed(0)
    model = load_plain(folder, torch.float32)
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    targets = sorted({name.rpartition(".")[2] for name in linear if ".self_attn." in name})
    lora = LoraConfig(r=RANK, lora_alpha=6, target_modules=targets, target_parameters=EXPERTS if kind == "experts" else None)
    adapted = get_peft_model(model, lora)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape)
    adapted.save_pretrained(to)


def train_plain(folder: Path, adapter: Path, rows: list[Row]) -> Expected:
    """Train an adapter further; each step takes all rows, and the learning rate falls linearly to 0."""
    model: Any = PeftModel.from_pretrained(load_plain(folder), adapter, is_trainable=True)
    config, tokenizer = model.get_base_model().config, transformers.AutoTokenizer.from_pretrained(folder)
    trained = {name: p for name, p in model.get_base_model().named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY)
    num_labels = sum(_num_labels(_row(tokenizer, row, config)) for row in rows)
    expected = Expected()
    for step in range(NUM_STEPS):
        losses = [_loss_sum(model, tokenizer, row, config) / num_labels for row in rows]
        sum(losses).backward()  # type: ignore[union-attr]
        expected.losses.append(sum(loss.item() for loss in losses))
        expected.gradients = expected.gradients or {name: p.grad.numpy().copy() for name, p in trained.items()}
        optimizer.param_groups[0]["lr"] = LR * (NUM_STEPS - step) / NUM_STEPS
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(adapter / "trained")
    expected.adapter = load_file(adapter / "trained" / "adapter_model.safetensors")
    model.merge_and_unload().save_pretrained(adapter / "merged")
    expected.merged = load_file(adapter / "merged" / "model.safetensors")
    return expected
