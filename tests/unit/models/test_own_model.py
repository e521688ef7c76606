"""A class or a built model that Python code gives to a run: what is refused, and the folder that stands for a built one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_folders import FAMILIES, build_model_folders
from tests.support.own_models import own_class as make_class
from toolkit import UserError
from toolkit.config.schema import ModelConfig
from toolkit.models.load import grow_vocabulary, own_class, save_built
from toolkit.tasks import causal, seq2seq


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_model_folders(tmp_path_factory.mktemp("models"), ["t5"])["t5"])


def build(seed: int = 0) -> Any:
    import transformers

    torch.manual_seed(seed)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=256, **FAMILIES["t5"][1]))


def test_a_class_is_loaded_for_its_kind_of_config_until_the_run_ends(folder: str) -> None:
    import transformers

    own, auto = make_class("t5"), transformers.AutoModelForSeq2SeqLM
    with own_class(own, ModelConfig(name_or_path=folder), seq2seq.TASK):
        assert type(auto.from_pretrained(folder)) is own
    with pytest.raises(ZeroDivisionError), own_class(own, ModelConfig(name_or_path=folder), seq2seq.TASK):
        raise ZeroDivisionError
    assert type(auto.from_pretrained(folder)) is transformers.T5ForConditionalGeneration


def test_what_fits_neither_the_task_nor_the_config_is_refused(folder: str) -> None:
    import transformers

    mistakes: list[tuple[Any, dict[str, Any], Any, str]] = [
        (folder, {}, seq2seq.TASK, "model is a str, not an encoder-decoder that generates text: take one such as T5"),
        (torch.nn.Linear(2, 2), {}, seq2seq.TASK, "model is a Linear, not an encoder-decoder"),
        (transformers.T5EncoderModel, {}, seq2seq.TASK, "model is a T5EncoderModel, not an encoder-decoder"),
        (transformers.LlamaForCausalLM, {}, seq2seq.TASK, "model is a LlamaForCausalLM, not an encoder-decoder"),
        (build(), {}, causal.TASK, "model is a T5ForConditionalGeneration, not a causal language model"),
        (transformers.BartForConditionalGeneration, {}, seq2seq.TASK,
         rf"model is a BartForConditionalGeneration, for bart models, but model.name_or_path {folder} is a t5 model: "),
        (build(), {"from_scratch": True}, seq2seq.TASK, "model is built, and model.from_scratch asks for other weights: "),
        (build(), {"init_from": "runs/first"}, seq2seq.TASK, "model is built, and model.init_from asks for other weights: "),
        *((given, {"train_tokenizer": True, **more}, seq2seq.TASK, "model.train_tokenizer is true, which is for a model built ")
          for given, more in ((None, {}), (transformers.T5ForConditionalGeneration, {}), (build(), {"tokenizer": "other"}),
                              (None, {"from_scratch": True, "init_from": "runs/first"}))),
    ]  # fmt: skip
    for given, changes, task, sentence in mistakes:
        config = ModelConfig(name_or_path=folder, **changes)
        with pytest.raises(UserError, match=f"^{sentence}"), own_class(given, config, task):
            pass


def test_a_built_model_becomes_a_folder_named_by_its_contents(folder: str, tmp_path: Path) -> None:
    import transformers

    config = ModelConfig(name_or_path=folder, revision="main")
    saved = save_built(build(), config, tmp_path)
    assert saved.revision is None and Path(saved.name_or_path).parent == tmp_path / "models"
    loaded: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(saved.name_or_path)
    expected = build().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, saved.name_or_path))
    assert ours("alpha beta").input_ids == theirs("alpha beta").input_ids
    assert save_built(build(), config, tmp_path) == saved
    assert save_built(build(seed=1), config, tmp_path) != saved


def test_modules_that_a_folder_would_not_bring_back_are_refused(folder: str, tmp_path: Path) -> None:
    model = build()
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())
    with pytest.raises(UserError, match="^model has modules that T5ForConditionalGeneration does not build from its config: "):
        save_built(model, ModelConfig(name_or_path=folder), tmp_path)


def test_a_built_model_follows_the_tokenizer_of_the_folder(folder: str, tmp_path: Path) -> None:
    import transformers

    base = Path(shutil.copytree(folder, tmp_path / "base"))
    config = ModelConfig(name_or_path=str(base))
    first = save_built(build(), config, tmp_path)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(base)
    second = save_built(build(), config, tmp_path)
    assert second != first
    assert transformers.AutoTokenizer.from_pretrained(second.name_or_path).chat_template == "{{ messages }}"
    (base / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"^the tokenizer of {base} could not be read "):
        save_built(build(), config, tmp_path)


def test_a_built_model_without_a_tokenizer_gets_one_only_if_asked(folder: str, tmp_path: Path) -> None:
    base = Path(shutil.copytree(folder, tmp_path / "base"))
    for file in base.glob("tokenizer*"):
        file.unlink()
    asked = ModelConfig(name_or_path=str(base), train_tokenizer=True)
    with own_class(build(), asked, seq2seq.TASK):
        saved = save_built(build(), asked, tmp_path)
    assert saved.train_tokenizer and not list(Path(saved.name_or_path).glob("tokenizer*"))
    with pytest.raises(UserError, match=r"could not be read \(T5Tokenizer finds no vocabulary\); its files are config.json, "):
        save_built(build(), ModelConfig(name_or_path=str(base)), tmp_path)
    named = save_built(build(), ModelConfig(name_or_path=str(base), tokenizer=folder), tmp_path)
    assert named.tokenizer is None and (Path(named.name_or_path) / "tokenizer.json").is_file()


def test_a_model_with_a_scalar_parameter_grows(folder: str) -> None:
    model = build().to("meta")
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    grown = grow_vocabulary(model, ModelConfig(name_or_path=folder, add_tokens=[f"<|{n}|>" for n in range(256)]))
    assert "shared.weight" in grown and "scale" not in grown


def test_parameters_that_a_run_would_not_find_frozen_are_refused(folder: str, tmp_path: Path) -> None:
    model = build()
    model.shared.weight.requires_grad_(False)
    with pytest.raises(UserError, match="^model has frozen shared.weight, which a run does not see: name what is frozen in "):
        save_built(model, ModelConfig(name_or_path=folder), tmp_path)
