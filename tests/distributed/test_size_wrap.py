"""Size-based wrap on the recipes: units inside units, tied weights, a head that ranks call unequally often; still one curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_invariants import CHECKPOINTING
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.model_folders import build_model_folders
from tests.support.small_run import check_curve, check_gradients, run_recipes, write_inputs
from toolkit.files.json_lines import load_json_lines

MIN_NUM_PARAMS = 1500
SIZE_BASED = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": MIN_NUM_PARAMS}
FSDP1 = GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_full_shard"]
WHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {}),
    "fsdp2": ("fsdp2_cpu", {"fsdp_config": SIZE_BASED}),
    "fsdp2-checkpointing": ("fsdp2_cpu", {"fsdp_config": SIZE_BASED | CHECKPOINTING["fsdp_config"]}),
    "fsdp1": ("fsdp1_full_shard", FSDP1 | {"fsdp_config": SIZE_BASED | FSDP1["fsdp_config"]}),
}
CUT = ["--data.packing", "false", "--data.max_length_tokens", "64"]
KINDS: dict[str, tuple[str, list[str]]] = {
    "t5": ("t5", ["--model.from_scratch", "true"]),
    "llama": ("llm", CUT),
    "llama-lora": ("llm", [*CUT, "--adapter.method", "lora", "--adapter.rank", "4"]),
}
"""Kind: recipe, flags. The Llama is not tied: its embedding is a unit of its own, its head is not."""
RUNS = [("t5", "fsdp2"), ("t5", "fsdp1"), ("llama", "fsdp2-checkpointing"), ("llama", "fsdp1"), ("llama-lora", "fsdp2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the other invariants and a model for each recipe."""
    folder = tmp_path_factory.mktemp("size-wrap")
    write_inputs(folder)
    (folder / "model").rename(folder / "t5")
    # Without ReLU's kink: one unit whose input is zero up to rounding moved the norm of a step's gradient by 7e-5.
    config = folder / "t5" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"feed_forward_proj": "gated-gelu"}))
    rows = [{"prompt": row["source"], "completion": " " + row["target"]} for row in load_json_lines(folder / "rows.jsonl")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_on_ranks(build_model_folders, preset="single", overrides={"mixed_precision": "no"}, args=(folder, ["llama"]))
    (folder / "llama").rename(folder / "llm")
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> dict[str, Any]:
    """Every run once, by its name; and what one process comes to, of each kind."""
    return run_recipes(
        folder, {f"{kind}-{where}": plan(folder, kind, where) for kind, where in [*[(k, "single") for k in KINDS], *RUNS]}
    )


def plan(folder: Path, kind: str, where: str) -> dict[str, Any]:
    """How a run is started."""
    recipe, flags = KINDS[kind]
    preset, overrides = WHERE[where]
    always = ["--model.name_or_path", str(folder / recipe), "--train.micro_batch_size_rows", "2", "--eval.unshard", "never"]
    rows = ["--data.files", "[]", "--data.files", str(folder / "prompts.jsonl")] if recipe == "llm" else []
    # Chunks of the loss: the head of a causal model is called several times in a forward.
    return {"preset": preset, "overrides": overrides, "flags": [*always, *rows, *flags], "recipe": recipe, "max_logits": 2000}


@pytest.mark.parametrize(("kind", "where"), RUNS)
def test_curve_gradients_and_predictions_are_those_of_one_process(
    folder: Path, finished: dict[str, Any], kind: str, where: str
) -> None:
    (expected_lines, expected_gradients), (lines, gradients) = finished[f"{kind}-single"], finished[f"{kind}-{where}"]
    check_curve(lines, expected_lines)
    check_gradients(gradients, expected_gradients[0])
    predictions = [load_json_lines(folder / "runs" / f"{kind}-{run}" / "predictions-0.jsonl") for run in ("single", where)]
    assert predictions[0] == predictions[1]
    assert list((folder / "runs" / f"{kind}-{where}" / "export").glob("*.safetensors"))


@pytest.mark.parametrize(("preset", "overrides"), [WHERE["fsdp2"], WHERE["fsdp1"]])
def test_modules_are_wrapped_by_what_is_left_in_them(preset: str, overrides: dict[str, Any]) -> None:
    """On the wrapped T5: no list is a unit, each unit but the root has enough parameters that none of its children holds."""
    reports = run_on_ranks(report_units, preset=preset, overrides={"mixed_precision": "no", **overrides})
    for sizes, root_has_embedding in reports:
        assert len(sizes) > 4 and all(size >= MIN_NUM_PARAMS for name, size in sizes.items() if name)
        assert not any(name.endswith(("block", "layer", "embed_tokens", "shared", "lm_head")) for name in sizes)
        assert root_has_embedding


def report_units() -> tuple[dict[str, int], bool]:
    """On every rank: parameters of each wrapped module by its name, as FSDP itself holds them, and whether the root has the
    embedding. FSDP1 pads its flat parameters to a multiple of the ranks, which matters not here."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.support.small_run import T5_CONFIG
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.parallel.units import clean
    from toolkit.parallel.wrap import shard_model

    sharded = shard_model(build_accelerator(), T5ForConditionalGeneration(T5Config(**T5_CONFIG)))
    held: dict[str, list[int]] = {}
    for name, module in sharded.model.named_modules():
        path = clean(f"{name}.").rstrip(".")
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            held[path] = [p._orig_size.numel() for p in group.fsdp_params]
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            held[path] = list(module._handle.flat_param._numels)
    embedding = 256 * T5_CONFIG["d_model"]
    return {path: sum(sizes) for path, sizes in held.items()}, embedding in held[""]
