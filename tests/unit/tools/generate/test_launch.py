"""How `generate` takes the launch: its devices are those that the accelerate YAML names. And what it says of models that it
cannot load."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from peft import LoraConfig

from tests.support.launch import REPOSITORY, run_on_ranks
from tests.support.model_folders import _build_tokenizer
from toolkit.errors import UserError
from toolkit.launch.environment import read_launch
from toolkit.tools.generate import generate as command
from toolkit.tools.generate import model
from toolkit.tools.generate.model import _choose_device, load_generator, open_model
from toolkit.training.run import release


@pytest.mark.parametrize(("preset", "expected"), [("ddp_cpu", "cpu"), ("ddp", "cuda:1"), (None, None)])
def test_several_processes_of_a_cpu_preset_leave_gpus_alone_and_those_of_torchrun_are_connected_too(
    monkeypatch: pytest.MonkeyPatch, preset: str | None, expected: str | None
) -> None:
    """The launcher passes use_cpu to a single process only (accelerate/utils/launch.py:133, and nothing of it below). Each alone,
    processes of torchrun would all write every text into the output."""
    path = REPOSITORY / "accelerate_configs" / f"{preset}.yaml"
    launched = (
        {"ACCELERATE_MIXED_PRECISION": "no", "TOOLKIT_ACCELERATE_YAML": str(path)} if preset else {"WORLD_SIZE": "2", "RANK": "1"}
    )
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "LOCAL_RANK": "1", **launched})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ends = Mock(side_effect=ConnectionAbortedError)
    monkeypatch.setattr(command, "build_accelerator", (lambda **_: read_launch()) if preset else ends)
    monkeypatch.setattr(command, "_generate", ends if preset else Mock())
    with pytest.raises(ConnectionAbortedError):
        command.generate(SimpleNamespace(model="m", output=None))  # type: ignore[arg-type]
    assert expected is None or str(_choose_device()) == expected


@pytest.mark.parametrize("base", ["runs/base/export", "../base/export"])
def test_an_adapter_whose_base_is_elsewhere_is_named(tmp_path: Path, base: str) -> None:
    """Its path counts from the directory of the run."""
    LoraConfig(base_model_name_or_path=base, task_type="CAUSAL_LM").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"the adapter {tmp_path} needs its base {base}, not found from here .*export"):
        open_model(str(tmp_path))


def save_llama(folder: Path) -> None:
    config = transformers.LlamaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    _build_tokenizer(("<pad>", "</s>")).save_pretrained(folder)


@pytest.mark.parametrize(("asked", "expected"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_a_model_computes_as_its_run_did(tmp_path: Path, asked: str | None, expected: torch.dtype) -> None:
    save_llama(tmp_path)
    (tmp_path / "toolkit.json").write_text('{"dtype": "bfloat16"}')
    assert {weight.dtype for weight in load_generator(open_model(str(tmp_path)), asked, {}).model.parameters()} == {expected}


def test_a_model_beyond_the_device_is_named_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
    monkeypatch.setattr(model, "allocate", Mock(side_effect=full))
    sentence = r"^the model does not fit cuda:0 \(CUDA out .* 2.00 GiB.\): try --dtype bfloat16"
    with pytest.raises(UserError, match=sentence) as raised:
        load_generator(open_model(str(tmp_path)), "float32", {})
    assert raised.value.printed_by == "run"


def test_several_processes_are_watched_and_started_alike() -> None:
    """A stopped rank was waited for without a word, and each rank took settings of its own."""
    plain = {"settings": {"num_beams": 3}, "dtype": None, "batch_size_rows": None, "output": Path("texts.jsonl")}
    others = [{"output": Path("elsewhere/texts.jsonl")}, {"settings": {"num_beams": 4}}, {"batch_size_rows": 2}, {"output": None}]
    ends = run_on_ranks(_start_generate, preset="ddp_cpu", args=([(plain, plain | other) for other in others],))
    assert ends[0] == ends[1] == [
        "watched", "settings of generate is {'num_beams': 4}", "batch_size_rows of generate is 2", "output of generate is False"
    ]  # fmt: skip


def _start_generate(cases: list[tuple[dict[str, Any], ...]]) -> list[str]:
    """How `generate` ends with each rank's options: watched, or with the start of its error."""
    from toolkit.distributed import watchdog

    ends: list[str] = []
    with patch.object(command, "_generate", lambda _: ends.append("watched" if watchdog._current else "not watched")):
        for options in cases:
            try:
                command.generate(SimpleNamespace(model="m", **options[int(os.environ["RANK"])]))  # type: ignore[arg-type]
            except UserError as error:
                ends.append(str(error).partition(" on rank 1 ")[0])
                release()
    return ends
