"""Compares an exported folder with the trained model: its names on the meta device, its logits within a tolerance."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.distributed.device import GIB, free_memory_bytes
from toolkit.errors import UserError
from toolkit.models.config import pop_quantization
from toolkit.models.load import from_files
from toolkit.private import private
from toolkit.variables import local_world_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("toolkit")

LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between the trained and the reloaded model's logits, as a share of the largest logit.

The reloaded model computes in fp32 on one process, the trained one in its compute dtype, sharded.
"""
LOGITS_LIMIT_S = 120.0
"""Logits are left out if the rule of `choose_device` gives them more seconds: every rank waits meanwhile."""
LOGITS_SHARE_OF_FREE_MEMORY = 0.5
READ_BYTES_PER_S = 5e8
FLOP_PER_S = {"cpu": 2e10, "cuda": 1e13}
"""fp32, of a thread or of a device. Assumed, and on the safe side: a CPU core reached 3.5e10; a GPU's was not measured."""


def reload(skeleton: PreTrainedModel, name_or_path: str | Path, device: torch.device, **options: Any) -> PreTrainedModel:
    """A model of the skeleton's class, loaded by plain transformers in fp32 on `device`; a quantized base is dequantized."""
    from transformers import GenerationConfig

    def build_base() -> Any:
        config = type(skeleton.config).from_pretrained(name_or_path, revision=options.get("revision", "main"))
        pop_quantization(config)
        with torch.device("meta"):
            return type(skeleton)(config)

    attention = private("_attn_implementation", skeleton.config)
    # The CPU has no flash attention. Keep the others: a model may differ between them (Gemma 2 caps scores in `eager` only).
    if attention in ("eager", "sdpa"):
        options["attn_implementation"] = attention
    if device.type != "cpu":  # otherwise all of it would pass through host memory
        options["device_map"] = {"": device}
    options |= {"dtype": torch.float32, "ignore_mismatched_sizes": False, "generation_config": GenerationConfig()}
    loaded, _ = from_files(type(skeleton), str(name_or_path), f"model {name_or_path}", options, build_base)
    return loaded.eval()


def choose_device(device: torch.device, num_parameters: int, num_tokens: int) -> tuple[torch.device | None, str]:
    """Where to reload a model in fp32 and compute its logits: this rank's device, the CPU, or None with the reason.

    The rule: 4 bytes a parameter take at most `LOGITS_SHARE_OF_FREE_MEMORY` of the memory that is free there; those bytes read at
    `READ_BYTES_PER_S`, and 2 operations a parameter and token at `FLOP_PER_S`, take at most `LOGITS_LIMIT_S`.
    """
    num_bytes = 4 * num_parameters
    reasons = []
    for place in dict.fromkeys([device.type, "cpu"]):
        here = device if place == device.type else torch.device(place)
        free = free_memory_bytes(here) * (local_world_size() if place == "cpu" else 1)  # the node's other ranks wait
        speed = FLOP_PER_S[place] * (torch.get_num_threads() if place == "cpu" else 1)
        seconds = num_bytes / READ_BYTES_PER_S + 2 * num_parameters * num_tokens / speed
        if num_bytes <= LOGITS_SHARE_OF_FREE_MEMORY * free and seconds <= LOGITS_LIMIT_S:
            return here, ""
        reasons.append(f"on {here} {free / GIB:.1f} GiB are free, and it would take {seconds:.0f} s")
    share, limit = f"{LOGITS_SHARE_OF_FREE_MEMORY:.0%}", f"{LOGITS_LIMIT_S:.0f} s"
    return None, f"in fp32 the model takes {num_bytes / GIB:.1f} GiB; {'; '.join(reasons)}; the limits are {share} and {limit}"


@torch.no_grad()
def check_logits(
    folder: Path,
    skeleton: nn.Module,
    load: Callable[[torch.device], nn.Module],
    check: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    why: str,
) -> None:
    """Compare the logits of an exported folder with the trained model's, if `choose_device` and memory allow it; print if not.

    Args:
        skeleton: has the parameters that `load` loads in fp32 onto a device.
        check: a forward's arguments, and the trained model's `logits` for them.
        dtype: the coarsest dtype that the trained model computed in or the reloaded one was stored in; None: their bases differ,
            and the difference is printed.
        why: explanation, printed if the logits differ in bf16, whose rounding grows with the model, or if their bases differ.

    Logits that differ in fp32 are a `RuntimeError`; a folder or an adapter's base that can no longer be read is a `UserError`.
    """
    num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    num_tokens = sum(tensor.numel() for name, tensor in check.items() if name.endswith("input_ids"))
    chosen, reason = choose_device(device, num_parameters, num_tokens)
    try:
        if chosen is not None:
            inputs = {name: tensor.to(chosen) for name, tensor in check.items() if name != "logits"}
            logits_BTV = load(chosen)(**inputs, use_cache=False).logits.cpu()
    except UserError as error:
        raise UserError(f"{folder} stands, but its logits cannot be compared: {error}") from None
    except torch.OutOfMemoryError as error:  # a fragmented device has less than is free
        chosen, reason = None, str(error).splitlines()[0]
    if chosen is None:
        return logger.info(f"{folder} stands; its logits are not compared: {reason}")
    difference = (logits_BTV - check["logits"]).abs().max() / check["logits"].abs().max().clamp(min=1e-6)
    if dtype is None:
        logger.info(f"logits of {folder} differ from the trained model's by {difference:.2e} of the largest: {why}")
        return
    tolerance = LOGIT_TOLERANCE[dtype]
    if difference <= tolerance:
        return
    sentence = f"logits of {folder}, reloaded, differ by {difference:.2e} of the largest, more than {tolerance}"
    if dtype == torch.float32:
        raise RuntimeError(f"{sentence}: the folder stands, but does not compute what the trained model does, so do not use it")
    logger.warning(f"{sentence}; {why}")
