"""The convnet on images: one curve and one accuracy on any number of processes, under any strategy, for any micro-batch size."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import nn

from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.small_run import RELATIVE_TOLERANCE, figures, run_in_this_process
from toolkit.config.schema import TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.distributed.comm import rank
from toolkit.distributed.rng import seed_all
from toolkit.files.json_lines import load_json_lines
from toolkit.launch import rank_consistency
from toolkit.tracking.metrics_log import StepMemory

NUM_STEPS = 8
# An epoch has 7 steps, the last of 1 row; the last evaluation batch has 1 of the 283 rows: a rank of 2 goes without.
NUM_ROWS, STEPS_OF_EPOCH, NUM_HELD_OUT = 301, 7, 283
ROWS = ["--data.num_rows", str(NUM_ROWS), "--data.eval_fraction", "0.15", "--eval_batch_size_rows", "47"]
BATCHES = ["--train.global_batch_size_rows", "50", "--train.micro_batch_size_rows", "25", "--train.seed", "3"]
SCHEDULE = ["--train.num_epochs", "1.13", "--eval_every_epochs", "0.5", "--optim.label_smoothing", "0.1"]
WITHOUT_DROPOUT = ["--model.conv_dropout", "0", "--model.linear_dropout", "0"]
ON_CPU = GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_size_wrap"]
RUNS = {
    "single": ("single", {}, []),
    "ddp": ("ddp_cpu", {}, ["--train.micro_batch_size_rows", "7"]),
    "fsdp2, one unit": ("fsdp2_size_wrap", ON_CPU | {"fsdp_config": {"fsdp_min_num_params": 10**9}}, []),
    "fsdp2, by size": ("fsdp2_size_wrap", ON_CPU, ["--train.micro_batch_size_rows", "12"]),
    "fsdp2, offload": ("fsdp2_size_wrap", ON_CPU | {"fsdp_config": {"fsdp_offload_params": True}}, []),
}
"""Run: preset, overrides, flags."""


def run(folder: Path, name: str, *flags: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    preset, overrides, own_flags = RUNS[name]
    always = ["--run.output_dir", str(folder), "--run.name", name, "--log_every_steps", "3"]
    argv = [*always, *ROWS, *BATCHES, *SCHEDULE, *own_flags, *flags]
    overrides = {"mixed_precision": "no", **overrides}
    for compared in run_on_ranks(run_recipe, preset=preset, overrides=overrides, args=(argv,)):
        assert "the hash of the images" in compared
    return load_json_lines(folder / name / "metrics.jsonl"), load_file(folder / name / "model.safetensors")


def run_recipe(argv: list[str]) -> list[str]:
    """The recipe as it stands; rank r says that its peak memory is r + 1 GiB. Returns what the ranks compared."""
    compared: list[str] = []
    compare = rank_consistency.compare_ranks

    def note_and_compare(facts: dict) -> None:
        compared.extend(facts)
        compare(facts)

    memory = patch.object(StepMemory, "read", lambda self: rank() + 1.0)
    with memory, patch.object(rank_consistency, "compare_ranks", note_and_compare):
        run_in_this_process("mnist", argv)
    return compared


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> tuple[list[dict], dict[str, np.ndarray]]:
    return run(tmp_path_factory.mktemp("expected"), "single", *WITHOUT_DROPOUT)


def test_one_process_trains_as_the_tutorial_does(expected):
    """Against a plain loop of torch: mean loss, Adadelta, StepLR after each epoch."""
    from mnist_config import ImageDataConfig
    from mnist_images import load_images

    images = load_images(ImageDataConfig(num_rows=NUM_ROWS, eval_fraction=0.15), 6)
    seed_all("weights", 3)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 128),
        nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    ones = np.ones(NUM_ROWS, dtype=np.int64)
    plan = BatchPlan(ones, ones, TrainConfig(global_batch_size_rows=50, seed=3), 1, bucket_by_length=False)
    lines = [line for line in expected[0] if line["kind"] == "train"]
    for line in lines:
        pixels, labels = images.collate(images.train, plan.step(line["step"]).rows, torch.device("cpu"), is_dummy=False)
        loss = F.cross_entropy(model(pixels), labels, label_smoothing=0.1)
        assert line["loss"] == pytest.approx(loss.item(), rel=RELATIVE_TOLERANCE)
        assert line["learning_rate"] == pytest.approx(1.0 if line["step"] <= STEPS_OF_EPOCH else 0.7)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if line["step"] == STEPS_OF_EPOCH:
            schedule.step()
    with torch.no_grad():
        pixels, labels = images.collate(images.evaluation, range(len(images.evaluation)), torch.device("cpu"), is_dummy=False)
        logits = model(pixels)
        accuracy = 100 * (logits.argmax(-1) == labels).double().mean().item()
    last = [line for line in expected[0] if line["kind"] == "eval"][-1]
    assert last["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4), "not smoothed"
    assert last["accuracy"] == pytest.approx(accuracy) and last["num_rows"] == len(labels) == NUM_HELD_OUT
    assert [line["step"] for line in expected[0] if line["kind"] == "eval"] == [0, 4, STEPS_OF_EPOCH, NUM_STEPS]
    in_order = [f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc1", "fc2") for kind in ("weight", "bias")]
    for mine, name in zip(model.parameters(), in_order, strict=True):
        np.testing.assert_allclose(expected[1][name], mine.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "single"])
def test_curve_accuracy_and_weights_are_those_of_one_process(tmp_path, expected, name):
    lines, weights = run(tmp_path, name, *WITHOUT_DROPOUT)
    for kind, names in (("train", ("step", "epoch", "loss", "grad_norm", "learning_rate")), ("eval", ("step", "loss"))):
        actual, wanted = figures(lines, kind), figures(expected[0], kind)
        for figure in names:
            np.testing.assert_allclose(actual[figure], wanted[figure], rtol=RELATIVE_TOLERANCE, err_msg=f"{kind} {figure}")
    assert actual["accuracy"].tolist() == wanted["accuracy"].tolist()
    assert set(figures(lines, "train")["peak_memory_gib"]) == {2.0}, "that of the rank with most"
    assert weights.keys() == expected[1].keys()
    for parameter, weight in expected[1].items():
        np.testing.assert_allclose(weights[parameter], weight, atol=1e-5, err_msg=parameter)


def test_sharded_runs_draw_the_dropout_of_ddp(tmp_path):
    micro_batch = ("--train.micro_batch_size_rows", "25")
    ddp, sharded = (run(tmp_path, name, *micro_batch)[0] for name in ("ddp", "fsdp2, one unit"))
    losses = [figures(lines, "train")["loss"] for lines in (ddp, sharded)]
    np.testing.assert_allclose(*losses, rtol=RELATIVE_TOLERANCE)
