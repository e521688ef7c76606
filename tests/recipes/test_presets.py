"""Every preset of the repository trains a tiny T5 to its export, every run YAML its own kind of model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.presets.page import preset_header
from tests.distributed.test_invariants import COMPILED
from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.launch import GPU_CHECKS, GPU_PRESET_OVERRIDES_ON_CPU, REPOSITORY, launch, run_on_ranks, write_accelerate_yaml
from tests.support.model_folders import make_rows, save_jsonl, save_wikihow_csv
from tests.support.rank import PAGES
from tests.support.workbench import FP32, RECIPES, Workbench
from toolkit.files.json_lines import load_json_lines

RUN_CONFIG_FOLDER = REPOSITORY / "recipes" / "configs"

PRESETS = {
    "single_compile": "not sharded, 1 process, fp32",
    "ddp_cpu": "DDP, 2 processes, fp32",
    "fsdp2_shard_grad_op": "FSDP2, gathered until the backward, 2 processes, fp32",
    "fsdp2_activation_checkpointing": "FSDP2, activation checkpointing, 2 processes, fp32",
    "fsdp2_offload": "FSDP2, CPU offload, 2 processes, fp32",
    "fsdp2_size_wrap": "FSDP2, 2 processes, fp32",
    "fsdp1_shard_grad_op": "FSDP1 SHARD_GRAD_OP, 2 processes, fp32",
}
"""What the first lines say of those that train here; on a CPU, all are run in fp32."""
ELSEWHERE = GPU_CHECKS | {
    "single": "tests/distributed/test_absolute.py",
    "fsdp2_cpu": "tests/distributed/test_absolute.py",
    "single_cpu": "tests/recipes/test_bf16.py",
    "fsdp2_hsdp": "tests/recipes/test_bf16.py",
    "fsdp1_full_shard": "tests/recipes/test_resume.py",
}
"""Presets that another test trains to an export, or a check on GPUs."""
FOR_100B = "fsdp2_100b"
"""It trains the run YAML that is made for it."""
SAME_ON_CPU = {
    "ddp": ("ddp_cpu", {}),
    "fsdp2_full_shard": ("fsdp2_cpu", {}),
    "fsdp2_multi_node": ("fsdp2_cpu", {}),
    "fsdp2_compile": ("fsdp2_cpu", COMPILED),
}
"""Presets that a CPU runs as another one, which trains for both; the last as a run of `tests/distributed/test_invariants.py`."""


def test_every_preset_is_here_or_elsewhere():
    files = sorted(path.stem for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))
    assert sorted([*PRESETS, *ELSEWHERE, FOR_100B, *SAME_ON_CPU]) == files
    for preset, test in ELSEWHERE.items():
        assert f'"{preset}"' in (REPOSITORY / test).read_text()
    for preset in GPU_CHECKS:
        assert "GPUs only" in preset_header(REPOSITORY / "accelerate_configs" / f"{preset}.yaml")["Needs"]


@pytest.mark.parametrize("preset", SAME_ON_CPU)
def test_what_a_cpu_changes_of_a_preset_makes_it_another(tmp_path, preset):
    other, changes = SAME_ON_CPU[preset]
    on_cpu = {preset: GPU_PRESET_OVERRIDES_ON_CPU[preset], other: changes}
    mappings = [write_accelerate_yaml(tmp_path, name, FP32 | changes)[1] for name, changes in on_cpu.items()]
    one, two = ({key: value for key, value in mapping.items() if value is not None} for mapping in mappings)
    assert one == two


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_trains_evaluates_saves_and_exports(workbench, preset):
    on_cpu = FP32 | GPU_PRESET_OVERRIDES_ON_CPU.get(preset, {})
    printed = workbench.run("run", preset=preset, overrides=on_cpu)
    assert f"\npreset      {preset}.yaml: {PRESETS[preset]}\n" in printed
    check_whole_run(workbench, "run")
    assert workbench.checkpoints("run") == ["step-00000003"]


WHOLE, ADAPTER = "model.safetensors", "adapter_model.safetensors"
CHATS = {"checkpoint__every_steps": None, "data__max_length_tokens": 96}
SOURCES = REPOSITORY / "recipes" / "sources"
CONFIGS = {
    "t5_wikihow": ("t5", "t5", "wikihow", {"data__source": f"{SOURCES}/wikihow.py:load_rows"}, ["with an empty text"], WHOLE),
    "llm_moe": ("llm", "", "texts", {}, ["\nunigram ", "\ninterpolated bigram "], WHOLE),
    "llm_functions": ("llm", "llama", "prompts", {}, [], ADAPTER),
    "llm_chat_qlora": ("llm", "chat-llama", "chats", CHATS, ["\nbase        quantized to nf4 "], ADAPTER),
    "llm_moe_lora": (
        "llm", "chat-qwen3_moe", "chats", CHATS,
        ["\nadapter     on ", "q_proj", "o_proj", "experts.down_proj", "experts.gate_up_proj", "; not on routers\n"], ADAPTER,
    ),
    "llm_100b": (
        "llm", "chat-llama", "chats", CHATS | {"train__global_batch_size_tokens": None},
        [f"\npreset      {FOR_100B}.yaml: FSDP2, 2 replicas x 2 shards, activation checkpointing, 4 processes, fp32\n"], WHOLE,
    ),
    "dpo": ("dpo", "llama", "pairs", {"data__max_length_tokens": 96}, [], ADAPTER),
    "dpo_functions": ("dpo", "llama", "rows and lines", {"data__source": f"{SOURCES}/pairs.py:load_lines"}, [], WHOLE),
    "dpo_t5": ("dpo_t5", "t5", "pairs", {"eval__generate": True}, [], WHOLE),
}  # fmt: skip
"""Recipe, model ("": that of the config), form of the rows, flags, what is printed, and what is exported."""
WITHOUT_TEXTS = ("llm_moe", "llm_100b", "dpo")
OF_README = ("t5_functions", "t5_csv", "llm_stdlib", "llm_chat_lora")
"""Those that `test_readme.py` runs."""


def test_every_run_config_is_here():
    assert sorted([*CONFIGS, *OF_README, "mnist_digits"]) == sorted(path.stem for path in RUN_CONFIG_FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def trained(bench, tmp_path_factory) -> dict[str, str]:
    """What a run of each config printed, made short; those of a recipe and a preset share a launch."""
    folder, rows = tmp_path_factory.mktemp("configs"), make_rows(60)
    chat_models = run_on_ranks(build_chat_models, preset="single", overrides=FP32, args=(folder,))[0]
    forms = {name: [] for name in ("texts", "prompts", "pairs", "chats", "rows", "lines")}
    for number, row in enumerate(rows):
        source, target = row["source"], row["target"]
        forms["texts"].append({"text": source})
        forms["prompts"].append({"prompt": source, "completion": f" {target}"})
        forms["pairs"].append({"prompt": source, "chosen": f" {target}", "rejected": f" {source[:20]}"})
        forms["chats"].append({"messages": say(source[:60], target, source[:20], target)})
        sides = {"prompt": source, "target": target, "lead_text": "", "group": "", "split": "eval" if number < 9 else "train"}
        forms["rows"].append(sides)
        forms["lines"].append({"row": number + 1, "prediction": f"{target}."})
    files = {form: save_jsonl(folder / f"{form}.jsonl", lines) for form, lines in forms.items()}
    files["rows and lines"] = json.dumps([str(files["rows"]), str(files["lines"])])
    files["wikihow"] = save_wikihow_csv(folder / "wikihowAll.csv", rows)
    launches = {}
    for name, (recipe, model, form, flags, *_) in CONFIGS.items():
        config = RUN_CONFIG_FOLDER / f"{name}.yaml"
        own = RUN_CONFIG_FOLDER / yaml.safe_load(config.read_text())["model"]["name_or_path"]
        short = {"config": config, "data__files": files[form], "train__num_epochs": None, "optim__warmup_steps": 1}
        preset = FOR_100B if name == "llm_100b" else "fsdp2_cpu"
        launches.setdefault((recipe, preset), {})[name] = {"model": model or own} | short | flags
    printed = {}
    for (recipe, preset), runs in launches.items():
        of_recipe = replace(bench, recipe=recipe, models=bench.models | chat_models)
        printed |= of_recipe.run_all(runs, preset=preset, overrides=FP32 | GPU_PRESET_OVERRIDES_ON_CPU.get(preset, {}))
    return printed


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_trains_evaluates_and_exports(bench, trained, config):
    recipe, *_, said, exports = CONFIGS[config]
    assert "every rank loads all of" not in trained[config]
    assert [text for text in said if text not in trained[config]] == []
    check_whole_run(bench, config, generates=config not in WITHOUT_TEXTS, exports=exports)
    if recipe.startswith("dpo"):
        figures = bench.lines(config, "eval")[-1]
        assert 0 <= figures["rewards/accuracies"] <= 1 and figures["rewards/margins"] != 0


def test_digits_config_trains_the_convnet_and_saves_it_whole(tmp_path):
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


def build_chat_models(parent: Path, families: Sequence[str] = ("llama", "qwen3_moe"), **settings) -> dict[str, Path]:
    """Tiny models whose tokenizer has a chat template; on one process."""
    import transformers

    from tests.support.tiny_models import causal_config

    tokenizer = build_chat_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML)
    for family in families:
        config = causal_config(family, vocab_size=len(tokenizer), **settings)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(parent / family)
        tokenizer.save_pretrained(parent / family)
    return {f"chat-{family}": parent / family for family in families}


def check_whole_run(bench: Workbench, name: str, *, generates: bool = True, exports: str = WHOLE) -> None:
    """Three steps, an evaluation, a checkpoint and an export."""
    assert [line["step"] for line in bench.lines(name, "train")] == [1, 2, 3]
    evaluations = bench.lines(name, "eval")
    assert [line["step"] for line in evaluations] == [3]
    assert evaluations[0]["num_rows"] == 3 and ("rougeL" in evaluations[0]) == generates
    assert {exports, "tokenizer.json"} <= {path.name for path in (bench.runs / name / "export").iterdir()}
    record = json.loads((bench.runs / name / "record.json").read_text())
    assert len(record["sources"]) == (3 if generates else 0) and record["data"]["splits"][1]["num_rows"] == 3
