"""How `generate` takes the launch: its devices are those that the accelerate YAML names."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch

from tests.support.launch import REPOSITORY
from toolkit.cli.generate import generate as command
from toolkit.cli.generate.model import _choose_device
from toolkit.errors import UserError


@pytest.mark.parametrize(("preset", "expected"), [("ddp_cpu", "cpu"), ("ddp", "cuda:1")])
def test_several_processes_of_a_cpu_preset_leave_gpus_alone(monkeypatch: pytest.MonkeyPatch, preset: str, expected: str) -> None:
    """The launcher passes use_cpu to a single process only (accelerate/utils/launch.py:133, and nothing of it below)."""
    path = REPOSITORY / "accelerate_configs" / f"{preset}.yaml"
    launched = {"ACCELERATE_MIXED_PRECISION": "no", "TOOLKIT_ACCELERATE_YAML": str(path), "LOCAL_RANK": "1"}
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **launched})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked: list[Any] = []
    monkeypatch.setattr(accelerate, "PartialState", lambda **given: asked.append(given))

    def end(options: Any) -> None:
        raise ConnectionAbortedError

    monkeypatch.setattr(command, "_read", end)
    with pytest.raises(ConnectionAbortedError):
        command.generate(SimpleNamespace())  # type: ignore[arg-type]
    assert asked == [{"cpu": expected == "cpu"}] and str(_choose_device()) == expected


def test_processes_of_torchrun_are_connected_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone, they would all write every text into the output."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"})

    def connect(**_: Any) -> None:
        raise ConnectionAbortedError

    monkeypatch.setattr(accelerate, "PartialState", connect)
    with pytest.raises(ConnectionAbortedError):
        command.generate(SimpleNamespace())  # type: ignore[arg-type]


def test_a_rank_whose_gpu_lacks_room_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    monkeypatch.setattr(command, "_read", lambda options: ([], ""))

    def lack(*_: Any) -> None:
        raise UserError("no room")

    monkeypatch.setattr(command, "load_generator", lack)
    with pytest.raises(UserError, match="no room") as raised:
        command.generate(SimpleNamespace(model="m", dtype=None, output=None, settings={}))  # type: ignore[arg-type]
    assert raised.value.agreed_by_all_ranks  # type: ignore[attr-defined]
