"""The commands after an export fit the model: what a tool does not take is not printed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig

from toolkit.config.python import load_config
from toolkit.export.next_commands import list_commands
from toolkit.export.write import Places


def commands(recipe: Any, places: Places, lora: LoraConfig | None = None, run_name: str = "my_run", **model: Any) -> list[str]:
    required = {"model.name_or_path": "org/base", "data.source": "x", "train.max_steps": 1, "run.name": run_name}
    config = load_config(recipe, overrides=required | {f"model.{name}": value for name, value in model.items()})
    return list_commands(config, SimpleNamespace(peft_config={"default": lora}), places)  # type: ignore[arg-type]


def test_a_model_is_served_but_not_an_encoder_decoder() -> None:
    places = Places(model=Path("my runs/export"))
    t5 = [
        "use it: python -m toolkit generate 'my runs/export' --file FILE.csv --output OUT.jsonl",
        "score it: lm_eval --model hf --model_args pretrained='my runs/export' --tasks TASK",
        "share it: hf upload USER/NAME 'my runs/export'",
    ]
    assert commands("t5", places) == t5
    assert commands("llm", places) == [t5[0], "serve it: vllm serve 'my runs/export'", *t5[1:]]
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


@pytest.mark.parametrize("lora", [LoraConfig(use_dora=True), LoraConfig(modules_to_save=["lm_head"]), LoraConfig(r=1024)])
def test_an_adapter_that_vllm_refuses_has_no_line(lora: LoraConfig) -> None:
    assert not any("vllm" in line for line in commands("llm", Places(adapter=Path("export")), lora))
