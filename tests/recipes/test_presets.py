"""Every preset of the repository trains a tiny T5 to its export, every run YAML its own kind of model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.presets.page import preset_header
from tests.distributed.test_invariants import COMPILED
from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.launch import (
    GPU_CHECKS,
    GPU_PRESET_OVERRIDES_ON_CPU,
    REPOSITORY,
    launch,
    run_on_ranks,
    write_accelerate_yaml,
)
from tests.support.model_folders import CAUSAL_FAMILIES, MIXTURES, make_rows, save_jsonl, save_wikihow_csv
from tests.support.rank import PAGES
from tests.support.workbench import FP32, RECIPES, Workbench
from toolkit.files.json_lines import load_json_lines

RUN_CONFIG_FOLDER = REPOSITORY / "recipes" / "configs"

PRESETS = {
    "single": "not sharded, 1 process, bf16",
    "single_compile": "not sharded, 1 process, bf16",
    "single_cpu": "not sharded, 1 process, fp32",
    "ddp_cpu": "DDP, 2 processes, fp32",
    "fsdp2_cpu": "FSDP2, 2 processes, fp32",
    "ddp": "DDP, 2 processes, bf16",
    "fsdp2_full_shard": "FSDP2, 2 processes, bf16",
    "fsdp2_shard_grad_op": "FSDP2, gathered until the backward, 2 processes, bf16",
    "fsdp2_activation_checkpointing": "FSDP2, activation checkpointing, 2 processes, bf16",
    "fsdp2_compile": "FSDP2, 2 processes, bf16",
    "fsdp2_offload": "FSDP2, CPU offload, 2 processes, bf16",
    "fsdp2_size_wrap": "FSDP2, 2 processes, bf16",
    "fsdp2_hsdp": "FSDP2, 2 replicas x 2 shards, 4 processes, bf16",
    "fsdp2_multi_node": "FSDP2, 2 processes, bf16",
    "fsdp2_100b": "FSDP2, 2 replicas x 2 shards, activation checkpointing, 4 processes, bf16",
    "fsdp1_full_shard": "FSDP1 FULL_SHARD, 2 processes, bf16",
    "fsdp1_shard_grad_op": "FSDP1 SHARD_GRAD_OP, 2 processes, bf16",
}
FOR_100B = "fsdp2_100b"
"""It trains the run YAML that is made for it."""
SAME_ON_CPU: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp_cpu", {}),
    "fsdp2_full_shard": ("fsdp2_cpu", {}),
    "fsdp2_multi_node": ("fsdp2_cpu", {}),
    "fsdp2_compile": ("fsdp2_cpu", COMPILED),
}
"""Presets that a CPU runs as another one, which trains for both; the last as a run of `tests/distributed/test_invariants.py`."""

RUN_CONFIGS = [
    "t5_functions",
    "t5_csv",
    "t5_wikihow",
    "llm_stdlib",
    "llm_moe",
    "llm_functions",
    "llm_chat_lora",
    "llm_chat_qlora",
    "llm_moe_lora",
    "llm_100b",
    "dpo",
    "dpo_functions",
    "dpo_t5",
    "mnist_digits",
]
"""Each has a test below that runs it, made small by flags, or `test_readme.py` does."""


def said_on_cpu(preset: str) -> str:
    """There, all are run in fp32."""
    return PRESETS[preset].replace("bf16", "fp32")


def test_every_preset_is_here_or_has_a_check_on_gpus_that_says_so() -> None:
    files = sorted(path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))
    assert sorted([*PRESETS, *GPU_CHECKS]) == files
    for preset, check in GPU_CHECKS.items():
        assert f'"{preset}"' in (REPOSITORY / check).read_text()
        assert "GPUs only" in preset_header(REPOSITORY / "accelerate_configs" / f"{preset}.yaml")["Needs"]


def test_every_run_config_is_here() -> None:
    assert sorted(RUN_CONFIGS) == sorted(path.stem for path in RUN_CONFIG_FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("preset", SAME_ON_CPU)
def test_what_a_cpu_changes_of_a_preset_makes_it_another(tmp_path: Path, preset: str) -> None:
    other, changes = SAME_ON_CPU[preset]
    on_cpu = {preset: GPU_PRESET_OVERRIDES_ON_CPU[preset], other: changes}
    mappings = [write_accelerate_yaml(tmp_path, name, FP32 | changes)[1] for name, changes in on_cpu.items()]
    one, two = ({key: value for key, value in mapping.items() if value is not None} for mapping in mappings)
    assert one == two and said_on_cpu(preset) == PRESETS[other]


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset not in (*SAME_ON_CPU, FOR_100B)])
def test_preset_trains_evaluates_saves_and_exports(workbench: Workbench, preset: str) -> None:
    on_cpu = FP32 | GPU_PRESET_OVERRIDES_ON_CPU.get(preset, {})
    saves = {"checkpoint__every_steps": 1, "checkpoint__keep_last": 9} if preset == "fsdp2_offload" else {}
    printed = workbench.run("run", preset=preset, overrides=on_cpu, **saves)
    assert f"\npreset      {preset}.yaml: {said_on_cpu(preset)}\n" in printed
    check_whole_run(workbench)
    assert workbench.checkpoints("run") == [f"step-0000000{step}" for step in ((1, 2, 3) if saves else (3,))]
    if preset == "fsdp2_offload":  # others: `test_llm_resume.py`, `tests/faults/test_elastic.py`
        later = shutil.ignore_patterns("step-00000002", "step-00000003")
        shutil.copytree(workbench.runs / "run", workbench.runs / "resumed", ignore=later)
        assert "after step 1\n" in workbench.run("resumed", preset=preset, overrides=on_cpu)
        whole, resumed = (workbench.lines(name, "train") for name in ("run", "resumed"))
        # Step 2 shows the weights that were read back, step 3 the moments that step 2 used.
        for figure in ("loss", "grad_norm"):
            assert [line[figure] for line in resumed] == [line[figure] for line in whole]
        assert resumed[1]["step_time_s"] != whole[1]["step_time_s"], "step 2 did not run again"


def test_wikihow_config_trains_on_a_wikihow_file(workbench: Workbench, tmp_path: Path) -> None:
    file = save_wikihow_csv(tmp_path / "wikihowAll.csv", make_rows(60))
    source = f"{REPOSITORY}/recipes/sources/wikihow.py:load_rows"
    small = {"data__source": source, "data__files": file, "train__num_epochs": None, "optim__warmup_steps": 1}
    assert "with an empty text" in workbench.run("run", config=RUN_CONFIG_FOLDER / "t5_wikihow.yaml", **small)
    check_whole_run(workbench)


def test_moe_config_trains_its_model_and_a_tokenizer(llm_workbench: Workbench, tmp_path: Path) -> None:
    config = RUN_CONFIG_FOLDER / "llm_moe.yaml"
    model = RUN_CONFIG_FOLDER / yaml.safe_load(config.read_text())["model"]["name_or_path"]
    texts = save_jsonl(tmp_path / "texts.jsonl", [{"text": row["source"]} for row in make_rows(60)])
    printed = llm_workbench.run("run", config=config, model=model, data__files=texts, optim__warmup_steps=1)
    check_whole_run(llm_workbench, generates=False)
    assert "\nunigram " in printed and "\ninterpolated bigram " in printed


def test_functions_config_trains_an_adapter_and_the_merged_model_is_evaluated(llm_workbench: Workbench) -> None:
    config = RUN_CONFIG_FOLDER / "llm_functions.yaml"
    llm_workbench.run("run", config=config, model="llama", optim__warmup_steps=1, env=PAGES)
    check_whole_run(llm_workbench, exports="adapter_model.safetensors")
    assert "<h3>Loss</h3>" in (llm_workbench.runs / "run" / "report.html").read_text()
    merged = llm_workbench.runs / "run" / "merged"
    llm_workbench.run("merged", model=merged, train__max_steps=0)
    after, of_merged = (llm_workbench.lines(name, "eval")[-1] for name in ("run", "merged"))
    assert of_merged["loss"] == pytest.approx(after["loss"], rel=0.01)  # merged weights are stored in bf16
    assert not (llm_workbench.runs / "merged" / "export").exists()


def test_chat_config_trains_an_adapter_on_codes(llm_workbench: Workbench, tmp_path: Path) -> None:
    printed = run_on_chats(llm_workbench, tmp_path, "llm_chat_qlora", train__num_epochs=None)
    assert "\nbase        quantized to nf4 " in printed
    check_whole_run(llm_workbench, exports="adapter_model.safetensors")


def test_pairs_config_trains_an_adapter_and_says_how_often_it_prefers_the_chosen_answer(
    llm_workbench: Workbench, tmp_path: Path
) -> None:
    rows = [
        {"prompt": row["source"], "chosen": f" {row['target']}", "rejected": f" {row['source'][:20]}"} for row in make_rows(60)
    ]
    pairs = save_jsonl(tmp_path / "pairs.jsonl", rows)
    flags = {"data__files": pairs, "train__num_epochs": None, "data__max_length_tokens": 96}
    workbench = replace(llm_workbench, recipe="dpo")
    workbench.run("run", config=RUN_CONFIG_FOLDER / "dpo.yaml", model="llama", optim__warmup_ratio=0, **flags)
    check_whole_run(workbench, generates=False, exports="adapter_model.safetensors")
    figures = workbench.lines("run", "eval")[-1]
    assert 0 <= figures["rewards/accuracies"] <= 1 and figures["rewards/margins"] != 0


def test_functions_pairs_config_reads_lines_of_a_model_and_generates(llm_workbench: Workbench, tmp_path: Path) -> None:
    rows = [
        {"prompt": row["source"], "target": row["target"], "lead_text": "", "group": "", "split": "eval" if n < 9 else "train"}
        for n, row in enumerate(make_rows(60))
    ]
    lines = [{"row": number, "prediction": f"{row['target']}."} for number, row in enumerate(rows, start=1)]
    files = [str(save_jsonl(tmp_path / f"{name}.jsonl", part)) for name, part in (("rows", rows), ("lines", lines))]
    source = f"{REPOSITORY}/recipes/sources/pairs.py:load_lines"
    flags = {"data__source": source, "data__files": json.dumps(files), "optim__warmup_steps": 1}
    workbench = replace(llm_workbench, recipe="dpo")
    workbench.run("run", config=RUN_CONFIG_FOLDER / "dpo_functions.yaml", model="llama", **flags)
    check_whole_run(workbench)


def test_pairs_config_trains_a_t5_and_generates_beside_the_chosen_answers(workbench: Workbench, tmp_path: Path) -> None:
    rows = [{"prompt": row["source"], "chosen": row["target"], "rejected": row["source"][:20]} for row in make_rows(60)]
    pairs = save_jsonl(tmp_path / "pairs.jsonl", rows)
    flags = {"data__source": "jsonl", "data__files": pairs, "train__num_epochs": None, "eval__generate": True}
    workbench = replace(workbench, recipe="dpo_t5")
    workbench.run("run", config=RUN_CONFIG_FOLDER / "dpo_t5.yaml", model="t5", optim__warmup_ratio=0, **flags)
    check_whole_run(workbench)
    figures = workbench.lines("run", "eval")[-1]
    assert 0 <= figures["rewards/accuracies"] <= 1 and figures["rewards/margins"] != 0


def test_moe_lora_config_trains_an_adapter_on_attention_and_experts(llm_workbench: Workbench, tmp_path: Path) -> None:
    printed = run_on_chats(llm_workbench, tmp_path, "llm_moe_lora", train__num_epochs=None, family="qwen3_moe")
    adapted = "k_proj, o_proj, q_proj, v_proj, experts.down_proj, experts.gate_up_proj"
    (line,) = (line for line in printed.splitlines() if line.startswith("adapter     on "))
    names, rest = line.removeprefix("adapter     on ").split("; ")
    assert sorted(names.split(", ")) == sorted(adapted.split(", ")) and rest == "not on routers"
    check_whole_run(llm_workbench, exports="adapter_model.safetensors")


def test_config_for_100b_trains_under_its_preset(llm_workbench: Workbench, tmp_path: Path) -> None:
    preset = {"preset": FOR_100B, "overrides": GPU_PRESET_OVERRIDES_ON_CPU[FOR_100B]}
    by_rows = {"train__global_batch_size_tokens": None, "train__num_epochs": None}
    printed = run_on_chats(llm_workbench, tmp_path, "llm_100b", **by_rows, **preset)
    assert "every rank loads all of" not in printed and f"\npreset      {FOR_100B}.yaml: {said_on_cpu(FOR_100B)}\n" in printed
    check_whole_run(llm_workbench, generates=False)


def run_on_chats(workbench: Workbench, folder: Path, config: str, family: str = "llama", **changes: Any) -> str:
    model = folder / "chat-model"
    run_on_ranks(build_chat_model, preset="single", overrides=FP32, args=(model, family))
    turns = [(row["source"], row["target"]) for row in make_rows(60)]
    chats = [{"messages": say(question[:60], answer, question[:20], answer)} for question, answer in turns]
    return workbench.run(
        "run",
        config=RUN_CONFIG_FOLDER / f"{config}.yaml",
        model=model,
        data__files=save_jsonl(folder / "chats.jsonl", chats),
        checkpoint__every_steps=None,
        optim__warmup_steps=1,
        data__max_length_tokens=96,
        **changes,
    )


def test_digits_config_trains_the_convnet_and_saves_it_whole(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    config, size_wrap = RUN_CONFIG_FOLDER / "mnist_digits.yaml", "fsdp2_size_wrap"
    flags = [f"--config={config}", f"--run.output_dir={tmp_path}", "--train.num_epochs=1"]
    on_cpu = GPU_PRESET_OVERRIDES_ON_CPU[size_wrap]
    done = launch(RECIPES / "mnist.py", flags, preset=size_wrap, overrides=on_cpu, env=PAGES)
    assert done.returncodes == [0, 0], done.stderr[-3000:]
    assert "1 Linear, " in done.stdout, "the large layer is a shard unit of its own"
    folder = tmp_path / "mnist_digits"
    lines = load_json_lines(folder / "metrics.jsonl")
    before, after = (line for line in lines if line["kind"] == "eval")
    assert before["accuracy"] < 30 < 50 < after["accuracy"]
    shapes = {name: weight.shape for name, weight in load_file(folder / "model.safetensors").items()}
    assert len(shapes) == 8 and shapes["fc1.weight"] == (128, 256)
    assert {"config.yaml", "curves.png", "record.json"} <= {path.name for path in folder.iterdir()}
    page = (folder / "report.html").read_text()
    assert "Linear fc1" in page and ">Accuracy</h3>" in page and "no evaluation has generated texts" in page


def build_chat_model(folder: Path, family: str) -> None:
    import transformers

    tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML)
    class_name, settings = {**CAUSAL_FAMILIES, **MIXTURES}[family]
    config = getattr(transformers, class_name)(**settings, vocab_size=len(tokenizer))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_whole_run(workbench: Workbench, *, generates: bool = True, exports: str = "model.safetensors") -> None:
    assert [line["step"] for line in workbench.lines("run", "train")] == [1, 2, 3]
    evaluations = workbench.lines("run", "eval")
    assert [line["step"] for line in evaluations] == [3]
    assert evaluations[0]["num_rows"] == 3 and ("rougeL" in evaluations[0]) == generates
    assert {exports, "tokenizer.json"} <= {path.name for path in (workbench.runs / "run" / "export").iterdir()}
    record = json.loads((workbench.runs / "run" / "record.json").read_text())
    assert len(record["sources"]) == (3 if generates else 0) and record["data"]["splits"][1]["num_rows"] == 3
