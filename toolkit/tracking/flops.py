"""Counts the FLOPs that a batch needs. MFU (model FLOPs utilization) is these over what the GPUs could do in that time.

Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B: a token needs 2 FLOPs for each weight that multiplies it, 2 for the
gradient of the input, if anything before it trains, and 2 for that of the weight, if it trains (6 N; 4 N in a frozen base).
Attention counts within a document; where it is causal half the pairs, where PaLM counts all. Padding, recomputation, embeddings
and the experts that a token does not go to do not count; the head counts at the labels. A sliding window counts as full.

torch's `FlopCounterMode` counts the model's own forward and backward on the meta device for a few rows, and each kind of block
once: 32 alike would take two seconds a row. The FLOPs of a row are a polynomial of second degree in its two lengths: tokens and
labels, or source and target tokens. Of a pair of answers both documents count, each with its own prompt, as both are computed; of
an encoder-decoder's the source once and both targets.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from toolkit.data.collate import Collator, move_to
from toolkit.models.patches import chunked_loss, masks
from toolkit.models.patches.experts import experts_by_token
from toolkit.parallel.gather import dequantized_copy
from toolkit.parallel.units import repeated_blocks
from toolkit.parallel.wrap import ShardedModel
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toolkit.objectives.objective import Objective

logger = logging.getLogger("toolkit")

PEAK_TFLOPS = {
    "B200": 2250, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "A100": 312,
    "L40S": 362, "L4": 121, "A10": 125, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
"""Dense bf16 products of a GPU by its name, from NVIDIA's data sheets; the first of these words in its name counts. torch's own
table (`torch/_inductor/analysis/device_info.py`) asks for the whole name, and has an L4's with sparsity."""
SHAPES = np.array([(2, 1), (3, 1), (4, 1), (3, 2), (4, 2), (4, 3)])
"""Lengths of the rows that are counted, in units. Labels alone multiply nothing but the head: there four rows are enough."""
LARGEST_ERROR = 0.01
"""Of the polynomial at one more row, relative: a model that pads by itself has none."""


def find_peak_tflops(gpu: str) -> int | None:
    """TFLOP/s of a GPU in dense bf16 products, by torch's name for it; None if it is not in the table."""
    if re.search(r"\b(MIG|Laptop|Ti|D)\b", gpu):  # a slice of that GPU, or another one
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", gpu)), None)


def seconds_at_peak(
    objective: Objective, sharded: ShardedModel, collator: Collator, texts: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray | None:
    """The seconds that a GPU of this run needs at its peak for each row; None if that cannot be known. `texts` are of
    `Objective.computed_lengths`."""
    device, skeleton = sharded.accelerator.device, sharded.skeleton
    peak = find_peak_tflops(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    if peak is None:
        return None
    try:
        per_term = count_per_term(objective, skeleton, collator)
    except Exception as error:  # any model's code runs here, and what watches a run never ends it
        logger.info(f"the log has no MFU: the FLOPs of {type(skeleton).__name__} could not be counted ({error})")
        return None
    # The polynomial is that of a row whose texts have equal lengths.
    terms = np.mean([_terms(*lengths) for lengths in texts], axis=0)
    return per_term @ terms[: len(per_term)] / (peak * 1e12)


def count_per_term(objective: Objective, skeleton: PreTrainedModel, collator: Collator) -> np.ndarray:
    """The polynomial of a row's FLOPs, without what each micro-batch needs once (DoRA's norms)."""
    from torch.utils.flop_counter import FlopCounterMode

    copied: Any = dequantized_copy(skeleton)  # of which buffers are on the CPU
    model = copied.to("meta", torch.float32)
    model.set_attn_implementation("eager")  # every model has it, and its products can be counted
    chunked_loss.install(model, max_logits=2**62)  # one chunk: what others recompute does not count
    masks.install(model)
    unit = max(1, min(512, getattr(model.config, "max_position_embeddings", None) or 512) // 4)
    token, counts = int(collator.pad_token_id == 0), []
    shapes = SHAPES if len(objective.limits) == 2 else SHAPES[:4]
    collator = dataclasses.replace(collator, multiples=(1,) * len(collator.multiples))  # no padding
    extra = np.array([3 * unit + unit // 2 + 1, unit + 3])
    counted = _CountedBlocks()
    for block in repeated_blocks(model).values():
        block.forward = functools.partial(counted.call, block, block.forward)
    for first, second in [*(shapes * unit), extra]:
        batch = collator.collate([[objective.build_row(first, second, token)]])
        with FlopCounterMode(display=False) as counted.counter, experts_by_token(model):
            objective.loss(model, move_to(torch.device("meta"), batch))[0].backward()
        counts.append(counted.counter.get_total_flops() + counted.repeated)
        counted.repeated = 0
    *counts, expected = counts
    per_term = np.linalg.solve(_terms(*shapes.T)[: len(shapes)].T, counts)
    if abs(per_term @ _terms(*(extra / unit))[: len(shapes)] / expected - 1) > LARGEST_ERROR:
        raise ValueError("a row's are not a polynomial of its lengths")
    per_term *= np.array([0, 1, 1, 1, 1, 1])[: len(shapes)] / _terms(np.array(unit), np.array(unit))[: len(shapes)]
    per_term[-1] /= 2  # the causal half
    return per_term


class _CountedBlocks:
    """Blocks that run forward and backward where they are called, once for each kind and shapes of inputs. For another one alike
    the count and the outputs' shapes are taken. Outputs depend on the inputs, so that what stands before has its backward."""

    def __init__(self) -> None:
        self.counter: Any = None
        self.repeated = 0
        """FLOPs of blocks that did not run."""
        self.known: dict[Any, tuple[int, list[Any], Any]] = {}

    def call(self, block: torch.nn.Module, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        given, structure = private("tree_flatten")((args, inputs))
        kind = _kind(block), str(structure), *map(_describe, given)
        if is_new := kind not in self.known:
            before = self.counter.get_total_flops()
            args, inputs = private("tree_unflatten")([_detached(value) for value in given], structure)
            outputs, structure = private("tree_flatten")(forward(*args, **inputs))
            if ends := [value for value in outputs if _trains(value)]:
                torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
            flops = self.counter.get_total_flops() - before
            self.known[kind] = flops, [_detached(value) for value in outputs], structure
        flops, outputs, structure = self.known[kind]
        self.repeated += 0 if is_new else flops
        link = sum(value.mean() for value in given if _trains(value))
        return private("tree_unflatten")([value + link if _trains(value) else value for value in outputs], structure)


def _kind(block: torch.nn.Module) -> Any:
    """Equal for blocks that compute alike: what they are made of, and their settings. Numbers are left out: one is its place."""
    settings = [
        (type(module), *((name, value) for name, value in vars(module).items() if isinstance(value, bool | str)))
        for module in block.modules()
    ]
    return tuple(settings), tuple((name, _describe(parameter)) for name, parameter in block.named_parameters())


def _describe(value: Any) -> Any:
    return (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else repr(value)


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _terms(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.stack([first**0, first, second, first**2, first * second, second**2])
