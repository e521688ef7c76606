"""The commands after an export fit the model: what a tool does not take, and what does not fit the task, is not printed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peft import LoraConfig

from tests.support.model_folders import _build_tokenizer
from toolkit.config.python import load_config
from toolkit.export.card import Origin
from toolkit.export.places import Places
from toolkit.export.run_data import RunData
from toolkit.export.usage import list_commands, write_python

FACTS: dict[str, Any] = {"num_training_rows": 1, "num_held_out_rows": 0, "num_evaluated_rows": 0}
PAIRS = RunData(fingerprint="f", stop_token_ids=[], check_rows=[], has_chats=False, **FACTS)


def commands(
    recipe: Any,
    places: Places,
    lora: LoraConfig | None = None,
    run_name: str = "my_run",
    model_type: str = "t5",
    chat_template: str | None = None,
    takes_images: bool = False,
    **model: Any,
) -> list[str]:
    """The lines but those of Python, which must be where they belong."""
    required = {"model.name_or_path": "org/base", "data.source": "x", "train.max_steps": 1, "run.name": run_name}
    config = load_config(recipe, overrides=required | {f"model.{name}": value for name, value in model.items()})
    model_config = SimpleNamespace(is_encoder_decoder=recipe == "t5", model_type=model_type)
    model_config.get_text_config = lambda: None if takes_images else model_config
    skeleton: Any = SimpleNamespace(peft_config={"default": lora}, config=model_config, get_decoder=lambda: 1)
    skeleton.named_modules = lambda: [("model.language_model", 1)]
    tokenizer, origin = _build_tokenizer(("<pad>", "</s>")), Origin(data=PAIRS)
    tokenizer.chat_template = chat_template
    use, in_python, *lines = list_commands(config, skeleton, tokenizer, origin, places)
    folder = str(places.model or places.adapter)
    python = write_python(config, tokenizer, folder, "float32", PAIRS, is_adapter=places.model is None)
    assert in_python == "use it in Python:" and "\n".join(lines).startswith(f"{python}\n")
    return [use, *lines[python.count("\n") + 1 :]]


def test_each_kind_of_model_has_the_tools_that_take_it(tmp_path: Path) -> None:
    places = Places(model=Path("my runs/export"))
    use = "use it: python -m toolkit generate 'my runs/export' --file FILE.csv --output OUT.jsonl"
    convert = "convert it: ct2-transformers-converter --model 'my runs/export' --output_dir 'my runs/export-ct2'"
    score = "score it: lm_eval --model hf --model_args pretrained='my runs/export' --tasks TASK"
    share = "share it: hf upload USER/NAME 'my runs/export'"
    assert commands("t5", places) == [use, convert, share]
    assert commands("t5", places, model_type="bart") == [use, share]
    assert commands("t5", Places(adapter=Path("my runs/export")), LoraConfig()) == [use, share]
    assert commands("llm", places) == [use, "serve it: vllm serve 'my runs/export'", score, share]
    assert commands("llm", places, chat_template="{{ messages }}")[0] == f"{use} --plain", "its rows are not chats"
    with_images = Places(model=tmp_path)
    assert not any("vllm" in line for line in commands("llm", with_images, takes_images=True))
    (tmp_path / "processor_config.json").touch()
    assert f"serve it: vllm serve {tmp_path}" in commands("llm", with_images, takes_images=True)
    both = Places(adapter=Path("runs/a/export"), model=Path("runs/a/merged"))
    assert "serve it: vllm serve runs/a/merged" in commands("llm", both, LoraConfig(r=4))


def test_an_adapter_is_given_on_its_base() -> None:
    places = Places(adapter=Path("runs/a/export"))
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
    settings: list[Any] = [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"r": 1024}]
    for refused in (*settings, {"trainable_token_indices": {"embed_tokens": [7]}}):
        assert not any("vllm" in line for line in commands("llm", places, LoraConfig(**refused))), refused
