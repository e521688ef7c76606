"""Attention of packed rows: a dense mask against one causal sdpa a document, forward and backward, on one core.

Attention alone, and a whole micro-batch of a small Llama. Sides take turns in one process; times are CPU time, which a busy
machine stretches little. Writes `packed_attention_<hardware>_<date>.md` into `benchmarks/results/`.

    python -m benchmarks.throughput.packed_attention
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.measuring import build_parser, format_table, write_report
from toolkit.data.collate import CausalCollator
from toolkit.loss import summed_loss
from toolkit.models import documents
from toolkit.parallel import chunked_loss, masks

PACKS = ((512, 3), (2048, 7), (4096, 19))
"""Tokens and documents of a row."""
NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE = 8, 4, 32
WIDTH, NUM_BLOCKS, VOCAB_SIZE = NUM_HEADS * HEAD_SIZE, 4, 4096
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DENSE, BY_DOCUMENT = "sdpa", documents.BY_DOCUMENT
NUM_WARMUP = 2


def main() -> None:
    options = build_parser("Attention of packed rows on one core: dense mask or by document.", repetitions=9).parse_args()
    torch.set_num_threads(1)
    documents.register()
    parts: dict[str, Callable[..., dict[str, Callable[[], Any]]]] = {"attention": attention_sides, "micro-batch": model_sides}
    rows = []
    for dtype in DTYPES:
        for part, build_sides in parts.items():
            for num_tokens, num_documents in PACKS:
                seconds = take_turns(build_sides(draw_lengths(num_tokens, num_documents), DTYPES[dtype]), options.repetitions)
                ratios = [dense / one for dense, one in zip(seconds[DENSE], seconds[BY_DOCUMENT], strict=True)]
                cells = [f"{part}, {dtype}, {num_tokens:,} tokens of {num_documents} documents"]
                cells += [describe([1000 * value for value in seconds[side]], 1) for side in (DENSE, BY_DOCUMENT)]
                rows.append([*cells, describe(ratios, 2) + " ×"])
                print(" | ".join(rows[-1]), flush=True)
    about = f""".

One thread, {options.repetitions} repetitions, sides by turns, after {NUM_WARMUP} of warm-up; median (first to third quartile)
of CPU time; ratios are taken within a repetition. Load of {os.cpu_count()} cores at the end: {os.getloadavg()[0]:.1f}.
Forward and backward: of attention alone ({NUM_HEADS} heads of {HEAD_SIZE}, {NUM_KEY_HEADS} of keys and values; the mask is
made before), and of a Llama of {NUM_BLOCKS} blocks of these (width {WIDTH}, vocabulary {VOCAB_SIZE:,}), with what makes its
mask and its loss. bf16: tensors of the attention, autocast of the model."""
    table = format_table(["forward and backward", "dense mask, ms", "by document, ms", "dense, times by document"], rows)
    title = "Packed rows: a dense mask or document by document"
    write_report("packed_attention", title, about, [table], packages=["torch", "transformers"])


def draw_lengths(num_tokens: int, num_documents: int) -> list[int]:
    """Lengths of documents that add up to `num_tokens`, cut at random, the same in every run."""
    cuts = sorted(random.Random(num_tokens).sample(range(1, num_tokens), num_documents - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, num_tokens], strict=True)]


def attention_sides(lengths: list[int], dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Attention as a block calls it, by side."""
    num_tokens = sum(lengths)
    query, key, value = (
        torch.randn(1, heads, num_tokens, HEAD_SIZE, dtype=dtype, requires_grad=True)
        for heads in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    )
    module = torch.nn.Module()
    module.num_key_value_groups = NUM_HEADS // NUM_KEY_HEADS  # type: ignore[assignment]  # as transformers' attention has it
    number_T = torch.repeat_interleave(torch.tensor(lengths))
    dense_11TT = (number_T[:, None] == number_T).tril()[None, None]
    starts_N1 = torch.tensor([0, *lengths]).cumsum(0).int()
    located = documents.Documents(tuple(lengths), starts_N1)

    def take(mask: Any) -> Callable[[], Any]:
        return lambda: documents.attend(module, query, key, value, mask, scaling=HEAD_SIZE**-0.5)[0].sum().backward()

    return {DENSE: take(dense_11TT), BY_DOCUMENT: take(located)}


def model_sides(lengths: list[int], dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """A micro-batch of a small Llama, by side."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = [{"input_ids": [7] * length, "labels": [-100] + [7] * (length - 1)} for length in lengths]

    def build(attention: str) -> Callable[[], Any]:
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=NUM_BLOCKS,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_KEY_HEADS,
        )
        model = LlamaForCausalLM(config)
        model.set_attn_implementation(attention)
        chunked_loss.install(model)
        masks.install(model)
        batch = CausalCollator(pad_token_id=0, one_row=attention == BY_DOCUMENT).collate([rows])

        def take() -> None:
            with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                loss, _ = summed_loss(model, batch)
            loss.backward()

        return take

    return {side: build(side) for side in (DENSE, BY_DOCUMENT)}


def take_turns(sides: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of CPU time of each repetition, by side; each second repetition begins with the other side."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repetition in range(-NUM_WARMUP, repetitions):
        for side in list(sides)[:: 1 if repetition % 2 else -1]:
            start_s = time.process_time()
            sides[side]()
            if repetition >= 0:
                seconds[side].append(time.process_time() - start_s)
    return seconds


def describe(values: Sequence[float], digits: int) -> str:
    """`median (first to third quartile)`."""
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:,.{digits}f} ({first:,.{digits}f} to {third:,.{digits}f})"


if __name__ == "__main__":
    main()
