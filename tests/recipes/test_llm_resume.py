"""Causal models, whole and with adapters: resumed they are the same run, bit for bit, on the same frozen base."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.recipes.test_resume import EXACT, NUM_STEPS, go_on, on_one_process
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU
from tests.support.model_folders import build_model_folders, make_rows, save_jsonl
from tests.support.quantized.models import save_quantizable_models
from tests.support.same_runs import rows_by_place
from tests.support.workbench import FP32, Workbench, new_bench

LORA = {"adapter__method": "lora", "adapter__rank": 4, "adapter__dropout": 0.2, "optim__lr": 1e-2}
PACKED = {"data__max_length_tokens": 64, "train__micro_batch_size_rows": 1, "eval__generate": False}

KINDS = {
    "full": {"model": "gpt2"},  # drops embeddings, attention and residuals
    "mixture": {"model": "mixtral", "data__packing": False, "train__micro_batch_size_rows": 2},
    "nf4": {"model": "llm", **LORA, "adapter__dropout": 0, "adapter__base_dtype": "nf4"},
    "lora_experts": {"preset": "fsdp2_cpu", "model": "qwen3_moe", **LORA, "adapter__dropout": 0, "adapter__experts": True},
    "offload": {"model": "gpt2", "preset": "fsdp2_offload", "overrides": GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_offload"] | FP32},
    "lora_ddp": {"preset": "ddp_cpu", "train__global_batch_size_tokens": 256, **LORA},
    "lora_fsdp1": {
        "preset": "fsdp1_full_shard",
        "overrides": GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_full_shard"] | FP32,
        "data__source": None,
        "data__files": None,
        "data__mix": "of two files",
        **LORA,
    },
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Workbench:
    """The runs of this file, with a second file of rows beside them."""
    bench = new_bench(tmp_path_factory, "llm-resume", "llm")
    models = on_one_process(build_model_folders, bench.runs / "models", ["qwen3_moe", "mixtral"])
    on_one_process(save_quantizable_models, bench.runs / "models")
    save_jsonl(bench.runs / "more.jsonl", [{"text": row["source"]} for row in make_rows(20, seed=1)])
    return replace(bench, models=bench.models | models | {"llm": bench.runs / "models" / "llm"})


def settings_of(bench: Workbench, kind: str) -> dict:
    settings = EXACT | PACKED | KINDS[kind]
    if "data__mix" in settings:
        files = {bench.data / bench.rows: 1.0, bench.runs / "more.jsonl": 2.0}
        settings["data__mix"] = [{"source": "jsonl", "files": str(file), "weight": weight} for file, weight in files.items()]
    return settings


def bench_of(bench: Workbench, kind: str) -> Workbench:
    return replace(bench, runs=bench.runs / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_bit_for_bit(bench, kind):
    """As if all ranks had died in step 7, after which the checkpoint of step 6 stands."""
    settings, bench = settings_of(bench, kind), bench_of(bench, kind)
    bench.run("whole", **settings)
    later = shutil.ignore_patterns("step-00000009", "step-00000010", "export")
    shutil.copytree(bench.runs / "whole", bench.runs / "killed", ignore=later)
    whole = go_on(bench, 6, **settings)
    assert [line["step"] for line in whole] == list(range(1, NUM_STEPS + 1))
    assert len({line["loss"] for line in whole}) == NUM_STEPS
    rows = rows_by_place(bench.runs / "whole")
    assert max(micro_batch for _, _, micro_batch in rows) > 0 and max(map(len, rows.values())) > 1, "not packed, or in one go"


@pytest.fixture(scope="module")
def taught(bench) -> Workbench:
    """A bench with a finished run `taught` of an adapter."""
    bench = bench_of(bench, "adapter")
    bench.run("taught", **LORA)
    return bench


def test_checkpoint_holds_the_adapter_and_its_moments_and_nothing_else(taught):
    folder = taught.runs / "taught" / "checkpoints" / "step-00000003"
    stored = on_one_process(describe_tensors, folder / "state")
    weights = {name.removeprefix("model."): size for name, size in stored.items() if name.startswith("model.")}
    assert weights and all(".lora_A.default" in name or ".lora_B.default" in name for name in weights)
    moments = {f"{name}.{moment}": size for name, size in weights.items() for moment in ("exp_avg", "exp_avg_sq")}
    steps = {f"{name}.step": 4 for name in weights}
    in_optimizer = {f"optimizer.state.{name}": size for name, size in (moments | steps).items()}
    assert stored == {f"model.{name}": size for name, size in weights.items()} | in_optimizer
    # Two layers of seven projections, rank 4, fp32.
    assert sum(weights.values()) == 4 * 4 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    # torch puts a header of 1.5 kB before each rank's slice of a tensor.
    num_bytes = sum(path.stat().st_size for path in (folder / "state").glob("*.distcp"))
    assert num_bytes <= sum(stored.values()) + 2 * 2048 * len(stored)
    base = json.loads((folder / "manifest.json").read_text())["identity"]
    assert base["config"]["model.name_or_path"] == str(taught.models["llama"]) and base["config"]["model.revision"] is None
    assert len(base["frozen_hashes"]) == 21, "nine weights a layer, embeddings, head and the last norm"


def describe_tensors(folder: Path) -> dict[str, int]:
    """Bytes of each tensor in a checkpoint's state, by name."""
    from torch.distributed.checkpoint import FileSystemReader

    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: about.size.numel() * about.properties.dtype.itemsize for name, about in described.items()}
