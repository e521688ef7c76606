"""What an export keeps of a run so that others can use the model; of `trainer_state.json`, what transformers reads of it."""

import dataclasses
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from peft import LoraConfig
from transformers import GenerationConfig, GPT2Config, T5Config, TrainerState
from transformers.modelcard import parse_log_history

from tests.support.model_folders import _build_tokenizer
from tests.support.refusals import refusal
from toolkit.config.python import load_config
from toolkit.errors import UserError
from toolkit.export.card import Origin
from toolkit.export.paths import ExportPaths
from toolkit.export.run_data import RunData, load_run_data, save_run_data, save_trainer_state
from toolkit.export.usage import list_commands, load_usage, save_usage, set_generation, write_python
from toolkit.models.generation import list_end_ids
from toolkit.objectives import built_in
from toolkit.objectives.causal import Causal
from toolkit.objectives.seq2seq import Seq2Seq

REQUIRED = {"model.name_or_path": "m", "data.source": "x", "train.max_steps": 1}


@pytest.mark.parametrize(("own", "ends"), [(2, [2, 5]), ([2, 3], [2, 3, 5]), (None, 5)])
def test_an_evaluation_and_an_export_end_texts_at_tokens_of_model_and_rows(tmp_path, own, ends):
    model = SimpleNamespace(config=GPT2Config(), generation_config=GenerationConfig(eos_token_id=own))
    data = SimpleNamespace(stop_token_ids=(5,))
    assert list_end_ids(model, data.stop_token_ids) == (ends if isinstance(ends, list) else [ends])
    set_generation(model, (5,), 0)
    model.generation_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert (saved["eos_token_id"], saved["pad_token_id"]) == (ends, 0)


def test_pipelines_of_transformers_4_get_the_runs_settings_in_place_of_the_bases():
    base = {"summarization": {"prefix": "summarize: ", "min_length": 30}, "translation_en_to_fr": {"num_beams": 4}}
    config = load_config("t5", overrides=REQUIRED | {"eval.num_beams": 2, "data.prefix": "sum: "})
    t5 = SimpleNamespace(config=T5Config(task_specific_params=base), generation_config=GenerationConfig())
    set_generation(t5, (), 0, Seq2Seq().task_params(config))
    found = t5.config.to_diff_dict()["task_specific_params"]
    assert found["summarization"] == {"prefix": "sum: ", "max_new_tokens": 64, "num_beams": 2} == found["translation"]
    assert "translation_en_to_fr" not in found
    sampled = GPT2Config(task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}})
    gpt2 = SimpleNamespace(config=sampled, generation_config=GenerationConfig())
    set_generation(gpt2, (), 0, Causal().task_params(load_config("llm", overrides=REQUIRED)))
    assert "task_specific_params" not in gpt2.config.to_diff_dict()


def test_what_makes_tokens_of_texts_comes_back(tmp_path):
    assert load_usage(tmp_path) is None
    of_t5 = {"eval.batch_size_rows": 3, "data.prefix": "sum: ", "data.source_column": "body"}
    save_usage(load_config("t5", overrides=REQUIRED | of_t5), tmp_path, dtype="bfloat16")
    usage = load_usage(tmp_path)
    assert (usage.prefix, usage.source_column, usage.max_source_length_tokens) == ("sum: ", "body", 512)
    assert (usage.batch_size_rows, usage.dtype) == (3, "bfloat16")
    save_usage(load_config("llm", overrides=REQUIRED), tmp_path, step=7)
    usage = load_usage(tmp_path)
    assert (usage.prefix, usage.max_source_length_tokens, usage.step) == ("", None, 7)
    (tmp_path / "toolkit.json").write_text('{"prefixes": 1}')
    assert "toolkit.json is not what an export writes" in refusal(load_usage, tmp_path)


FACTS = {"num_training_rows": 1, "num_held_out_rows": 1, "num_evaluated_rows": 1}
DATA = RunData(fingerprint="f", stop_token_ids=[], check_rows=[], **FACTS)
TOKENIZER = _build_tokenizer(("<pad>", "</s>"))
AGAIN = "start the run once more, which writes them again"


def flip_digit(path: Path) -> None:
    text = path.read_text()
    digit = re.search(r"\d", text)
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
def test_what_a_run_kept_is_not_used_when_damaged_and_its_command_repairs_it(name, tmp_path):
    save_run_data(tmp_path, DATA, TOKENIZER)
    with mock.patch.object(os, "fsync", side_effect=OSError(errno.EINVAL, "Invalid argument")):  # as where all is read-only
        assert dataclasses.replace(load_run_data(tmp_path, "f")[0], tokenizer_files={}) == DATA
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    DAMAGES[name](tmp_path)
    why = "they are of other rows" if name == "other rows" else ".+"
    with pytest.raises(UserError, match=rf"^data\.json and tokenizer/ of {tmp_path} cannot be used \({why}\): {AGAIN}$"):
        load_run_data(tmp_path, "f")
    save_run_data(tmp_path, DATA, TOKENIZER)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


PAIRS = dataclasses.replace(DATA, has_chats=False)


def commands(
    recipe, places: ExportPaths, lora: LoraConfig | None = None, run_name: str = "my_run", model_type: str = "t5",
    chat_template: str | None = None, takes_images: bool = False, **model,
) -> list[str]:  # fmt: skip
    """The lines but those of Python, which must be where they belong."""
    given = {"model.name_or_path": "org/base", "run.name": run_name, **{f"model.{name}": value for name, value in model.items()}}
    config = load_config(recipe, overrides=REQUIRED | given)
    objective = built_in(config.data.objective)
    model_config = SimpleNamespace(is_encoder_decoder=recipe == "t5", model_type=model_type)
    modalities = ("image", "text") if takes_images else "text"
    skeleton = SimpleNamespace(peft_config={"default": lora}, config=model_config, input_modalities=modalities)
    tokenizer, origin = _build_tokenizer(("<pad>", "</s>")), Origin(data=PAIRS)
    tokenizer.chat_template = chat_template
    use, in_python, *lines = list_commands(objective, config, skeleton, tokenizer, origin, places)
    folder = str(places.model or places.adapter)
    python = write_python(objective, config, model_config, tokenizer, folder, origin, is_adapter=places.model is None)
    assert in_python == "use it in Python:" and "\n".join(lines).startswith(f"{python}\n")
    return [use, *lines[python.count("\n") + 1 :]]


def test_each_kind_of_model_has_the_tools_that_take_it(tmp_path):
    places = ExportPaths(model=Path("my runs/export"))
    use = "use it: python -m toolkit generate 'my runs/export' --file FILE.csv --output OUT.jsonl"
    convert = "convert it: ct2-transformers-converter --model 'my runs/export' --output_dir 'my runs/export-ct2'"
    score = "score it: lm_eval --model hf --model_args pretrained='my runs/export' --tasks TASK"
    share = "share it: hf upload USER/NAME 'my runs/export'"
    assert commands("t5", places) == [use, convert, share]
    assert commands("t5", places, model_type="bart") == [use, share]
    assert commands("t5", ExportPaths(adapter=Path("my runs/export")), LoraConfig()) == [use, share]
    assert commands("llm", places) == [use, "serve it: vllm serve 'my runs/export'", score, share]
    assert commands("llm", places, chat_template="{{ messages }}")[0] == f"{use} --plain", "its rows are not chats"
    with_images = ExportPaths(model=tmp_path)
    assert not any("vllm" in line for line in commands("llm", with_images, takes_images=True))
    (tmp_path / "processor_config.json").touch()
    assert f"serve it: vllm serve {tmp_path}" in commands("llm", with_images, takes_images=True)
    both = ExportPaths(adapter=Path("runs/a/export"), model=Path("runs/a/merged"))
    assert "serve it: vllm serve runs/a/merged" in commands("llm", both, LoraConfig(r=4))


def test_an_adapter_is_given_on_its_base():
    places = ExportPaths(adapter=Path("runs/a/export"))
    lora = commands("llm", places, LoraConfig(r=16), revision="v1")
    assert lora[1:3] == [
        "serve it: vllm serve org/base --revision v1 --tokenizer runs/a/export --enable-lora --lora-modules my_run=runs/a/export",
        "score it: lm_eval --model hf --model_args "
        "pretrained=org/base,peft=runs/a/export,tokenizer=runs/a/export,revision=v1 --tasks TASK",
    ]
    assert lora[3] == "share it: hf upload USER/NAME runs/a/export"
    assert " --lora-modules 'a run'=runs/a/export" in commands("llm", places, LoraConfig(r=16), "a run")[1]
    [*_, share] = commands("llm", places, LoraConfig(r=16), name_or_path="./base")
    assert share == "share it: export it with --merge first, as its base ./base is a folder here"
    assert commands("llm", places, LoraConfig(r=8, rank_pattern={"q_proj": 33}))[1].endswith(" --max-lora-rank 64")
    settings = [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"r": 1024}]
    for refused in (*settings, {"trainable_token_indices": {"embed_tokens": [7]}}):
        assert not any("vllm" in line for line in commands("llm", places, LoraConfig(**refused))), refused


def train(step: int, loss: float | None, **figures) -> dict:
    line = {"kind": "train", "step": step, "epoch": 0, "loss": loss, "learning_rate": 0.1 / step, "grad_norm": 4.0, "num_rows": 5}
    return line | {"num_tokens": 100, "step_time_s": 0.5} | figures


LINES = [
    {"kind": "eval", "step": 0, "loss": 3.0, "rouge_tokenizer": "words", "rows_per_s": 9.0, "num_rows": 3},
    train(1, 2.5),
    {"kind": "checkpoint", "step": 1, "num_bytes": 7},
    train(2, None, loss_is="nan", num_rows=3, num_input_tokens_seen=160),
    {"kind": "eval", "step": 2, "loss": 2.0, "rougeL": 50.0, "rows_per_s": 6.0, "num_rows": 3},
    train(3, 1.0),
]


def read_state(folder: Path, lines: list[dict], step: int, num_training_rows: int | None) -> TrainerState:
    save_trainer_state(folder, lines, step=step, num_training_rows=num_training_rows)
    return TrainerState.load_from_json(str(folder / "trainer_state.json"))


def test_transformers_and_its_model_card_read_the_figures_up_to_the_exported_step(tmp_path):
    state = read_state(tmp_path, LINES, 2, 10)
    assert (state.global_step, state.epoch, state.num_input_tokens_seen) == (2, 0.8, 160)
    first, second = {"epoch": 0.5, "num_input_tokens_seen": 100}, {"epoch": 0.8, "num_input_tokens_seen": 160}
    evaluated = {"eval_num_rows": 3, "eval_samples_per_second": 6.0, "eval_runtime": 0.5, "eval_loss": 2.0, "eval_rougeL": 50.0}
    assert state.log_history[1:4] == [
        {"loss": 2.5, "grad_norm": 4.0, "learning_rate": 0.1, "step": 1, **first},
        {"loss": None, "grad_norm": 4.0, "learning_rate": 0.05, "step": 2, **second},
        {**evaluated, "step": 2, **second},
    ]
    assert state.log_history[0]["epoch"] == 0 and len(state.log_history) == 5
    summary, lines, figures = parse_log_history(state.log_history)
    assert summary["train_runtime"] == 1.0 and summary["train_loss"] == 2.5 and summary["train_samples_per_second"] == 8
    assert [(line["Step"], line["Epoch"], line["Validation Loss"]) for line in lines] == [(0, 0, 3.0), (2, 0.8, 2.0)]
    assert lines[0]["Training Loss"] == "No log" and figures["Rougel"] == 50.0


@pytest.mark.parametrize(
    ("lines", "num_rows", "epoch", "num_tokens"),
    [
        ([train(1, 2.0), train(2, 1.0, epoch=1)], None, 1, 200),  # of an older version, which kept no facts of its rows
        ([train(21, 2.0, epoch=2), train(22, 1.0, epoch=2)], 10, 2, 200),  # the first lines are lost
    ],
)
def test_where_rows_cannot_be_counted_an_epoch_is_that_of_the_line(tmp_path, lines, num_rows, epoch, num_tokens):
    state = read_state(tmp_path, lines, 22, num_rows)
    assert (state.epoch, state.num_input_tokens_seen) == (epoch, num_tokens)
