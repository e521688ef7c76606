"""Host time and kernel launches of a training step, by part: what the CPU does to keep a GPU busy. Needs no GPU.

A *narrow twin* of each model runs: all of its blocks and parameters, with vectors of 16 elements and rows of 4 tokens, on the CPU
in one thread, as rank 0 of 8 ranks of which the others do not exist. Its kernels do next to nothing, so that what is left is
Python, autograd, the dispatcher and FSDP2, as beside a GPU. Not seen are streams, events and the launches themselves (a few
microseconds each). Attention and dropout are stand-ins for CUDA's, one launch each.

A launch is an operation of aten that neither returns a view nor only allocates, or a collective. Host time is processor time.

    python -m benchmarks.throughput.host_time
"""

import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.measuring import build_parser, format_table, run_side, write_report
from benchmarks.throughput.host_clock import REST, Clock, kernels

PACKAGES = ["torch", "transformers", "accelerate", "peft"]
NUM_RANKS = 8
GOALS = {"single": 1.15, "fsdp2_full_shard": 1.6}
"""Most milliseconds of a step, as a multiple of plain forward and backward in bf16."""
PARTS = ("forward", "loss", "backward", "FSDP", "clipping", "AdamW", REST)
"""`FSDP` runs inside forward and backward, and is counted apart. A plain side's rest is its `zero_grad`."""


def t5(layers: int) -> dict[str, Any]:
    return {
        "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": layers, "num_heads": 2, "vocab_size": 64,
        "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip


LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
LORA = ["--adapter.method=lora", "--adapter.target_modules=all-linear", "--adapter.rank=8"]
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "flan-t5-base": (t5(12), ["--data.max_source_length_tokens=4", "--data.max_target_length_tokens=4"]),
    "flan-t5-large": (t5(24), ["--data.max_source_length_tokens=4", "--data.max_target_length_tokens=4"]),
    "Llama 8B, LoRA": (LLAMA, [*LORA, "--data.max_length_tokens=4", "--data.packing=false"]),
}
PRESETS = ("single", "fsdp2_full_shard", "fsdp2_shard_grad_op", "fsdp2_size_wrap")
SIDES = ("plain", "autocast", *PRESETS)
"""`plain`: weights in bf16, forward and backward only; `autocast`: in fp32, cast by autocast; then whole steps of ours."""


def main() -> None:
    """Measure every model in a process of its own, and write the table."""
    parser = build_parser(__doc__ or "", parts=list(MODELS))
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--model", choices=list(MODELS), help="measure a model in this process, and print the figures")
    parser.add_argument("--note", default="", help="a sentence for the file")
    arguments = parser.parse_args()
    if arguments.model:
        print(json.dumps(measure(arguments.model, arguments.turns)))
        return
    sections = []
    for model in arguments.parts:
        command = [sys.executable, "-m", "benchmarks.throughput.host_time", "--model", model, "--turns", str(arguments.turns)]
        sections.append(f"## {model}\n\n{_table(run_side(command, num_threads=1).figures)}")
        print(sections[-1], flush=True)
    write_report("host_time", "Host time and launches of a step", f". {arguments.note}\n{_ABOUT}", sections, packages=PACKAGES)


_ABOUT = f"""
Narrow twins of the models on one thread of a CPU, as rank 0 of {NUM_RANKS} (see the script). Processor time in milliseconds, a
step of each side in turns: of each part the lower quartile, because other programs shared the machine; launches behind the
semicolon. `plain`: forward and backward of the same model in bf16; `autocast`: the same with fp32 weights, cast by autocast; then
whole steps of ours with a preset. In `fsdp2_size_wrap` the model is one shard unit. Goals: {GOALS["single"]} times `plain` with
`single`, {GOALS["fsdp2_full_shard"]} with `fsdp2_full_shard`. Python's garbage collection is off in the steps; what it takes
where it is automatic stands apart."""


def measure(model: str, num_turns: int) -> dict[str, Any]:
    """Milliseconds of every step by part, and launches by part, of each side."""
    import torch

    from toolkit.tools.plan.trace import fake_ranks

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with fake_ranks(NUM_RANKS), kernels() as clock:
        steps = {side: build_step(model, side, clock) for side in SIDES}
        sides: dict[str, dict[str, Any]] = {side: {"turns": [], "collected": []} for side in SIDES}
        for step in steps.values():
            for _ in range(3):
                step()
        for turn in range(num_turns):
            for side in SIDES[turn % len(SIDES) :] + SIDES[: turn % len(SIDES)]:
                with collecting_between_steps():
                    clock.restart()
                    steps[side]()
                    sides[side]["turns"].append(clock.read())
        for side, step in steps.items():
            with timing_collections() as seconds:
                for _ in range(10):
                    step()
            sides[side]["collected_ms"] = sum(seconds) * 1e3 / 10
            clock.restart()
            with clock.counting():
                step()
            sides[side]["launches"] = dict(clock.launches)
    return sides


@contextlib.contextmanager
def collecting_between_steps() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(1)


@contextlib.contextmanager
def timing_collections() -> Iterator[list[float]]:
    """Yields the processor seconds of each garbage collection, when it begins negative."""
    seconds: list[float] = []

    def note(phase: str, _: Any) -> None:
        seconds.append(time.thread_time() * (1 if phase == "stop" else -1))

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


def build_step(model: str, side: str, clock: Clock) -> Callable[[], None]:
    """A step of one side as a function. The loss is that of transformers for the plain sides."""
    import torch

    from benchmarks.measuring import REPOSITORY
    from toolkit.launch.accelerator import fsdp_version
    from toolkit.parallel.wrap import reduction_groups, shard_model
    from toolkit.tools.plan.strategy import load_strategy, planned_accelerator
    from toolkit.tools.plan.subject import build_batch, build_subject
    from toolkit.tools.plan.trace import fake_copy
    from toolkit.training import loop
    from toolkit.training.optim import build_optimizer
    from toolkit.training.skip_guard import SkipGuard

    config, flags = MODELS[model]
    is_plain = side not in PRESETS
    preset = REPOSITORY / "accelerate_configs" / f"{'single' if is_plain else side}.yaml"
    strategy = load_strategy(preset, 1 if "single" in preset.name else NUM_RANKS, 80.0)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        subject = build_subject(folder, strategy, flags, None)
        batch = build_batch(subject, 2)
    plain = fake_copy(subject.skeleton)  # outside of a fake mode, its tensors are real
    for tensor in (*plain.parameters(), *plain.buffers()):
        torch.nn.init.uniform_(tensor.data, -0.1, 0.1)
    if is_plain:
        return _plain_step(cast(torch.nn.Module, plain), batch, is_autocast=side == "autocast", clock=clock)
    # Ours: the run's own step on what it takes of a run.
    accelerator = planned_accelerator(strategy)
    sharded = shard_model(accelerator, cast(Any, plain.train()), gpu_bytes=strategy.gpu_bytes)
    assert (fsdp_version(accelerator) is not None) == strategy.is_fsdp
    optimizer = build_optimizer(subject.config.optim, sharded.model)
    optimizer.step = clock.timed("AdamW", optimizer.step)  # type: ignore[method-assign]
    history = SimpleNamespace(grad_norms=None, num_grad_norms=0)
    run = SimpleNamespace(
        config=subject.config, objective=subject.objective, sharded=sharded, optimizer=optimizer,
        hooks=SimpleNamespace(loss=None), reductions=SimpleNamespace(micro_batch=None),
        log=SimpleNamespace(memory=SimpleNamespace(record_batch=lambda *_: None)),
        writer=SimpleNamespace(copier=SimpleNamespace(make_device_wait=lambda: None)),
        trainable=[parameter for parameter in sharded.model.parameters() if parameter.requires_grad],
        guard=SkipGuard(subject.config.optim, cast(Any, history), reduction_groups(sharded.model)),
    )  # fmt: skip
    step = SimpleNamespace(step=1, num_label_tokens=len(batch["labels"]) * strategy.num_processes)
    micro_batch = SimpleNamespace(step=1, index=0, is_last=True, packs=[[0]])
    return lambda: cast(None, loop.train_step(cast(Any, run), cast(Any, step), iter([(micro_batch, batch)]), 1e-4, None))  # type: ignore[list-item]


def _plain_step(model: Any, batch: dict[str, Any], *, is_autocast: bool, clock: Clock) -> Callable[[], None]:
    import torch

    names = ("input_ids", "attention_mask", "decoder_input_ids")
    inputs = {name: batch[name] for name in names if name in batch}
    labels = batch.get("decoder_input_ids", batch["input_ids"])
    model.train()
    if not is_autocast:
        model.to(torch.bfloat16)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast), clock.part("forward"):
            loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        model.zero_grad()

    return step


def _table(sides: dict[str, Any]) -> str:
    """Milliseconds and launches of each part and side, and how many times the plain side's a step takes."""

    def low(side: str, part: str) -> float:
        return statistics.quantiles([turn.get(part, 0.0) for turn in sides[side]["turns"]], n=4)[0]

    rows = []
    for part in PARTS:
        both = [(low(side, part), sides[side]["launches"].get(part, 0)) for side in SIDES]
        rows.append([part, *(f"{spent:.1f}; {launches:,}" if launches else "" for spent, launches in both)])
    rows.append(["all", *(f"{low(side, 'ms'):.1f}; {sum(sides[side]['launches'].values()):,}" for side in SIDES)])
    rows.append(["times `plain`", *(f"{low(side, 'ms') / low(SIDES[0], 'ms'):.2f}" for side in SIDES)])
    rows.append(["garbage collection, apart", *(f"{sides[side]['collected_ms']:.1f}" for side in SIDES)])
    return format_table(["ms; launches", *(f"`{side}`" for side in SIDES)], rows)


if __name__ == "__main__":
    main()
