"""Trains tiny models under every preset that one rank can run, in one process that calls `finetune()` again and again.

    python -m benchmarks.gpu.presets --only fsdp2_offload single

Each run evaluates, is resumed in the middle from its checkpoint, exports, and is compared with an uninterrupted one on the CPU
in fp32: the losses of its steps and of its evaluation. What trains something else, resumes wrongly or cannot export fails.
"""

import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from benchmarks.gpu.parts import emit, finetune_here, part_parser, preset_file
from benchmarks.gpu.shapes import LORA, VOCABULARY, Case, Shape, list_flags, random_weights, write_inputs
from benchmarks.plan.plan_error import llama, t5

NUM_STEPS = 4
"""The run stops after half of them, and is resumed."""
TOLERANCES = {"no": 1e-4, "bf16": 2e-2, "fp8": 1e-1}
"""Most that a loss may differ from the CPU's in fp32, relative, by the precision of the preset: bf16 keeps 8 bits of a number,
e4m3 of fp8 four. The losses fall by `LEAST_GAIN` or more in these steps, or they would prove nothing."""
LEAST_GAIN = 0.1
EACH = ("single", "ddp", "fsdp2_full_shard", "fsdp2_shard_grad_op", "fsdp2_size_wrap", "fsdp2_activation_checkpointing",
        "fsdp2_offload", "fsdp1_full_shard", "fsdp1_shard_grad_op", "fsdp2_compile", "fsdp2_fp8")  # fmt: skip
"""Of one rank; a mesh of replicas and shards needs four. Compiled ones come last: they take the longest."""
SOME = ("single", "fsdp2_full_shard")
_T5 = t5(64, 128, 2, 4) | {"d_kv": 16, "vocab_size": VOCABULARY, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
_LLAMA = llama(64, 128, 2, 4, 2, VOCABULARY)
_LORA = LORA | {"adapter.modules_to_save": ["lm_head"]}  # below a frozen random head an adapter learns nothing
_OF_LLAMA: Shape = {"tokens": (48,), "rows": 8, "shares": (0.2, 1.0)}
KINDS = {
    "T5": (EACH, Case(title="T5", model=_T5, tokens=(48, 16), rows=8, shares=(0.2, 1.0))),
    "Llama": (EACH, Case(title="Llama", model=_LLAMA, **_OF_LLAMA)),
    "LoRA": (SOME, Case(title="LoRA", model=_LLAMA, flags=_LORA, **_OF_LLAMA)),
    "NF4": (SOME, Case(title="NF4", model=_LLAMA, flags=_LORA | {"adapter.base_dtype": "nf4"}, **_OF_LLAMA)),
    "Mixtral": (SOME, Case(title="Mixtral", model=_LLAMA | {"model_type": "mixtral", "num_local_experts": 4}, **_OF_LLAMA)),
}
"""By name, the presets that it is trained under, and the model."""


def main() -> None:
    from toolkit.tools.report import page

    parser = part_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=EACH, default=EACH)
    options, failed = parser.parse_args(), []
    with (
        tempfile.TemporaryDirectory(prefix="presets-", dir=parser.parse_args().folder) as name,
        mock.patch.object(page, "save_run_page", lambda _: None),  # they take longer than a tiny run
        mock.patch.object(page, "draw_curves", lambda *_: None),
    ):
        folder = Path(name)
        expected = {kind: train_on_cpu(case, folder) for kind, (_, case) in KINDS.items()}
        for preset in options.only:
            for kind in [kind for kind, (presets, _) in KINDS.items() if preset in presets]:
                start_s = time.perf_counter()
                outcome = compare(KINDS[kind][1], preset, expected[kind], folder)
                emit("presets", model=kind, preset=preset, seconds=time.perf_counter() - start_s, **outcome)
                failed += [f"{kind} under {preset}"] if outcome["verdict"] == "FAILED" else []
    print(f"tried: {', '.join(options.only)}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def train_on_cpu(case: Case, folder: Path) -> list[float]:
    """Write the inputs of this model; its losses in fp32 on the CPU, without a stop."""
    (folder / case.title).mkdir()
    write_inputs(case, 2 * NUM_STEPS, folder / case.title, num_words=20)
    losses, _ = train(case, "on-cpu", preset_file("single_cpu", folder), folder / case.title, NUM_STEPS)
    assert losses[NUM_STEPS - 1] < (1 - LEAST_GAIN) * losses[0], f"{case.title} learns too little: {losses}"
    return losses


def compare(case: Case, preset: str, expected: list[float], folder: Path) -> dict[str, Any]:
    """Train, resume and export under the preset; its verdict, and how far its losses are from `expected`."""
    if preset == "fsdp2_fp8" and (why := why_no_float8()):
        return {"verdict": "left out", "why": why}
    try:
        file = preset_file(preset, folder)
        tolerance = TOLERANCES[yaml.safe_load(file.read_text())["mixed_precision"]]
        train(case, preset, file, folder / case.title, NUM_STEPS // 2)
        losses, resumed_after = train(case, preset, file, folder / case.title, NUM_STEPS)
        if resumed_after != [NUM_STEPS // 2]:
            raise RuntimeError(f"it was resumed after steps {resumed_after}")
    except Exception as error:  # the other presets may still run
        traceback.print_exc()
        return {"verdict": "FAILED", "why": re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]}
    difference = max(abs(loss / wanted - 1) for loss, wanted in zip(losses, expected, strict=True))
    return {"verdict": "passed" if difference <= tolerance else "FAILED", "difference": difference, "tolerance": tolerance}


def train(case: Case, run: str, preset: Path, folder: Path, num_steps: int) -> tuple[list[float], list[int]]:
    """Train a run up to this step and export it; the losses of its steps and of its last evaluation, and where it was resumed."""
    from toolkit.files.json_lines import load_json_lines

    flags = list_flags(case, folder, random_weights(case, folder, folder, "float32")) | {
        "data.eval_fraction": 0.2, "train.global_batch_size_rows": 16, "train.max_steps": num_steps, "optim.lr": 1e-2,
        "eval.num_rows": 8, "eval.max_new_tokens": 4, "run.name": run, "log_every_steps": 1, **case.flags,
    }  # fmt: skip
    result = finetune_here(preset, case.recipe, flags)
    if not list(result.export.glob("*.safetensors")):
        raise RuntimeError("it exported no weights")
    lines = load_json_lines(result.folder / "metrics.jsonl")
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    return [*losses, result.metrics["loss"]], [line["step"] for line in lines if line["kind"] == "resume"]


def why_no_float8() -> str:
    """Why fp8 cannot be tried here; empty if it can."""
    from toolkit.errors import UserError
    from toolkit.launch.environment import check_capability, check_torchao

    try:
        check_capability()
        check_torchao()
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
