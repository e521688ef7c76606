"""`finetune` from Python: datasets, metrics, a loss, hooks and models of one's own, alike on one rank and on two that shard the
model, call after call. The examples of docs/own_code.md run as they stand there."""

import dataclasses
import gc
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.launch import REPOSITORY, run_on_ranks
from tests.support.model_folders import make_rows
from tests.support.refusals import refusal
from tests.support.workbench import FP32
from toolkit.files.json_lines import load_json_lines

EXAMPLES = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "own_code.md").read_text(), re.DOTALL)
PRESETS = ("single", "fsdp2_cpu")
NUM_STEPS, NUM_ROWS = 4, 40
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


def train_all(folder: Path, model: Path) -> dict:
    """On every rank, in one process: a run of a T5, a resume, and what a resume refuses."""
    import datasets
    import torch

    from tests.support.process_state import changes_since, state_of_the_process
    from toolkit import finetune, load_config

    rows = make_rows(48)
    places = {"run.output_dir": str(folder), "data.cache_dir": str(folder / "cache"), "model.name_or_path": str(model)}
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
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if is_alone:
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
    if not is_alone:
        called["refusals"] = [refusal(finetune, longer, **given | {"loss": other}) for _ in range(2)]
    return called


def run_on_preset(function, preset: str, runs: Path, *args) -> tuple[Path, list[dict]]:
    """The folder of the runs that all ranks made, and what each returned."""
    return runs / preset, run_on_ranks(function, preset=preset, overrides=FP32, args=(runs / preset, *args))


def losses(run: Path, kind: str) -> list[float]:
    return [line["loss"] for line in load_json_lines(run / "metrics.jsonl") if line["kind"] == kind]


@pytest.fixture(scope="module")
def called(bench) -> dict[str, tuple[Path, list[dict]]]:
    return {preset: run_on_preset(train_all, preset, bench.runs, bench.models["t5"]) for preset in PRESETS}


def test_one_rank_and_two_train_alike_with_a_dataset_a_metric_and_a_loss_of_ones_own(called):
    of_presets = (load_json_lines(folder / "t5" / "metrics.jsonl") for folder, _ in called.values())
    kinds = ("train", "eval")
    one, two = ([(of["step"], of["loss"], of.get("order", 0)) for of in lines if of["kind"] in kinds] for lines in of_presets)
    assert len(one) == 5 + 4
    np.testing.assert_allclose(two, one, rtol=1e-5)


def test_each_rank_is_called_after_every_step_and_evaluation_and_gets_the_export_and_the_last_and_best_figures(called):
    for folder, ranks in called.values():
        lines = {line["step"]: line for line in load_json_lines(folder / "t5" / "metrics.jsonl") if line["kind"] == "train"}
        for steps, evaluations, result in ((rank["steps"], rank["evaluations"], rank["result"]) for rank in ranks):
            assert [(info.step, info.num_steps) for info in steps] == [(step, 4) for step in (1, 2, 3, 4)]
            assert [info.loss for info in steps] == [None, lines[2]["loss"], None, lines[4]["loss"]]
            assert [info.learning_rate for info in steps] == [lines[step]["learning_rate"] for step in (1, 2, 3, 4)]
            assert [figures["step"] for figures in evaluations] == [0, 2, 4] and all("order" in f for f in evaluations)
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


# --- The examples of docs/own_code.md, and a built model.


def given(folder: Path, model: Path, name: str, **changes) -> dict:
    """The two names that the examples take for granted."""
    import datasets

    from toolkit import load_config

    rows = [
        {"prompt": row["source"], "completion": " " + row["target"], "topic": f"topic {place % 2}"}
        for place, row in enumerate(make_rows(NUM_ROWS))
    ]
    settings = {
        "model.name_or_path": str(model), "model.dropout": 0, "train.global_batch_size_rows": 8, "train.micro_batch_size_rows": 2,
        "train.max_steps": NUM_STEPS, "data.eval_fraction": 0.2, "eval.max_new_tokens": 4, "log_every_steps": 1, "optim.lr": 1e-2,
        "eval.generate": name == "topics",
        "run.output_dir": str(folder), "run.name": name, "data.cache_dir": str(folder / "cache"),
    }  # fmt: skip
    return {"config": load_config("llm", overrides=settings | changes), "rows": datasets.Dataset.from_list(rows)}


def run_examples(folder: Path, model: Path) -> dict:
    """On every rank: each example by the last words of its headline; what they have defined, and what their hooks see."""
    import torch
    import transformers

    from toolkit import finetune

    names = ("class", "z_loss", "ema", "topics")
    found = {}
    for name, source in zip(names, EXAMPLES, strict=True):
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        known = given(folder, model, name)
        exec(compile(source, path, "exec"), known)
        found[name] = known["result"]
    # The weights after each step without the mean, and what an evaluation's hook is given.
    steps = []

    def note(info) -> None:
        whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in info.model.named_parameters()}
        steps.append({name: weight.numpy() for name, weight in whole.items()})
        assert isinstance(info.optimizer, torch.optim.Optimizer)
        assert not gc.isenabled() and not torch.backends.cuda.cudnn_sdp_enabled(), "unlike outside of the run"

    seen = []
    known = given(folder, model, "plain")
    after = seen.append
    finetune(known["config"], train=known["rows"], after_step=note, after_evaluation=after)
    assert all(figures.model is seen[0].model and figures.optimizer.param_groups for figures in seen) and seen[0]["step"] == 0

    class Scaled(transformers.LlamaForCausalLM):
        """Each logit has a factor of its own, which no file of weights has."""

        def __init__(self, config) -> None:
            super().__init__(config)
            self.factor = torch.nn.Parameter(torch.ones(config.vocab_size))

        def forward(self, *args, **inputs):
            output = super().forward(*args, **inputs)
            output.logits = output.logits * self.factor
            return output

    # A built model: each rank has built another one, and that of the first rank counts. The same call resumes.
    for num_steps in (NUM_STEPS, NUM_STEPS + 1):
        torch.manual_seed(1 + int(os.environ.get("RANK", "0")))
        built = Scaled(transformers.AutoConfig.from_pretrained(model))
        known = given(folder, model, "built", **{"train.max_steps": num_steps})
        found["built"] = finetune(known["config"], model=built, train=known["rows"])
    found["refusal"] = refusal(finetune, known["config"], train=known["rows"])
    return {"results": found, "steps": steps}


@pytest.fixture(scope="module")
def examples(bench) -> dict[str, tuple]:
    """Where the runs are, and what the first rank returned, by the preset."""
    called = {preset: run_on_preset(run_examples, preset, bench.runs, bench.models["llama"]) for preset in PRESETS}
    return {preset: (folder, ranks[0]) for preset, (folder, ranks) in called.items()}


@pytest.mark.parametrize("name", ["class", "z_loss", "ema", "topics", "built"])
def test_the_examples_of_the_page_are_equal_on_one_process_and_on_two(examples, name):
    (single, _), (sharded, _) = (examples[preset] for preset in PRESETS)
    for kind in ("train", "eval"):
        np.testing.assert_allclose(losses(sharded / name, kind), losses(single / name, kind), rtol=1e-5)
    one, two = (load_file(folder / name / "export" / "model.safetensors") for folder in (single, sharded))
    for key, weight in one.items():
        assert np.linalg.norm(two[key] - weight) < 1e-4 * np.linalg.norm(weight), key
    if name == "topics":  # a metric that sees the columns of the rows
        lines = [of for run in (single, sharded) for of in load_json_lines(run / name / "metrics.jsonl") if of["kind"] == "eval"]
        assert all({"right/topic 0", "right/topic 1"} <= line.keys() for line in lines)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_mean_of_sharded_weights_is_that_of_whole_ones(examples, preset):
    folder, of_rank = examples[preset]
    steps = of_rank["steps"]
    assert len(steps) == NUM_STEPS
    exported = load_file(folder / "ema" / "export" / "model.safetensors")
    for name, mean in steps[0].items():
        for step in steps[1:]:
            mean = mean + 0.1 * (step[name] - mean)
        np.testing.assert_allclose(exported[name], mean, rtol=1e-6, atol=1e-8, err_msg=name)
        assert np.abs(exported[name] - steps[-1][name]).max() > 1e-5, f"{name}: the mean is not the last weight"
    assert losses(folder / "ema", "train") == losses(folder / "plain", "train")


def test_the_z_loss_is_in_the_training_loss_alone(examples):
    folder, _ = examples["single"]
    assert losses(folder / "z_loss", "eval")[0] == losses(folder / "plain", "eval")[0]
    first = losses(folder / "z_loss", "train")[0] - losses(folder / "plain", "train")[0]
    # Near uniform logits, whose normalizer is about the vocabulary's size.
    assert first == pytest.approx(1e-4 * np.log(256) ** 2, rel=0.1)


def test_a_built_model_trains_resumes_and_is_exported_with_its_own_parameter(examples, bench):
    for folder, of_rank in examples.values():
        result = of_rank["results"]["built"]
        lines = load_json_lines(folder / "built" / "metrics.jsonl")
        assert result.step == NUM_STEPS + 1 and [line["step"] for line in lines if line["kind"] == "resume"] == [NUM_STEPS]
        exported, base = (load_file(of / "model.safetensors") for of in (result.export, bench.models["llama"]))
        assert np.abs(exported["factor"] - 1).max() > 1e-4
        assert exported.keys() == base.keys() | {"factor"}
        # Built from another seed, not read from model.name_or_path.
        name = "model.embed_tokens.weight"
        assert np.linalg.norm(exported[name] - base[name]) > 0.5 * np.linalg.norm(base[name])
        assert of_rank["results"]["refusal"].startswith("model is None, but ")
