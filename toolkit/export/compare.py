"""Compares a reloaded export with the trained model: weights bit for bit, logits within a tolerance."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("toolkit")

LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between the trained and the reloaded model's logits, as a share of the largest logit.

The reloaded model computes in fp32 on one process, the trained one in its compute dtype, sharded.
"""


def reload(skeleton: PreTrainedModel, name_or_path: str | Path, **options: Any) -> PreTrainedModel:
    """A model of the skeleton's class, loaded by plain transformers in fp32 on the CPU."""
    attention = skeleton.config._attn_implementation
    # The CPU has no flash attention. Keep the others: a model may differ between them (Gemma 2 caps scores in `eager` only).
    if attention in ("eager", "sdpa"):
        options["attn_implementation"] = attention
    loaded: Any = type(skeleton).from_pretrained(name_or_path, dtype=torch.float32, use_safetensors=True, **options)
    return loaded.eval()


def compare_weights(weights: dict[str, torch.Tensor], reloaded: nn.Module, folder: Path) -> None:
    """Compare all weights bit for bit, in fp32.

    Raises:
        RuntimeError: naming the first weight that the reloaded model lacks or holds with another value.
    """
    parameters = dict(reloaded.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        if name not in parameters or not torch.equal(parameters[name], weight.float()):
            raise RuntimeError(f"{folder}: {name} is not what was trained")


@torch.no_grad()
def compare_logits(check: dict[str, torch.Tensor], reloaded: nn.Module, folder: Path, dtype: torch.dtype, why: str) -> None:
    """Compare the reloaded model's logits with the trained one's.

    Args:
        check: a forward's arguments, and the trained model's `logits` for them.
        dtype: the coarsest dtype that the trained model computed in or the reloaded one was stored in.
        why: explanation, printed if the logits differ in bf16, whose rounding grows with the model.

    Raises:
        RuntimeError: the logits differ in fp32.
    """
    inputs = {name: tensor for name, tensor in check.items() if name != "logits"}
    logits_BTV = reloaded(**inputs, use_cache=False).logits
    difference = (logits_BTV - check["logits"]).abs().max() / check["logits"].abs().max().clamp(min=1e-6)
    tolerance = LOGIT_TOLERANCE[dtype]
    if difference <= tolerance:
        return
    sentence = f"logits of {folder}, reloaded, differ by {difference:.2e} of the largest, more than {tolerance}"
    if dtype == torch.float32:
        raise RuntimeError(sentence)
    logger.warning(f"{sentence}; {why}")
