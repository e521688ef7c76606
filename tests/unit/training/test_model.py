"""What a run says of shards that one GPU does not need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.training import model
from toolkit.training.model import _note_needless_shards

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
