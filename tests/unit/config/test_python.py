"""A config read from Python: the same keys, values and sentences as on a command line."""

import pytest

from tests.support.refusals import refusal
from toolkit import load_config
from toolkit.config.load import load_config as load_from_arguments
from toolkit.config.schema import LLMConfig, SummarizationConfig

NEEDED = {"model.name_or_path": "model", "train.max_steps": 2}


def test_values_of_python_are_those_of_flags(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {name_or_path: a}\ntrain: {max_steps: 3}\ndata: {source: csv, files: [x]}\n")
    overrides = {
        "optim.lr": 1e-7, "data.files": ["a.csv", tmp_path / "b.csv"], "eval.generate": False, "optim.max_grad_norm": None,
        "run.name": "7", "run.output_dir": tmp_path, "data.mix": [],
    }  # fmt: skip
    flags = [
        "--optim.lr=1e-7", "--data.files=a.csv", f"--data.files={tmp_path / 'b.csv'}", "--eval.generate=false",
        "--optim.max_grad_norm=null", "--run.name=7", f"--run.output_dir={tmp_path}",
    ]  # fmt: skip
    config = load_config("llm", tmp_path / "run.yaml", overrides)
    assert config == load_from_arguments(LLMConfig, ["--config", str(tmp_path / "run.yaml"), *flags])
    assert config.run.name == "7" and config.optim.max_grad_norm is None


def test_the_rows_may_come_later_but_only_in_python():
    assert not load_config("t5", overrides=NEEDED).data.source and not load_config("llm", overrides=NEEDED).data.source
    flags = [f"--{key}={value}" for key, value in NEEDED.items()]
    for config_class, sentence in (
        (SummarizationConfig, "give data.files or data.source: none is given"),
        (LLMConfig, "give data.files or data.source, or data.mix for several sources: none is given"),
    ):
        assert refusal(load_from_arguments, config_class, flags) == sentence


@pytest.mark.parametrize(
    ("recipe", "overrides", "sentence"),
    [
        ("t5", {"optim.lrr": 1}, "unknown flag --optim.lrr: did you mean --optim.lr?"),
        ("llm", {"data.source": "csv"}, "data.source csv needs data.files"),
        ("bert", {}, "recipe is 'bert': choose one of t5, llm, dpo, dpo_t5"),
    ],
)
def test_mistakes_have_the_same_sentences(recipe, overrides, sentence):
    assert refusal(load_config, recipe, overrides=NEEDED | overrides).startswith(sentence)
