"""The reference of the mixtures of experts: a few steps of plain transformers and torch on one process, a row at a time, in fp64.

Nothing of the toolkit is imported here. Experts are computed by the model's own loop, not by grouped products.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.plain_pytorch import Row, _labels, _loss_sum

NUM_STEPS, LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 3, 1e-2, 0.8, 0.9, 1e-3, 0.1
"""The large eps lets the size of a gradient count, to which Adam is blind without it."""


@dataclass
class Expected:
    """What a run must come to."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    """Of the first step, numpy, by the names of what trains."""
    weights: dict[str, Any] = field(default_factory=dict)
    """After the last step, torch, by the names that `save_pretrained` writes."""


def train_plain(folder: Path, rows: list[Row], frozen: str) -> Expected:
    """Train the model of `folder`; each step takes all rows, and the learning rate falls linearly to 0.

    Args:
        frozen: a regular expression of the names of what does not train; empty: nothing.
    """
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    trained = {name: p for name, p in model.named_parameters() if not (frozen and re.fullmatch(frozen, name))}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    kept = [name for name in trained if "norm" in name or "bias" in name]
    groups = [
        {
            "params": [p for name, p in trained.items() if (name in kept) is is_kept],
            "weight_decay": 0.0 if is_kept else WEIGHT_DECAY,
        }
        for is_kept in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS)
    num_labels = sum(len(_labels(tokenizer, row, model.config)) for row in rows)
    expected = Expected()
    for step in range(NUM_STEPS):
        loss = 0.0
        for row in rows:
            row_loss = _loss_sum(model, tokenizer, row, model.config) / num_labels
            row_loss.backward()
            loss += row_loss.item()
        expected.losses.append(loss)
        expected.gradients = expected.gradients or {name: p.grad.numpy().copy() for name, p in trained.items()}
        for group in optimizer.param_groups:
            group["lr"] = LR * (NUM_STEPS - step) / NUM_STEPS
        optimizer.step()
        optimizer.zero_grad()
    expected.weights = load_saved(model, folder)
    return expected


def load_saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes."""
    from safetensors.torch import load_file

    model.save_pretrained(folder / "trained")
    return load_file(folder / "trained" / "model.safetensors")
