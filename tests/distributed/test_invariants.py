"""Invariants 1, 2 and 5 on the recipe itself: the same curve, gradients and rows whatever processes and micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU, run_on_ranks
from tests.support.small_run import (
    NUM_STEPS,
    RELATIVE_TOLERANCE,
    check_curve,
    check_gradients,
    figures,
    run_recipes,
    train_and_record_gradients,
    train_without_export,
    write_inputs,
)
from toolkit.files.json_lines import load_json_lines

CHECKPOINTING = {"fsdp_config": {"fsdp_activation_checkpointing": True}}
BY_SIZE = {"fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1500}}
COMPILED = {"dynamo_config": {"dynamo_backend": "AOT_EAGER", "dynamo_use_regional_compilation": True}}

# name: preset, overrides of its YAML, flags
RUNS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "single-4": ("single", {}, ["--train.micro_batch_size_rows", "4", "--eval.batch_size_rows", "16"]),
    "single-1": ("single", {}, ["--train.micro_batch_size_rows", "1", "--eval.batch_size_rows", "1"]),
    "ddp-2": ("ddp_cpu", {}, ["--train.micro_batch_size_rows", "2", "--eval.batch_size_rows", "16"]),
    "fsdp2-1": ("fsdp2_cpu", {}, ["--train.micro_batch_size_rows", "1", "--eval.batch_size_rows", "16"]),
    "fsdp2-2": (
        "fsdp2_cpu", {},
        ["--train.micro_batch_size_rows", "2", "--eval.batch_size_rows", "1", "--eval.unshard", "never"],
    ),
    "fsdp2-4": (
        "fsdp2_cpu", {},
        ["--train.micro_batch_size_rows", "4", "--data.num_loader_workers", "1", "--data.pad_lengths", "true"],
    ),
    # Units inside units, and tied weights.
    "fsdp2-by-size": ("fsdp2_cpu", BY_SIZE, ["--train.micro_batch_size_rows", "2", "--eval.unshard", "never"]),
    "fsdp2-checkpointing": ("fsdp2_cpu", CHECKPOINTING, ["--train.micro_batch_size_rows", "2"]),
    "fsdp2-compiled": ("fsdp2_cpu", COMPILED, ["--train.micro_batch_size_rows", "4"]),
    "hsdp-2": (
        "fsdp2_hsdp", GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_hsdp"],
        ["--train.micro_batch_size_rows", "2", "--eval.unshard", "never"],
    ),
    "fsdp1-4": ("fsdp1_full_shard", GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_full_shard"], ["--train.micro_batch_size_rows", "4"]),
}  # fmt: skip
REFERENCE = "single-4"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invariants")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def finished(folder: Path) -> dict[str, Any]:
    """Every run once, by name. Exports of these presets, except of the compiled one, are in `tests/recipes/test_presets.py`."""
    model = ["--model.name_or_path", str(folder / "model"), "--model.from_scratch", "true"]
    runs = {
        name: {
            "preset": preset,
            "overrides": overrides,
            "flags": [*model, *flags],
            "function": train_and_record_gradients if name == "fsdp2-compiled" else train_without_export,
        }
        for name, (preset, overrides, flags) in RUNS.items()
    }
    return run_recipes(folder, runs)


@pytest.mark.parametrize("name", [name for name in RUNS if name != REFERENCE])
def test_curve_is_that_of_one_process(finished: dict[str, Any], name: str) -> None:
    check_curve(finished[name][0], finished[REFERENCE][0])
    expected, actual = figures(finished[REFERENCE][0], "train"), figures(finished[name][0], "train")
    assert actual["learning_rate"].tolist() == expected["learning_rate"].tolist()
    assert actual["num_rows"].tolist() == expected["num_rows"].tolist()
    assert len(set(expected["num_rows"].tolist())) == 2, "a smaller last batch should be among the steps"


@pytest.mark.parametrize("name", [name for name in RUNS if name != REFERENCE])
def test_first_gradients_are_those_of_one_process(finished: dict[str, Any], name: str) -> None:
    check_gradients(finished[name][1], finished[REFERENCE][1][0])


def test_recorded_gradient_norm_is_the_global_one(finished: dict[str, Any]) -> None:
    gradients = finished[REFERENCE][1][0]
    expected = np.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in gradients.values()))
    for name in RUNS:
        assert finished[name][0][1]["grad_norm"] == pytest.approx(expected, rel=RELATIVE_TOLERANCE), name


@pytest.mark.parametrize("name", list(RUNS))
def test_ranks_share_the_batch_without_overlap(folder: Path, finished: dict[str, Any], name: str) -> None:
    check_rows(folder / "runs", name, REFERENCE)


def test_an_epoch_takes_every_row_once(folder: Path, finished: dict[str, Any]) -> None:
    lines = figures(finished[REFERENCE][0], "train")
    first_epoch = [int(step) for step, epoch in zip(lines["step"], lines["epoch"], strict=True) if epoch == 0]
    rows = [row for step in first_epoch for row in rows_of_steps(folder / "runs" / REFERENCE)[step]]
    assert len(first_epoch) < NUM_STEPS, "the run should go beyond an epoch"
    assert len(rows) == len(set(rows)) == int(lines["num_rows"][: len(first_epoch)].sum())


@pytest.mark.parametrize("name", [name for name in RUNS if name != REFERENCE])
def test_evaluation_depends_on_neither_batch_size_nor_processes(folder: Path, finished: dict[str, Any], name: str) -> None:
    losses = [figures(finished[run][0], "eval")["loss"][0] for run in (name, REFERENCE)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    check_evaluation(folder / "runs", name, REFERENCE)


@pytest.mark.parametrize(
    ("preset", "overrides", "num_ranks", "placement"),
    [
        ("fsdp2_cpu", {}, 2, "(Shard(dim=0),)"),
        # 2 x 2: each rank's half is another's too.
        ("fsdp2_hsdp", GPU_PRESET_OVERRIDES_ON_CPU["fsdp2_hsdp"], 4, "(Replicate(), Shard(dim=0))"),
    ],
    ids=["fsdp2", "hsdp"],
)
def test_parameters_are_sharded(preset: str, overrides: dict[str, Any], num_ranks: int, placement: str) -> None:
    """Each rank holds half of every parameter, gradient and moment, so that a silent DDP shows."""
    reports = run_on_ranks(report_shards, preset=preset, overrides={"mixed_precision": "no", **overrides})
    assert len(reports) == num_ranks
    for report in reports:
        assert (report["types"], report["placements"]) == ({"DTensor"}, {placement})
        assert report["local_bytes"] == pytest.approx(report["whole_bytes"] / 2, rel=0.02)
        assert report["gradient_bytes"] == pytest.approx(report["whole_bytes"] / 2, rel=0.02)
        assert report["moment_bytes"] == pytest.approx(report["whole_bytes"], rel=0.02)  # two moments, half of each
        assert report["whole_gathered_bytes"] == report["whole_bytes"]


def test_fsdp1_parameters_are_sharded() -> None:
    overrides = GPU_PRESET_OVERRIDES_ON_CPU["fsdp1_full_shard"]
    reports = run_on_ranks(report_shards, preset="fsdp1_full_shard", overrides=overrides)
    assert sum(report["local_bytes"] for report in reports) == pytest.approx(reports[0]["whole_bytes"], rel=0.02)
    for report in reports:
        assert report["local_bytes"] == pytest.approx(report["whole_bytes"] / 2, rel=0.02)
        assert report["whole_gathered_bytes"] == report["whole_bytes"]


def report_shards() -> dict[str, Any]:
    """On every rank: one step of a tiny T5, and what each rank then holds."""
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.support.small_run import T5_CONFIG
    from toolkit.config.schema import OptimConfig
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.parallel.gather import unsharded_parameters
    from toolkit.parallel.units import local_tensor
    from toolkit.parallel.wrap import shard_model
    from toolkit.training.optim import build_optimizer

    accelerator = build_accelerator()
    model = T5ForConditionalGeneration(T5Config(**T5_CONFIG))
    whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    sharded = shard_model(accelerator, model)
    optimizer = build_optimizer(OptimConfig(), sharded.model)
    ids = torch.arange(8).reshape(2, 4)
    sharded.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.sum().backward()
    parameters = list(sharded.model.parameters())

    def num_bytes(tensors: list[Any]) -> int:
        return sum(local_tensor(t).numel() * t.element_size() for t in tensors)

    gradient_bytes = num_bytes([p.grad for p in parameters if p.grad is not None])
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "types": {"DTensor" if isinstance(p, DTensor) else type(p).__name__ for p in parameters},
        "placements": {str(p.placements) for p in parameters if isinstance(p, DTensor)},
        "whole_bytes": whole_bytes,
        "local_bytes": num_bytes(parameters),
        "gradient_bytes": gradient_bytes,
        "moment_bytes": num_bytes(moments),
        "whole_gathered_bytes": sum(p.numel() * p.element_size() for _, p in unsharded_parameters(sharded)),
    }


def check_rows(runs: Path, name: str, reference: str) -> None:
    """Each step took the rows that those of another run took, none of them twice."""
    expected, actual = (rows_of_steps(runs / run) for run in (reference, name))
    for step in range(1, NUM_STEPS + 1):
        assert len(actual[step]) == len(set(actual[step])), f"step {step}: a row was trained on twice"
        assert set(actual[step]) == set(expected[step]), f"step {step}: not the rows of the global batch"


def check_evaluation(runs: Path, name: str, reference: str) -> None:
    """Losses, all figures before the first step, and its texts are those of another run."""
    expected, actual = (figures(load_json_lines(runs / run / "metrics.jsonl"), "eval") for run in (reference, name))
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=RELATIVE_TOLERANCE)
    for figure in expected.keys() - {"kind", "rows_per_s", "rouge_tokenizer", "measured_on"}:
        np.testing.assert_allclose(actual[figure][0], expected[figure][0], rtol=1e-6, err_msg=figure)
    predictions = [load_json_lines(runs / run / "predictions-0.jsonl") for run in (reference, name)]
    assert predictions[0] == predictions[1]


def rows_of_steps(run_folder: Path) -> dict[int, list[int]]:
    """Row ids by step, of all ranks and micro-batches as they were logged."""
    steps: dict[int, list[int]] = {}
    for path in sorted(run_folder.glob("rows-*.jsonl")):
        for line in load_json_lines(path):
            steps.setdefault(line["step"], []).extend(line["row_ids"])
    return steps
