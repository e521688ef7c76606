"""What differs between objectives stands in `toolkit/objectives/`, so that another one is one file."""

import re
from pathlib import Path

import pytest
import transformers

import toolkit
from tests.families.kinds import tiny_config
from tests.support.refusals import refusal
from toolkit.config.python import load_config
from toolkit.config.schema import ModelConfig
from toolkit.objectives import name_objective, objective_of
from toolkit.objectives.objective import Objective

PACKAGE = Path(toolkit.__file__).parent
REQUIRED = {"model.name_or_path": "m", "data.source": "x", "train.max_steps": 1}
QUESTION = re.compile(
    r"isinstance\([^\n]*\b(LLMConfig|SummarizationConfig|LLMDataConfig|DataConfig|SummarizationCollator|CausalCollator)\b"
    r"|auto_class ==|\bobjective(\.name)? (is|==|in) |\"decoder_input_ids\" in|^from [^\n]*\b(LLMConfig|SummarizationConfig)\b",
    re.MULTILINE,
)
ASKING = ["config/python.py"]
"""Files that ask which objective it is: the recipes by name."""


def test_no_code_asks_which_objective_it_has():
    core = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if not {"tools", "objectives"} & {*path.parts}]
    assert len(core) > 100
    assert [str(path) for path in core if QUESTION.search((PACKAGE / path).read_text(encoding="utf-8"))] == ASKING


@pytest.mark.parametrize("recipe", ["t5", "llm", "dpo", "dpo_t5"])
def test_a_config_names_its_objective_and_has_the_fields_that_limit_its_sides(recipe):
    config = load_config(recipe, overrides=REQUIRED)
    objective = objective_of(config)
    assert objective.name == config.data.objective == name_objective(config, None)[0].objective
    assert all(getattr(config.data, limit) > 0 for limit in objective.limits.values())
    assert len(objective.lengths(5, 2)) == len(objective.limits) == len(objective.inputs)
    assert sum(objective.lengths(5, 2)) == 5


def test_an_objective_of_a_users_own_is_never_found_by_its_name():
    class Own(Objective):
        name, auto_class, takes = "os", "AutoModel", "a model"

    config, _ = name_objective(load_config("llm", overrides=REQUIRED), Own())
    expected = "objective is os, which Python code has given to finetune(): call that again; no command can find it"
    assert refusal(objective_of, config) == expected
    Own.name = "causal"
    assert refusal(name_objective, config, Own()).startswith("objective is Own, with the name causal of a built-in one")
    Own.name, Own.auto_class = "os", "AutoModelForLetters"
    sentence = "auto_class of objective os is AutoModelForLetters, which transformers does not have"
    assert refusal(name_objective, config, Own()) == sentence
    sentence = "objective os limits its rows by data.max_length_tokens, and a SummarizationConfig has none: load the config as"
    Own.auto_class = "AutoModel"
    assert refusal(name_objective, load_config("t5", overrides=REQUIRED), Own()).startswith(sentence)
    for given, shown in ((Own, "<class "), ("os", "'os'"), (Objective(), "Objective: give an object of a class that inherits")):
        assert refusal(name_objective, config, given).startswith(f"objective is {shown}")


@pytest.mark.parametrize(
    ("kind", "named", "auto_class"),
    [
        ("llama", "LlamaForCausalLM", "AutoModelForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration", "AutoModelForCausalLM"),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "AutoModelForImageTextToText"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("qwen3_5", None, "AutoModelForImageTextToText"),
        ("qwen3_5", "Qwen3_5ForCausalLM", "AutoModelForCausalLM"),
        ("llama4", "Llama4ForConditionalGeneration", "AutoModelForImageTextToText"),
    ],
)
def test_a_model_of_images_and_texts_is_loaded_whole(kind, named, auto_class):
    """As `architectures` says, where both of its classes take the config. Both classes are Gemma 3's own."""
    config_class = transformers.CONFIG_MAPPING[kind]
    objective = objective_of(load_config("llm", overrides=REQUIRED))
    assert objective.loader(config_class(architectures=[named] if named else None)).__name__ == auto_class
    if named and auto_class.endswith("ToText"):
        assert objective.loader(config_class).__name__ == auto_class, "a user's class has a class of configs alone"


def test_a_model_whose_tokens_see_later_ones_is_refused_by_its_config():
    objective = objective_of(load_config("llm", overrides=REQUIRED))
    said = refusal(objective.check_model_config, tiny_config("paligemma"), ModelConfig(name_or_path="m"))
    what = (
        "model.name_or_path m is a paligemma model with use_bidirectional_attention in its config.json: its tokens see later ones"
    )
    assert said.startswith(f"{what}, so it is not a causal language model")
    for kind in ("gemma3", "gemma4", "llama"):
        objective.check_model_config(tiny_config(kind), ModelConfig(name_or_path="m"))
