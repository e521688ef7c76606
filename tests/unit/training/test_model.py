"""The attention of a run that names none: the fastest on its device, and on a resume the one that it began with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BartConfig, PretrainedConfig, T5Config, UMT5Config

from tests.support.checkpoint_files import change_manifest, make_checkpoint
from toolkit.checkpoint.manifest import read_checkpoint
from toolkit.config.schema import ModelConfig
from toolkit.training import model
from toolkit.training.model import _note_needless_shards, _take_fastest_attention

FASTER, BEGAN = ", faster on a CPU than sdpa where positions are a bias", ", with which this run began"


def choose(
    model_config: PretrainedConfig, device: str = "cpu", named: str | None = None, resumed: Path | None = None
) -> tuple[str | None, str, str | None]:
    """(what the model gets, the words, what a checkpoint notes)."""
    config: Any = SimpleNamespace(model=ModelConfig(name_or_path="tiny", attn_implementation=named))
    resume_from = read_checkpoint(resumed) if resumed else None
    context: Any = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device(device)), settings={}, resume_from=resume_from)
    why = _take_fastest_attention(config, context, model_config)
    return model_config._attn_implementation, why, context.settings["attention"]


@pytest.mark.parametrize("config_class", [T5Config, UMT5Config])
def test_position_biases_take_eager_attention_on_a_cpu_unless_one_is_named(config_class: type[PretrainedConfig]) -> None:
    assert choose(config_class()) == ("eager", FASTER, "eager")
    assert choose(config_class(), "cuda") == choose(BartConfig()) == (None, "", None)
    assert choose(config_class(), named="sdpa") == (None, "", None), "the model is built with what the run names"
    assert choose(config_class(attn_implementation="sdpa")) == ("sdpa", "", "sdpa")


def test_a_run_goes_on_with_the_attention_that_it_began_with(tmp_path: Path) -> None:
    older = make_checkpoint(tmp_path, 1)
    assert choose(T5Config(), resumed=older) == (None, BEGAN, None), "a run from before the rule had sdpa"
    newer = make_checkpoint(tmp_path, 2)
    change_manifest(newer, lambda manifest: manifest["identity"]["config"].update(attention="eager"))
    assert choose(T5Config(), resumed=newer) == ("eager", FASTER, "eager")
    assert choose(T5Config(), "cuda", resumed=newer) == (None, "", None)


HOLDS = 4 * 16 * 80 * 2**20


@pytest.mark.parametrize(
    ("gpu_bytes", "version", "precision", "world_size", "preset"),
    [
        (HOLDS, 2, "bf16", 8, "ddp.yaml"),
        (HOLDS, 1, "bf16", 1, "single.yaml"),
        (HOLDS - 1, 2, "bf16", 8, ""),
        (HOLDS, None, "bf16", 8, ""),
        (HOLDS, 2, "fp8", 8, ""),
        (None, 2, "bf16", 8, ""),
    ],
)
def test_shards_that_one_gpu_does_not_need_are_a_line(
    gpu_bytes: int | None, version: int | None, precision: str, world_size: int, preset: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """8 frozen parameters of 2 bytes take as much as one trainable of 16: together 80 x 2**20 x 16 bytes."""
    frozen, trained = torch.nn.Linear(2**20, 8, bias=False, device="meta"), torch.nn.Linear(2**20, 79, bias=False, device="meta")
    skeleton = torch.nn.Sequential(frozen.requires_grad_(False), trained)
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"), mixed_precision=precision)
    monkeypatch.setattr(model, "fsdp_version", lambda _: version)
    monkeypatch.setattr(model, "smallest_gpu_bytes", lambda _: gpu_bytes)
    monkeypatch.setattr(model, "world_size", lambda: world_size)
    _note_needless_shards(accelerator, skeleton, torch.bfloat16, "adamw")  # type: ignore[arg-type]
    line = "the preset shards a model that one GPU holds with room to spare: weights, gradients and moments take 1.2 of 5 GiB; "
    assert capsys.readouterr().out.strip() == (preset and f"{line}{preset} gathers nothing")
