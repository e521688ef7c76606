"""Bad input: one sentence, exit code 2 on every rank, no traceback, and as early as it can be known.

Each case is a working run with one thing wrong. One of each layer starts as 2 real ranks; those that no unit test has, one after
another in one process. A working run would need weights, which its model folder does not have: a case that gets its own sentence
was refused before weights are read.
"""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tests.support.launch import TIMEOUT_S, LaunchResult, launch, run_on_ranks
from tests.support.small_run import run_in_this_process
from tests.support.workbench import RECIPES, output_of

NUM_ROWS = 24
T5 = {
    "model_type": "t5", "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 64,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ROWS = "".join(
    json.dumps({"source": f"alpha {'beta ' * (1 + i % 5)}gamma {i:b}", "target": f"beta {i:b}"}) + "\n" for i in range(NUM_ROWS)
)
_TEXTS = (
    "--model.name_or_path {here}/model --data.source jsonl --data.files {here}/rows.jsonl --data.cache_dir {here}/cache "
    "--data.eval_fraction 0 --run.output_dir {here}/runs --train.max_steps 2 --train.global_batch_size_rows 4 "
    "--train.micro_batch_size_rows 2 --eval.generate false "
)
FLAGS = {
    "t5": _TEXTS + "--data.max_source_length_tokens 60 --data.max_target_length_tokens 30",
    "llm": _TEXTS + "--data.max_length_tokens 100",
    "mnist": "--train.max_steps 2 --run.output_dir {here}/runs --data.source idx --data.folder {here}",
}
"""Of the working run of a recipe. Its model folder has a config and neither weights nor a tokenizer."""

Files = dict[str, str | bytes]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One wrong thing. `{here}` stands for the case's folder."""

    flags: str = ""
    """In place of those of the working run with the same name, or beside them; separated by blanks."""
    sentence: str = ""
    """What is printed, whole, where `…` stands for anything."""
    files: Files = field(default_factory=dict)
    """Written into the folder beside (or over) those of the working run."""
    overrides: dict = field(default_factory=dict)
    recipe: str = "t5"


CSV = "--data.source csv --data.files {here}/rows.csv"
OTHER, SCRATCH = "--model.name_or_path {here}/other", "--model.from_scratch true"
TOKENIZER: Files = {
    "model/tokenizer.json": json.dumps(
        {"model": {"type": "WordLevel", "vocab": {"<pad>": 0, "</s>": 1, "<unk>": 2}, "unk_token": "<unk>"}, "added_tokens": []}
    ),
    "model/tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}',
}


NAMES = [f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{kind}.weight" for layer in (0, 1) for kind in "AB"]
ADAPTER: Files = {
    "adapter/adapter_config.json": json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}),
    "adapter/adapter_model.safetensors": save(
        {name: np.zeros((2, 32) if "lora_A" in name else (32, 2), np.float32) for name in NAMES}
    ),
    "adapter/base.json": json.dumps({"name_or_path": "theirs", "revision": "v2", "bf16_sha256": {"model.norm.weight": "0"}}),
}
"""A LoRA of rank 2 on the query projections of two layers of a Llama that is not the one given."""
LAYERS = {
    "config": Case(
        flags="--config {here}/run.yaml",
        files={"run.yaml": "train:\n  seed: 3\noptim:\n  momentum: 0.9\n"},
        sentence="{here}/run.yaml, line 4: unknown key optim.momentum; known are optim.name, …",
    ),
    "launch": Case(
        overrides={"fsdp_config": {"fsdp_ofload_params": True}},
        sentence="…/fsdp2_cpu.yaml: unknown key fsdp_config.fsdp_ofload_params: did you mean fsdp_offload_params?",
    ),
    "run folder": Case(
        flags="--run.output_dir {here}/model/config.json/runs",
        sentence="run.output_dir {here}/model/config.json/runs: {here}/model/config.json/runs/run cannot be written "
        "(Not a directory): name a folder that you can write to",
    ),
    "data": Case(
        flags=CSV,
        files={"rows.csv": "id,source,summary\n1,a,b\n"} | TOKENIZER,
        sentence="{here}/rows.csv has no column 'target' (its columns: id, source, summary): set data.source_column and "
        "data.target_column to columns that exist",
    ),
    "model": Case(
        files=TOKENIZER | {"rows.jsonl": ROWS},
        sentence="model {here}/model has no loadable safetensors weights (…): give a folder with them, or model.from_scratch "
        "true for random ones",
    ),
    "adapter": Case(
        recipe="llm",
        flags="--model.name_or_path {here}/base --adapter.method lora --adapter.name_or_path {here}/adapter",
        files=ADAPTER | {"rows.jsonl": "".join(json.dumps({"text": f"hello there {i:b}"}) + "\n" for i in range(12))},
        sentence="adapter.name_or_path {here}/adapter was trained on another base than model.name_or_path {here}/base: 21 "
        "tensors differ, lm_head.weight the first; its base was theirs at revision v2",
    ),
    "images": Case(
        recipe="mnist",
        sentence="data.folder {here} has neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz: check the path",
    ),
}
"""By layer. The eighth, a checkpoint, is that of `finished_run`."""
ANOTHER_CONFIG = Case(
    flags=f"{SCRATCH} --optim.lr 0.5 --data.files {{here}}/nowhere.jsonl",  # refused before data is looked for
    sentence="optim.lr is 0.5, but {here}/runs/run/checkpoints/step-00000002 was made with 0.001: set it back to resume, or "
    "take another run.name (model.init_from starts a new run from these weights)",
)

# In one process, all in one launch; there is no data file but where the case brings one.
ALONE = {
    "no such checkpoint": Case(
        flags="--checkpoint.resume {here}/nowhere",
        sentence="checkpoint.resume is {here}/nowhere, and there is no such folder: give auto, never or one as "
        "{here}/runs/run/checkpoints/step-00000120",
    ),
    "no weights to start from": Case(
        flags="--model.init_from {here}/nowhere",
        sentence="model.init_from {here}/nowhere holds no valid checkpoint: give one, its run, or an exported model",
    ),
    "no such model on the hub": Case(
        flags="--model.name_or_path no-such-model",
        sentence="model.name_or_path no-such-model could not be read (…): give a Hugging Face model folder, or a hub id within "
        "reach",
    ),
    "model folder without config": Case(
        flags=OTHER,
        files={"other/model.safetensors": ""},
        sentence="model.name_or_path {here}/other has no config.json: give a Hugging Face model folder",
    ),
    "wrong type in config.json": Case(
        flags=OTHER,
        files={"other/config.json": json.dumps({**T5, "d_model": "wide"})},
        sentence="model.name_or_path {here}/other could not be read (config.json: …'d_model'…wide…): give a Hugging Face model "
        "folder, or a hub id within reach",
    ),
    "unknown attention": Case(
        flags="--model.attn_implementation sdpaa",
        sentence="model.attn_implementation sdpaa cannot be used with {here}/model (…): take sdpa or eager, or leave it out",
    ),
    "freezing nothing": Case(
        flags="--model.freeze ['encodr.*']",
        sentence="model.freeze 'encodr.*' matches no parameter; names look like shared.weight, …",
    ),
    "freezing everything": Case(
        flags="--model.freeze ['.*']", sentence="model.freeze ['.*'] freezes every parameter: leave something to train"
    ),
    "more characters than embeddings": Case(
        flags=f"{CSV} {SCRATCH}",
        files={"rows.csv": "source,target\n" + "".join(f"{chr(0x4E00 + 2 * i)},{chr(0x4E01 + 2 * i)}\n" for i in range(60))},
        sentence="the model has 64 token embeddings, fewer than the rows have different characters: raise vocab_size in its "
        "config.json, or give it a tokenizer",
    ),
    "an adapter's weights in the model's place": Case(
        flags="--model.init_from {here}/adapter",
        files=ADAPTER,
        sentence="model.init_from {here}/adapter is an adapter: give it as adapter.name_or_path, with its adapter.method",
    ),
    "an adapter in the model's place": Case(
        flags="--model.name_or_path {here}/adapter",
        files=ADAPTER,
        sentence="model.name_or_path {here}/adapter is an adapter: give its base there, and this as adapter.name_or_path",
    ),
    "frozen bf16 without mixed precision": Case(
        flags="--adapter.method lora --model.frozen_dtype bfloat16",
        sentence="model.frozen_dtype is bfloat16, but mixed_precision is 'no': leave it out, or write mixed_precision: bf16",
    ),
}
# The same in the folder of a finished run.
AFTER_A_RUN = {
    "never, but there are checkpoints": Case(
        flags=f"{SCRATCH} --checkpoint.resume never",
        sentence="checkpoint.resume is never, but {here}/runs/run/checkpoints holds checkpoints up to step 2: move them "
        "away, or take another run.name",
    ),
    "a damaged checkpoint by its name": Case(
        flags=f"{SCRATCH} --checkpoint.resume {{here}}/damaged",
        sentence="checkpoint.resume is {here}/damaged, but damaged/rng-00001.safetensors does not have the sha256 of the "
        "manifest: its content changed: give a whole checkpoint, or auto for the newest",
    ),
}


def write(here: Path, files: Files) -> None:
    for name, content in {"model/config.json": json.dumps(T5), **files}.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def attempt(here: Path, case: Case) -> LaunchResult:
    """The recipe on 2 ranks in the folder `here`, with what is wrong in `case`."""
    script = RECIPES / f"{case.recipe}.py"
    return launch(script, arguments(here, case), preset="fsdp2_cpu", overrides=case.overrides, timeout_s=TIMEOUT_S)


def arguments(here: Path, case: Case) -> list[str]:
    write(here, case.files)
    values = _pairs(FLAGS[case.recipe]) | _pairs(case.flags)
    return [word.replace("{here}", str(here)) for pair in values.items() for word in pair]


def _pairs(flags: str) -> dict[str, str]:
    words = flags.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def check(here: Path, case: Case, result: LaunchResult) -> None:
    pattern = ".+".join(map(re.escape, case.sentence.replace("{here}", str(here)).split("…")))
    assert re.fullmatch(pattern, result.refusal()), f"{result.refusal()}\nis not\n{case.sentence}"


def contents(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> tuple[Path, LaunchResult]:
    """A folder with a run of two steps, on rows of which some are unusable and some too long; and how it went."""
    here = tmp_path_factory.mktemp("finished")
    messy = [
        {"source": None, "target": "beta"},
        {"source": "alpha", "target": "  "},
        {"target": "beta"},
        {"source": "alpha " * 200, "target": "beta " * 50},
    ]
    write(here, {"rows.jsonl": ROWS + "".join(json.dumps(row) + "\n" for row in messy)})
    return here, attempt(here, Case(flags=SCRATCH))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_case_of_each_layer_is_refused_on_two_ranks(tmp_path, bench, layer):
    (tmp_path / "base").symlink_to(bench.models["llama"])
    check(tmp_path, LAYERS[layer], attempt(tmp_path, LAYERS[layer]))
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_a_run_that_is_refused_changes_nothing_of_the_run_before(finished_run):
    here, before = finished_run[0], contents(finished_run[0] / "runs")
    check(here, ANOTHER_CONFIG, attempt(here, ANOTHER_CONFIG))
    assert contents(here / "runs") == before


def test_the_others_are_refused_in_one_process(finished_run, tmp_path_factory):
    here, before = finished_run[0], contents(finished_run[0] / "runs")
    damaged = shutil.copytree(here / "runs/run/checkpoints/step-00000002", here / "damaged")
    content = (damaged / "rng-00001.safetensors").read_bytes()
    (damaged / "rng-00001.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    cases = [(tmp_path_factory.mktemp("alone"), case) for case in ALONE.values()]
    cases += [(here, case) for case in AFTER_A_RUN.values()]
    runs = [(case.recipe, arguments(folder, case)) for folder, case in cases]
    ended = run_on_ranks(run_each, preset="single_cpu", args=(runs,))[0]
    for (folder, case), result in zip(cases, ended, strict=True):
        check(folder, case, result)
        assert folder == here or not (folder / "runs/run/metrics.jsonl").exists()
    assert contents(here / "runs") == before


def run_each(runs: list[tuple[str, list[str]]]) -> list[LaunchResult]:
    """In one process: how each run of a recipe ends."""
    ended = []
    for recipe, argv in runs:
        with output_of() as said, pytest.raises(SystemExit) as end:
            run_in_this_process(recipe, argv)
        ended.append(LaunchResult([int(end.value.code or 0)], "", said[0]))
    return ended


def test_unusable_and_long_rows_are_counted_and_reported_and_the_run_goes_on(finished_run):
    """The whole sentences are in `tests/unit/data/`."""
    _, result = finished_run
    assert result.returncodes == [0, 0], result.stderr[-3000:]
    starts = ["2 processes, each on the CPU (", f"skipped 2 of {NUM_ROWS + 4} rows ", f"skipped 1 of {NUM_ROWS + 4} rows "]
    starts += [f"WARNING: cut the {side} of 1 of {NUM_ROWS + 1} training rows " for side in ("source", "target")]
    for start in (*starts, "evaluation  no held-out rows"):
        lines = [*result.stdout.splitlines(), *result.stderr.splitlines()]
        assert sum(line.startswith(start) for line in lines) == 1, (start, result.stdout)
