"""Pairs of answers: the same curve however they are cut, packed and sharded, and a resume that needs no reference pass."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from tests.support import small_run
from tests.support.launch import run_on_ranks
from tests.support.model_folders import build_gemmas, build_model_folders, save_jsonl
from tests.support.small_run import check_curve, check_gradients, figures, run_recipes, train_without_export
from tests.support.workbench import FP32
from toolkit.objectives.reference import REFERENCE_FILE

PACKED = ["--data.packing", "true"]
LORA = ["--adapter.method", "lora", "--adapter.rank", "4"]
NF4, INT8 = ([*LORA, "--adapter.base_dtype", kind] for kind in ("nf4", "int8"))
RESUMED = ("resumed", "recomputed")
RUNS: dict[str, tuple[str, list[str]]] = {
    "single": ("single", ["--train.micro_batch_size_rows", "4"]),
    "single-packed": ("single", [*PACKED, "--train.micro_batch_size_rows", "2"]),
    "ddp-packed": ("ddp_cpu", [*PACKED, "--train.micro_batch_size_rows", "1"]),
    "fsdp2": ("fsdp2_cpu", ["--train.micro_batch_size_rows", "3", "--eval.unshard", "never", "--eval.batch_size_rows", "3"]),
    "fsdp2-packed": ("fsdp2_cpu", [*PACKED, "--train.micro_batch_size_rows", "4", "--data.num_loader_workers", "1"]),
    "lora-single": ("single", [*LORA, "--train.micro_batch_size_rows", "3"]),
    "lora-fsdp2-packed": ("fsdp2_cpu", [*LORA, *PACKED, "--train.micro_batch_size_rows", "2"]),
    "nf4-single": ("single", [*NF4, "--train.micro_batch_size_rows", "3"]),
    "nf4-fsdp2-packed": ("fsdp2_cpu", [*NF4, *PACKED, "--train.micro_batch_size_rows", "2"]),
    "int8-single": ("single", [*INT8, "--train.micro_batch_size_rows", "3"]),
    "int8-fsdp2-packed": ("fsdp2_cpu", [*INT8, *PACKED, "--train.micro_batch_size_rows", "2"]),
    "mixtral-single": ("single", ["--train.micro_batch_size_rows", "3"]),
    "mixtral-fsdp2-packed": ("fsdp2_cpu", [*PACKED, "--train.micro_batch_size_rows", "2"]),
    "three-fsdp2-packed": ("fsdp2_cpu", [*PACKED, "--train.micro_batch_size_rows", "2"]),
    "t5-single": ("single", ["--train.micro_batch_size_rows", "16"]),
    "t5-fsdp2": ("fsdp2_cpu", ["--train.micro_batch_size_rows", "3", "--eval.unshard", "never", "--eval.generate", "true"]),
    "reference-single": ("single", ["--train.micro_batch_size_rows", "4"]),
    "reference-fsdp2-packed": ("fsdp2_cpu", [*PACKED, "--train.micro_batch_size_rows", "2"]),
    **dict.fromkeys(RESUMED, ("fsdp2_cpu", [*PACKED, "--train.micro_batch_size_rows", "4", "--checkpoint.every_steps", "1"])),
}
OF_EVALUATION = ("loss", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected", "rewards/chosen")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    texts = small_run.draw_texts(90, (2, 11), (1, 6), (1, 6), words=small_run.WORDS[:12])
    pairs = [{"prompt": f"{prompt} ", "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in texts]
    save_jsonl(folder / "rows.jsonl", pairs)
    run_on_ranks(build_others, preset="single", overrides=FP32, args=(folder,))
    return folder


def how(folder: Path, name: str) -> dict:
    preset, flags = RUNS[name]
    family = next((family for family in ("t5", "mixtral") if family in name), "gemma3")
    shared = ["--model.name_or_path", str(folder / family), "--preference.beta", "0.5", "--optim.schedule", "constant"]
    if family != "t5":
        shared += ["--data.packing", "false", "--data.bucket_by_length", "false", "--data.max_length_tokens", "96"]
    if name.startswith("reference"):  # another model, with the same tokenizer
        shared += ["--preference.reference", str(folder / "gemma2")]
    overrides = {"num_processes": 3} if name.startswith("three") else {}
    recipe = "dpo_t5" if family == "t5" else "dpo"
    where = {"preset": preset, "overrides": overrides, "recipe": recipe}
    return {**where, "flags": [*shared, *flags], "function": train_without_export}


def expected_of(name: str) -> str:
    return next((f"{kind}-single" for kind in ("lora", "nf4", "int8", "mixtral", "t5", "reference") if kind in name), "single")


def build_others(folder: Path) -> None:
    """The Gemmas, a mixture, and a T5 without ReLU."""
    build_gemmas(folder)
    build_model_folders(folder, ["mixtral"])
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(**small_run.T5_CONFIG)).save_pretrained(folder / "t5")
    AutoTokenizer.from_pretrained(folder / "gemma3").save_pretrained(folder / "t5")


@pytest.fixture(scope="module")
def finished(folder) -> dict:
    runs = {name: how(folder, name) for name in RUNS}
    short = {name: runs[name] | {"flags": [*runs[name]["flags"], "--train.max_steps", "3"]} for name in RESUMED}
    done = run_recipes(folder, runs | short)
    kept = [folder / "runs" / name / REFERENCE_FILE for name in RESUMED]
    before = [file.stat().st_mtime_ns for file in kept]
    kept[1].write_bytes(kept[1].read_bytes()[:-8])  # as a copy that was cut off
    return done | run_recipes(folder, {name: runs[name] for name in RESUMED}) | {"kept": before}


@pytest.mark.parametrize("name", [name for name in RUNS if name.split("-")[-1] != "single" and name not in RESUMED])
def test_a_curve_does_not_depend_on_how_pairs_are_cut(finished, name):
    (lines, gradients), (expected, theirs) = finished[name], finished[expected_of(name)]
    check_curve(lines, expected, ("loss", "grad_norm", "logps/chosen", "logps/rejected"))
    check_gradients(gradients, theirs[0])
    actual, wanted = figures(lines, "eval"), figures(expected, "eval")
    for figure in OF_EVALUATION:
        first = -1 if figure == "rewards/accuracies" else 0  # before the first step margins are rounding
        assert actual[figure][first:] == pytest.approx(wanted[figure][first:], rel=1e-4, abs=1e-5), figure


@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_is_bit_exact_and_takes_the_reference_from_the_run_folder(finished, folder, name):
    """Where that is damaged, it is computed again, by the model of the run's start."""
    (resumed, _), (expected, _) = finished[name], finished["fsdp2-packed"]
    for kind, names in (("train", ("loss", "grad_norm")), ("eval", OF_EVALUATION)):
        actual, wanted = figures(resumed, kind), figures(expected, kind)
        for figure in names:
            last = 3 if kind == "train" else 1
            assert actual[figure].tolist()[-last:] == wanted[figure].tolist()[-last:], figure
    times = [(folder / "runs" / run / REFERENCE_FILE).stat().st_mtime_ns for run in RESUMED]
    assert [now == before for now, before in zip(times, finished["kept"], strict=True)] == [True, False]


def test_the_first_step_begins_at_the_reference(finished):
    for name in RUNS:
        losses = figures(finished[name][0], "train")["loss"]
        starts_at_reference = not name.startswith("reference")
        assert (losses[0] == pytest.approx(np.log(2), rel=1e-5)) == starts_at_reference and losses[-1] < losses[0]


def test_another_reference_is_kept_with_the_hash_of_its_weights(finished, folder):
    kept = {}
    for name in ("reference-single", "reference-fsdp2-packed", "single"):
        with safe_open(folder / "runs" / name / REFERENCE_FILE, "np") as file:
            kept[name] = file.metadata().get("weights"), file.get_tensor("logps")
    assert kept["reference-single"][0] == kept["reference-fsdp2-packed"][0] and kept["single"][0] is None
    np.testing.assert_allclose(kept["reference-single"][1], kept["reference-fsdp2-packed"][1], rtol=1e-5)
    assert np.abs(kept["reference-single"][1] - kept["single"][1]).mean() > 0.1
    evaluated = [line for line in finished["reference-single"][0] if line["kind"] == "eval"]
    measured_on = evaluated[-1]["measured_on"]["loss"]  # reports compare runs by it
    assert (measured_on["loss"], Path(measured_on["reference"]).is_dir()) == ("sigmoid", True)
