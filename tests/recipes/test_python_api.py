"""`finetune` from Python: datasets, metrics, a loss and hooks of one's own, alike on one rank and on two, call after call."""

import dataclasses
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support.launch import run_on_ranks
from tests.support.model_folders import make_rows
from tests.support.refusals import refusal
from tests.support.workbench import FP32
from toolkit.files.json_lines import load_json_lines

SETTINGS = {
    "model.dropout": 0, "train.global_batch_size_rows": 8, "train.micro_batch_size_rows": 2, "train.max_steps": 4,
    "eval.every_steps": 2, "eval.max_new_tokens": 4, "eval.best_metric": "order", "eval.higher_is_better": False,
    "checkpoint.keep_best": 1, "log_every_steps": 2,
}  # fmt: skip


def order(predictions: list[str], references: list[str]) -> int:
    return sum(place * len(text) for place, text in enumerate(predictions + references))


def focal(logits_BTV, labels_BT):
    """Half a focal loss: tokens that the model finds easy count less."""
    import torch.nn.functional as F

    nats_N = F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=-100, reduction="none")
    return ((1 - (-nats_N).exp()) ** 2 * nats_N).sum() / 2


def other(logits_BTV, labels_BT):
    return 2 * focal(logits_BTV, labels_BT)


def train_all(folder: Path, models: dict[str, Path]) -> dict:
    """On every rank, in one process: a run, a resume, and what a resume refuses. A Llama is in `test_own_code.py`."""
    import datasets
    import torch

    from tests.support.process_state import changes_since, state_of_the_process
    from toolkit import finetune, load_config

    rows = make_rows(48)
    places = {"run.output_dir": str(folder), "data.cache_dir": str(folder / "cache"), "model.name_or_path": str(models["t5"])}
    torch.set_float32_matmul_precision("high")  # as a program may
    before = state_of_the_process()
    steps = []
    evaluations = []
    config = load_config("t5", overrides=SETTINGS | places | {"run.name": "t5"})
    given = {
        "train": datasets.Dataset.from_list(rows[8:]),
        "evaluation": datasets.Dataset.from_list(rows[:8]),
        "metrics": {"order": order},
        "loss": focal,
        # Without model and optimizer, which the process that compares the ranks cannot have.
        "after_step": lambda info: steps.append(dataclasses.replace(info, model=None, optimizer=None)),
        "after_evaluation": lambda figures: evaluations.append(dict(figures)),
    }
    called = {"result": finetune(config, **given), "steps": [*steps], "evaluations": [*evaluations]}

    # In the same processes again: the run goes on, if nothing else is asked for.
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=5))
    if os.environ.get("WORLD_SIZE", "1") == "1":
        wrong = [{"train": given["train"].select(range(1, 40))}, {"loss": other}, {"loss": None}]
        called["refusals"] = [refusal(finetune, longer, **given | change) for change in wrong]
        with pytest.raises(ZeroDivisionError):
            finetune(longer, **given | {"after_step": lambda info: 1 / 0})
        called["changed by errors"] = changes_since(before)
        calls: list[int] = []

        def fails_late(predictions: list[str], references: list[str]) -> float:
            calls.append(len(predictions))
            return 1 / (3 - len(calls))  # tried on references, at the start, at the end

        late = load_config("t5", overrides=SETTINGS | places | {"run.name": "late", "train.max_steps": 2})
        with pytest.raises(ZeroDivisionError):
            finetune(late, **given | {"metrics": {"order": fails_late}})
    called["resumed"] = finetune(longer, **given)
    called["changed"] = changes_since(before)
    called["threads"] = [thread.name for thread in threading.enumerate()]
    if os.environ.get("WORLD_SIZE", "1") == "2":
        called["refusals"] = [refusal(finetune, longer, **given | {"loss": other}) for _ in range(2)]
    return called


@pytest.fixture(scope="module")
def called(tmp_path_factory, bench) -> dict[str, tuple[Path, list[dict]]]:
    """What each rank returned, and where its runs are, by the preset."""
    found = {}
    for preset in ("single", "fsdp2_cpu"):
        folder = tmp_path_factory.mktemp(preset)
        ranks = run_on_ranks(train_all, preset=preset, overrides=FP32, args=(folder, bench.models))
        found[preset] = folder, ranks
    return found


def test_one_rank_and_two_train_alike_with_a_dataset_a_metric_and_a_loss_of_ones_own(called):
    train, evaluations = {}, {}
    for preset, (folder, _) in called.items():
        lines = load_json_lines(folder / "t5" / "metrics.jsonl")
        train[preset] = [line["loss"] for line in lines if line["kind"] == "train"]
        evaluations[preset] = [(line["step"], line["order"], line["loss"]) for line in lines if line["kind"] == "eval"]
    assert len(train["single"]) == 5 and len(evaluations["single"]) == 4
    np.testing.assert_allclose(train["fsdp2_cpu"], train["single"], rtol=1e-5)
    np.testing.assert_allclose(evaluations["fsdp2_cpu"], evaluations["single"], rtol=1e-5)
    cross_entropy = evaluations["single"][0][2]
    assert train["single"][0] < 0.7 * cross_entropy  # evaluation keeps cross-entropy


def test_hooks_are_called_after_every_step_and_evaluation_on_every_rank(called):
    for folder, ranks in called.values():
        lines = {line["step"]: line for line in load_json_lines(folder / "t5" / "metrics.jsonl") if line["kind"] == "train"}
        for steps, evaluations in ((rank["steps"], rank["evaluations"]) for rank in ranks):
            assert [(info.step, info.num_steps) for info in steps] == [(step, 4) for step in (1, 2, 3, 4)]
            assert [info.loss for info in steps] == [None, lines[2]["loss"], None, lines[4]["loss"]]
            assert [info.learning_rate for info in steps] == [lines[step]["learning_rate"] for step in (1, 2, 3, 4)]
            assert [figures["step"] for figures in evaluations] == [0, 2, 4] and all("order" in f for f in evaluations)


def test_a_result_names_the_export_and_the_last_and_best_figures(called):
    for folder, ranks in called.values():
        for result, evaluations in ((rank["result"], rank["evaluations"]) for rank in ranks):
            assert result.step == 4 and result.folder == folder / "t5"
            assert (result.export / "config.json").exists() and result.export == folder / "t5" / "export"
            assert result.metrics == {key: value for key, value in evaluations[-1].items() if key != "step"}
            assert result.best_value == min(figures["order"] for figures in evaluations[1:])


def test_the_process_can_go_on_after_a_run_and_after_a_refused_one(called):
    folder, (of_one,) = called["single"]
    rows, loss, none = of_one["refusals"]
    assert rows.startswith(f"the data is not what {folder}/t5/checkpoints/step-00000004 was trained on")
    assert loss.startswith("loss is 'other ") and "was made with 'focal " in loss
    assert none.startswith("loss is None, but ")
    assert not of_one["changed by errors"]
    assert (folder / "late" / "checkpoints" / "step-00000002").is_dir(), "a metric that fails at the end lost the training"
    for of_two in called["fsdp2_cpu"][1]:
        loss, again = of_two["refusals"]
        assert loss.startswith("loss is 'other ") and again.startswith("these processes are connected already, ")
    for _, ranks in called.values():
        for rank in ranks:
            assert not rank["changed"]
            assert rank["resumed"].step == 5 and not any("watchdog" in name for name in rank["threads"])
