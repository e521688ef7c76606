"""An objective of a user's own, in this file alone: a number for a text, by squared error."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.launch import run_on_ranks
from tests.support.model_folders import build_model_folders
from tests.support.refusals import refusal
from tests.support.small_run import figures
from tests.support.workbench import FP32
from toolkit.data.collate import CausalCollator
from toolkit.files.json_lines import load_json_lines
from toolkit.objectives.objective import Objective
from toolkit.tools.generate.model import find_folder

NUM_STEPS, SAVED_STEP = 8, 4


@dataclass(frozen=True)
class Numbers(CausalCollator):
    def collate(self, packs, *, is_dummy: bool = False) -> dict:
        rows = [row for (row,) in packs]
        labels_B = torch.tensor([row["labels"][0] for row in rows])
        return {**self.model_inputs(rows), "labels": labels_B, "counts": torch.full_like(labels_B, float(not is_dummy))}


class Regression(Objective):
    name = "regression"
    auto_class = "AutoModelForSequenceClassification"
    takes = "a model that AutoModelForSequenceClassification loads"
    may_draw_head = True

    def check_model_config(self, model_config, config) -> None:
        model_config.num_labels, model_config.pad_token_id = 1, 0

    def features(self, rows: dict[str, list], tokenizer, config) -> dict[str, list]:
        ids = tokenizer(rows["prompt"], truncation=True, max_length=config.max_length_tokens)["input_ids"]
        return {"input_ids": ids, "labels": [[float(number)] for number in rows["completion"]]}

    def build_collator(self, model, pad_token_id: int) -> Numbers:
        return Numbers(pad_token_id)

    def loss(self, model, batch, label_smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        errors_B = model(input_ids=batch["input_ids"], use_cache=False).logits[:, 0].float() - batch["labels"]
        return (errors_B**2 * batch["counts"]).sum(), (errors_B.abs() * batch["counts"]).sum()

    def metrics(self, loss_sum: float, second_sum: float, num_labels: float, num_bytes: float, /) -> dict[str, float]:
        return {"loss": loss_sum / num_labels, "absolute_error": second_sum / num_labels}


class Doubled(Numbers):
    def collate(self, packs, *, is_dummy: bool = False) -> dict:
        batch = super().collate(packs, is_dummy=is_dummy)
        return batch | {"labels": batch["labels"].repeat(2)}


def with_loss(change: Callable[[torch.Tensor, dict], torch.Tensor]) -> dict[str, Callable]:
    """A loss whose two sums are changed."""
    return {"loss": lambda self, model, batch, *_: tuple(change(each, batch) for each in Regression.loss(self, model, batch))}


MISTAKES: list[tuple[dict[str, Callable], dict, str]] = [
    (with_loss(lambda loss, batch: loss / len(batch["labels"])), {},
     " of that row twice: return the sum over labels, not a mean"),
    ({"loss": lambda self, model, batch, *_: Regression.loss(self, model, {**batch, "counts": 1.0})}, {},
     " of a dummy batch, not 0: let labels with is_dummy not count"),
    (with_loss(lambda loss, _: loss.to("meta")), {},
     " is not two scalar tensors on cpu: return the sum over labels, and a second sum"),
    ({"loss": Objective.loss}, {},
     "has no loss of its own, and its batch no label_positions for cross-entropy: define loss"),
    ({"features": lambda self, *args: {name.rstrip("s"): rows for name, rows in Regression.features(self, *args).items()}}, {},
     "are input_id, label: return input_ids and labels, each with a list for every one of the 33 rows"),
    ({"build_collator": lambda self, model, pad_token_id: Doubled(pad_token_id)}, {},
     "makes 2 labels of a row with 1: let its batch have labels, a vector of those of its rows"),
    ({}, {"optim.label_smoothing": 0.1}, "of objective regression is the same without it: leave it out"),
    ({}, {"adapter.method": "lora"}, "generates no text, so that its adapter could not be read with its base: set"),
    ({}, {"eval.best_metric": "perplexity"}, "eval.best_metric is perplexity: choose one of loss, absolute_error, "),
    ({}, {"loss": sum}, "loss is given, and objective regression has a loss of its own: give one of them"),
]  # fmt: skip
"""Methods of the objective that are wrong, or settings that it does not have, and what is said."""


def run(folder: Path, name: str, num_steps: int, methods: dict | None = None, **changes):
    from toolkit import finetune, load_config

    loss = changes.pop("loss", None)
    settings = {
        "model.name_or_path": folder / "llama", "data.source": "jsonl", "data.files": [str(folder / "rows.jsonl")],
        "data.eval_files": [str(folder / "held_out.jsonl")], "data.cache_dir": folder / "cache", "optim.lr": 3e-3,
        "train.global_batch_size_rows": 8, "train.micro_batch_size_rows": 3, "train.max_steps": num_steps,
        "optim.schedule": "constant", "eval.every_steps": SAVED_STEP, "checkpoint.every_steps": SAVED_STEP, "log_every_steps": 1,
        "run.output_dir": folder / "runs", "run.name": name, **changes,
    }  # fmt: skip
    objective = type(name, (Regression,), methods) if methods else Regression  # its name is part of the cache's key
    return finetune(load_config("llm", overrides=settings), objective=objective(), loss=loss)


def refuse_each(folder: Path) -> list[str]:
    """What is said of each of the mistakes, and then that a metric of the objective's own may be the best one."""
    said = [refusal(run, folder, f"refused-{place}", 1, each, **changes) for place, (each, changes, _) in enumerate(MISTAKES)]
    own = {"eval.best_metric": "absolute_error", "eval.higher_is_better": False}
    return [*said, str(run(folder, "best", 1, **own).best_value)]


def train(folder: Path) -> tuple[list, float]:
    """Results of a run that stops and goes on, and of one from start to end; and the error of the exported model by hand."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    results = [run(folder, "resumed", SAVED_STEP), run(folder, "resumed", NUM_STEPS), run(folder, "whole", NUM_STEPS)]
    model, tokenizer = (each.from_pretrained(results[1].export) for each in (AutoModelForSequenceClassification, AutoTokenizer))
    errors = [
        model(**tokenizer(row["prompt"], return_tensors="pt")).logits.item() - float(row["completion"])
        for row in load_json_lines(folder / "held_out.jsonl")
    ]
    return results, sum(error**2 for error in errors) / len(errors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("objective")
    run_on_ranks(build_model_folders, preset="single", overrides=FP32, args=(folder, ("llama",)))
    words = [" ".join(["the", "a b", "oar"][: 1 + i % 3] * (1 + i % 5)) + f" {i}" for i in range(40)]
    lines = [json.dumps({"prompt": text, "completion": str(len(text) / 10)}) for text in words]
    (folder / "rows.jsonl").write_text("\n".join(lines[:-7]))
    (folder / "held_out.jsonl").write_text("\n".join(lines[-7:]))
    return folder


def test_mistakes_of_an_objective_are_said_before_it_trains(folder):
    *said, best = run_on_ranks(refuse_each, preset="single", overrides=FP32, args=(folder,))[0]
    for sentence, (_, _, expected) in zip(said, MISTAKES, strict=True):
        assert expected in sentence
    assert float(best) > 0


def test_a_number_for_a_text_is_trained_evaluated_resumed_and_exported(folder):
    results, by_hand = run_on_ranks(train, preset="single", overrides=FP32, args=(folder,))[0]
    half, resumed, whole = (result.metrics for result in results)
    assert resumed["loss"] == pytest.approx(by_hand, rel=1e-4) and resumed["loss"] < half["loss"]
    assert {**resumed, "rows_per_s": 0} == {**whole, "rows_per_s": 0}
    curves = [figures(load_json_lines(folder / "runs" / name / "metrics.jsonl"), "train") for name in ("resumed", "whole")]
    assert curves[0]["loss"].tolist() == curves[1]["loss"].tolist() and len(curves[0]["loss"]) == NUM_STEPS
    no_command = refusal(find_folder, str(folder / "runs" / "whole"))
    assert no_command.startswith("objective is regression, which Python code has given to finetune(): call that again")
