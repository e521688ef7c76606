"""What an export keeps of a run so that others can use the model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, GPT2Config, T5Config

from tests.support.model_folders import _build_tokenizer
from tests.support.refusals import refusal
from toolkit.config.python import load_config
from toolkit.errors import UserError
from toolkit.export.run_data import RunData, load_run_data, save_run_data
from toolkit.export.usage import load_usage, save_usage, set_generation
from toolkit.models.generation import list_end_ids

REQUIRED = {"model.name_or_path": "m", "data.source": "x", "train.max_steps": 1}


@pytest.mark.parametrize(("own", "ends"), [(2, [2, 5]), ([2, 3], [2, 3, 5]), (None, 5)])
def test_an_evaluation_and_an_export_end_texts_at_tokens_of_model_and_rows(tmp_path: Path, own: Any, ends: Any) -> None:
    model: Any = SimpleNamespace(config=GPT2Config(), generation_config=GenerationConfig(eos_token_id=own))
    data: Any = SimpleNamespace(stop_token_ids=(5,))
    assert list_end_ids(model, data.stop_token_ids) == (ends if isinstance(ends, list) else [ends])
    set_generation(model, load_config("llm", overrides=REQUIRED), (5,), 0)
    model.generation_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert (saved["eos_token_id"], saved["pad_token_id"]) == (ends, 0)


def test_pipelines_of_transformers_4_get_the_runs_settings_in_place_of_the_bases() -> None:
    base = {"summarization": {"prefix": "summarize: ", "min_length": 30}, "translation_en_to_fr": {"num_beams": 4}}
    config = load_config("t5", overrides=REQUIRED | {"eval.num_beams": 2, "data.prefix": "sum: "})
    t5 = SimpleNamespace(config=T5Config(task_specific_params=base), generation_config=GenerationConfig())
    set_generation(t5, config, (), 0)
    found = t5.config.to_diff_dict()["task_specific_params"]
    assert found["summarization"] == {"prefix": "sum: ", "max_new_tokens": 64, "num_beams": 2} == found["translation"]
    assert "translation_en_to_fr" not in found
    sampled = GPT2Config(task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}})
    gpt2 = SimpleNamespace(config=sampled, generation_config=GenerationConfig())
    set_generation(gpt2, load_config("llm", overrides=REQUIRED), (), 0)
    assert "task_specific_params" not in gpt2.config.to_diff_dict()


def test_what_makes_tokens_of_texts_comes_back(tmp_path: Path) -> None:
    assert load_usage(tmp_path) is None
    of_t5 = {"eval.batch_size_rows": 3, "data.prefix": "sum: ", "data.source_column": "body"}
    save_usage(load_config("t5", overrides=REQUIRED | of_t5), tmp_path, dtype="bfloat16")
    usage = load_usage(tmp_path)
    assert usage is not None and (usage.prefix, usage.source_column, usage.max_source_length_tokens) == ("sum: ", "body", 512)
    assert (usage.batch_size_rows, usage.dtype) == (3, "bfloat16")
    save_usage(load_config("llm", overrides=REQUIRED), tmp_path, step=7)
    usage = load_usage(tmp_path)
    assert usage is not None and (usage.prefix, usage.max_source_length_tokens, usage.step) == ("", None, 7)
    (tmp_path / "toolkit.json").write_text('{"prefixes": 1}')
    assert "toolkit.json is not what an export writes" in refusal(load_usage, tmp_path)


FACTS: dict[str, Any] = {"num_training_rows": 1, "num_held_out_rows": 1, "num_evaluated_rows": 1}
DATA = RunData(fingerprint="f", stop_token_ids=[], check_rows=[], **FACTS)
TOKENIZER = _build_tokenizer(("<pad>", "</s>"))
AGAIN = "start the run once more, which writes them again"


def flip_digit(path: Path) -> None:
    text = path.read_text()
    digit = re.search(r"\d", text)
    assert digit is not None
    path.write_text(f"{text[: digit.start()]}{(int(digit[0]) + 1) % 10}{text[digit.end() :]}")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a digit of the tokenizer": lambda run: flip_digit(run / "tokenizer" / "tokenizer.json"),
    "a short tokenizer": lambda run: os.truncate(run / "tokenizer" / "tokenizer.json", 100),
    "no tokenizer": lambda run: shutil.rmtree(run / "tokenizer"),
    "a lost file": lambda run: (run / "tokenizer" / "tokenizer_config.json").unlink(),
    "one file more": lambda run: (run / "tokenizer" / "added_tokens.json").write_text("{}"),
    "no list": lambda run: (run / "data.json").write_text("7"),
    "other rows": lambda run: save_run_data(run, dataclasses.replace(DATA, fingerprint="other"), TOKENIZER),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_a_run_kept_is_not_used_when_damaged_and_its_command_repairs_it(name: str, tmp_path: Path) -> None:
    save_run_data(tmp_path, DATA, TOKENIZER)
    assert dataclasses.replace(load_run_data(tmp_path, "f")[0], tokenizer_files={}) == DATA
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    DAMAGES[name](tmp_path)
    why = "they are of other rows" if name == "other rows" else ".+"
    with pytest.raises(UserError, match=rf"^data\.json and tokenizer/ of {tmp_path} cannot be used \({why}\): {AGAIN}$"):
        load_run_data(tmp_path, "f")
    save_run_data(tmp_path, DATA, TOKENIZER)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
