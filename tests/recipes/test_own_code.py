"""The examples of docs/own_code.md as they stand there, on one process and on two that shard the model; and a built model."""

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.launch import REPOSITORY, run_on_ranks
from tests.support.model_folders import make_rows
from tests.support.refusals import refusal
from tests.support.workbench import FP32
from toolkit.files.json_lines import load_json_lines

EXAMPLES = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "own_code.md").read_text(), re.DOTALL)
PRESETS = ("single", "fsdp2_cpu")
NUM_STEPS, NUM_ROWS = 4, 40


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


def scaled_class():
    """A class with a parameter that no file of weights has."""
    import torch
    import transformers

    class Scaled(transformers.LlamaForCausalLM):
        """Each logit has a factor of its own."""

        def __init__(self, config) -> None:
            super().__init__(config)
            self.factor = torch.nn.Parameter(torch.ones(config.vocab_size))

        def forward(self, *args, **inputs):
            output = super().forward(*args, **inputs)
            output.logits = output.logits * self.factor
            return output

    return Scaled


def run_examples(folder: Path, model: Path) -> dict:
    """On every rank: each example by the last words of its headline; what they have defined, and what their hooks see."""
    import torch

    names = ("class", "z_loss", "ema", "topics")
    found = {}
    for name, source in zip(names, EXAMPLES, strict=True):
        path = folder / f"{name}.py"
        path.write_text(source)
        known = given(folder, model, name)
        exec(compile(source, path, "exec"), known)
        found[name] = known["result"]
    # The weights after each step without the mean, and what an evaluation's hook is given.
    import transformers

    from toolkit import finetune

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
    # A built model: each rank has built another one, and that of the first rank counts. The same call resumes.
    scaled = scaled_class()
    for num_steps in (NUM_STEPS, NUM_STEPS + 1):
        torch.manual_seed(1 + int(os.environ.get("RANK", "0")))
        built = scaled(transformers.AutoConfig.from_pretrained(model))
        known = given(folder, model, "built", **{"train.max_steps": num_steps})
        found["built"] = finetune(known["config"], model=built, train=known["rows"])
    found["refusal"] = refusal(finetune, known["config"], train=known["rows"])
    return {"results": found, "steps": steps}


@pytest.fixture(scope="module")
def examples(tmp_path_factory, bench) -> dict[str, tuple]:
    found = {}
    for preset in PRESETS:
        folder = tmp_path_factory.mktemp(preset)
        ranks = run_on_ranks(run_examples, preset=preset, overrides=FP32, args=(folder, bench.models["llama"]))
        found[preset] = folder, ranks[0]
    return found


def weights_of(export: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {name: weight for file in export.glob("*.safetensors") for name, weight in load_file(file).items()}


def losses(run: Path, kind: str) -> list[float]:
    return [line["loss"] for line in load_json_lines(run / "metrics.jsonl") if line["kind"] == kind]


@pytest.mark.parametrize("name", ["class", "z_loss", "ema", "topics", "built"])
def test_the_examples_of_the_page_are_equal_on_one_process_and_on_two(examples, name):
    (single, _), (sharded, _) = (examples[preset] for preset in PRESETS)
    for kind in ("train", "eval"):
        np.testing.assert_allclose(losses(sharded / name, kind), losses(single / name, kind), rtol=1e-5)
    one, two = weights_of(single / name / "export"), weights_of(sharded / name / "export")
    for key, weight in one.items():
        assert np.linalg.norm(two[key] - weight) < 1e-4 * np.linalg.norm(weight), key


@pytest.mark.parametrize("preset", PRESETS)
def test_the_mean_of_sharded_weights_is_that_of_whole_ones(examples, preset):
    folder, of_rank = examples[preset]
    steps = of_rank["steps"]
    assert len(steps) == NUM_STEPS
    exported = weights_of(folder / "ema" / "export")
    for name, mean in steps[0].items():
        for step in steps[1:]:
            mean = mean + 0.1 * (step[name] - mean)
        np.testing.assert_allclose(exported[name], mean, rtol=1e-6, atol=1e-8, err_msg=name)
        assert np.abs(exported[name] - steps[-1][name]).max() > 1e-5, f"{name}: the mean is not the last weight"
    assert losses(folder / "ema", "train") == losses(folder / "plain", "train")


def test_the_z_loss_is_in_the_training_loss_alone(examples):
    folder, _ = examples["single"]
    before = {"z_loss": losses(folder / "z_loss", "eval")[0], "plain": losses(folder / "plain", "eval")[0]}
    assert before["z_loss"] == before["plain"]
    first = losses(folder / "z_loss", "train")[0] - losses(folder / "plain", "train")[0]
    # Near uniform logits, whose normalizer is about the vocabulary's size.
    assert first == pytest.approx(1e-4 * np.log(256) ** 2, rel=0.1)


def test_a_metric_of_rows_sees_their_columns_in_order(examples):
    for folder, _ in examples.values():
        lines = [line for line in load_json_lines(folder / "topics" / "metrics.jsonl") if line["kind"] == "eval"]
        assert all({"right/topic 0", "right/topic 1"} <= line.keys() for line in lines)


def test_a_built_model_trains_resumes_and_is_exported_with_its_own_parameter(examples, bench):
    for folder, of_rank in examples.values():
        result = of_rank["results"]["built"]
        lines = load_json_lines(folder / "built" / "metrics.jsonl")
        assert result.step == NUM_STEPS + 1 and [line["step"] for line in lines if line["kind"] == "resume"] == [NUM_STEPS]
        exported, base = weights_of(result.export), weights_of(bench.models["llama"])
        assert np.abs(exported["factor"] - 1).max() > 1e-4
        assert exported.keys() == base.keys() | {"factor"}
        # Built from another seed, not read from model.name_or_path.
        name = "model.embed_tokens.weight"
        assert np.linalg.norm(exported[name] - base[name]) > 0.5 * np.linalg.norm(base[name])
        assert of_rank["results"]["refusal"].startswith("model is None, but ")
