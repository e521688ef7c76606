"""Stop anywhere and go on: the same run, bit for bit, on the same frozen base; what a checkpoint holds; and a complete run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_files import change_manifest
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.model_folders import build_model_folders, make_rows, save_jsonl
from tests.support.quantized.models import save_quantizable_models
from tests.support.same_runs import check_same, rows_by_place
from tests.support.workbench import FP32, Workbench
from toolkit.checkpoint.manifest import read_manifest

NUM_STEPS = 10
STEPS_PER_EPOCH = 7  # 52 training rows: an epoch ends inside the run, with a smaller batch
EXACT = {
    "model__dropout": 0.1,
    "train__max_steps": NUM_STEPS,
    "train__micro_batch_size_rows": 2,  # two micro-batches a step on each of two processes
    "checkpoint__every_steps": 3,
    "checkpoint__keep_last": 9,
    "eval__every_steps": 8,
    "log_row_ids": True,
}
LORA = {"adapter__method": "lora", "adapter__rank": 4, "adapter__dropout": 0.2, "optim__lr": 1e-2}
PACKED = EXACT | {"data__max_length_tokens": 64, "train__micro_batch_size_rows": 1, "eval__generate": False}
KINDS = {
    "t5": EXACT,
    "bart": EXACT | {"model": "bart"},
    "m2m_100": EXACT | {"model": "m2m_100", "data__source_language": "en", "data__target_language": "fr"},
    "gpt2": PACKED | {"model": "gpt2"},  # drops embeddings, attention and residuals
    "mixture": PACKED | {"model": "mixtral", "data__packing": False, "train__micro_batch_size_rows": 2},
    "nf4": PACKED | {"model": "quantizable", **LORA, "adapter__dropout": 0, "adapter__base_dtype": "nf4"},
    "lora_experts": PACKED | {"model": "qwen3_moe", **LORA, "adapter__dropout": 0, "adapter__experts": True},
    "offload": PACKED | {"model": "gpt2", "preset": "fsdp2_offload"},
    "lora_ddp": PACKED | {"preset": "ddp_cpu", "train__global_batch_size_tokens": 256, **LORA},
    "lora_fsdp1": PACKED | {"preset": "fsdp1_full_shard", "data__source": None, "data__files": None, **LORA},
}
"""The last one's rows are a mix of two files."""


@pytest.fixture(scope="module")
def benches(bench, llm_bench) -> dict[str, Workbench]:
    """Runs of each kind, in a folder of their own, with a finished run `whole` where they have begun."""
    folder = bench.runs / "models"
    models = llm_bench.models | on_one_process(build_model_folders, folder, ["qwen3_moe", "mixtral"])
    on_one_process(save_quantizable_models, folder)
    causal = replace(llm_bench, models=models | {"quantizable": folder / "llm"})
    return {
        kind: replace(causal if "data__max_length_tokens" in settings else bench, runs=bench.runs / kind)
        for kind, settings in KINDS.items()
    }


@pytest.fixture
def settings(benches, kind) -> dict:
    """Of a kind of run, whose `whole` is there."""
    bench, settings = benches[kind], {"preset": "fsdp2_cpu", **KINDS[kind]}
    settings["overrides"] = GPU_PRESET_OVERRIDES_ON_CPU.get(settings["preset"], {}) | FP32
    if kind == "lora_fsdp1":
        more = save_jsonl(bench.runs.with_name("more.jsonl"), [{"text": row["source"]} for row in make_rows(20, seed=1)])
        files = {bench.data / bench.rows: 1.0, more: 2.0}
        settings["data__mix"] = [{"source": "jsonl", "files": str(file), "weight": weight} for file, weight in files.items()]
    if not (bench.runs / "whole").exists():
        bench.run("whole", **settings)
    return settings


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_bit_for_bit(benches, settings, kind):
    """As if all ranks had died in step 7, after which the checkpoint of step 6 stands."""
    bench = benches[kind]
    later = shutil.ignore_patterns("step-00000009", "step-00000010", "export")
    shutil.copytree(bench.runs / "whole", bench.runs / "killed", ignore=later)
    printed = bench.run("killed", **settings)
    assert "step-00000006, after step 6\n" in printed
    whole, killed = (bench.lines(name, "train") for name in ("whole", "killed"))
    assert killed[:6] == whole[:6], "steps before the checkpoint ran again: their times differ"
    check_same(bench, "killed", "whole", NUM_STEPS)
    exports = [next((bench.runs / name / "export").glob("*model.safetensors")) for name in ("whole", "killed")]
    assert exports[0].read_bytes() == exports[1].read_bytes()

    assert [line["step"] for line in whole] == list(range(1, NUM_STEPS + 1))
    assert len({line["loss"] for line in whole}) == NUM_STEPS
    assert whole[-1]["num_input_tokens_seen"] == sum(line["num_tokens"] for line in whole)
    rows = rows_by_place(bench.runs / "whole")
    assert max(micro_batch for _, _, micro_batch in rows) > 0 and max(map(len, rows.values())) > 1, "not packed, or in one go"
    if kind == "t5":
        assert [line["epoch"] for line in whole] == [0] * STEPS_PER_EPOCH + [1] * (NUM_STEPS - STEPS_PER_EPOCH)
        assert whole[STEPS_PER_EPOCH - 1]["num_rows"] < whole[0]["num_rows"], "the smaller last batch is not in it"


@pytest.mark.parametrize("kind", ["t5"])
def test_complete_run_says_so_and_exports_again(benches, settings, kind):
    bench, folder = benches[kind], benches[kind].runs / "whole"
    metrics = (folder / "metrics.jsonl").read_bytes()
    weights = (folder / "export" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "export")
    printed = bench.run("whole", **settings)
    assert f"nothing left to train: the run is complete at step {NUM_STEPS}\n" in printed
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert (folder / "export" / "model.safetensors").read_bytes() == weights

    # Somewhere else there is the checkpoint's own evaluation to show, and nothing before it.
    last = folder / "checkpoints" / f"step-{NUM_STEPS:08d}"
    printed = bench.run("elsewhere", **settings | {"preset": "single"}, checkpoint__resume=last)
    missing = "has no figures of earlier steps but the checkpoint's own evaluation"
    assert f"{bench.runs / 'elsewhere' / 'metrics.jsonl'} {missing}" in printed
    assert f"\nafter step {NUM_STEPS} " in printed and "\nbefore training" not in printed
    assert (bench.runs / "elsewhere" / "export" / "model.safetensors").read_bytes() == weights


def test_frozen_weights_stay_and_are_not_in_the_checkpoint(bench):
    from safetensors.numpy import load_file

    base = load_file(bench.models["t5"] / "model.safetensors")
    freeze = {"model__freeze": [r"encoder\..*", r".*\.layer_norm\.weight"]}
    assert "; attention: sdpa\n" in bench.run("frozen", **freeze)

    # Earlier versions took eager attention for T5 on CPUs, and noted it: such a run goes on so.
    change_manifest(bench.checkpoint("frozen", 3), lambda manifest: manifest["identity"]["config"].update(attention="eager"))
    printed = bench.run("frozen", train__max_steps=5, **freeze)
    assert "after step 3\n" in printed and "; attention: eager\n" in printed
    assert read_manifest(bench.checkpoint("frozen", 5))["identity"]["config"]["attention"] == "eager"
    exported = load_file(bench.runs / "frozen" / "export" / "model.safetensors")
    assert exported.keys() == base.keys()
    # `shared` is frozen under its alias `encoder.embed_tokens`
    is_frozen = {name: name.startswith(("encoder.", "shared.")) or ".layer_norm." in name for name in base}
    assert {name: bool((exported[name] == base[name]).all()) for name in base} == is_frozen
    stored = on_one_process(load_whole, bench.checkpoint("frozen", 5) / "state")
    in_weights = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    in_moments = {name.removeprefix("optimizer.state.").rpartition(".")[0] for name in stored if name.startswith("optimizer.")}
    assert in_weights == in_moments == {name for name in base if not is_frozen[name]}


def test_checkpoint_holds_the_adapter_and_its_moments_and_nothing_else(llm_bench):
    llm_bench.run("taught", **LORA)
    folder = llm_bench.checkpoint("taught", 3)
    stored = {name: tensor.nbytes for name, tensor in on_one_process(load_whole, folder / "state").items()}
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
    assert base["config"]["model.name_or_path"] == str(llm_bench.models["llama"]) and base["config"]["model.revision"] is None
    assert len(base["frozen_hashes"]) == 21, "nine weights a layer, embeddings, head and the last norm"


def on_one_process(function, *args):
    return run_on_ranks(function, preset="single", overrides=FP32, args=args)[0]


def load_whole(folder: Path) -> dict:
    """The tensors of a checkpoint's state, by name."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in described.items()}
    load(tensors, storage_reader=FileSystemReader(folder))
    return tensors
