"""The end of a run: an export on a node with GPUs takes the threads that the other ranks do not use meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from toolkit.distributed import device
from toolkit.training import run as runs


def test_an_export_beside_a_gpu_takes_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads, seen = torch.get_num_threads(), []
    monkeypatch.setattr(device, "available_cores", lambda: num_threads + 3)
    monkeypatch.setattr(runs, "export_model", lambda *_: seen.append(torch.get_num_threads()))
    for name in ("_tool", "measure_baselines", "list_commands", "leave", "working"):
        monkeypatch.setattr(runs, name, MagicMock())
    run: Any = MagicMock(num_steps=1, folder=Path("run"))
    for kind in ("cuda", "cpu"):
        run.sharded.accelerator.device = torch.device(kind)
        assert runs.finish(run) == Path("run/export")
    assert seen == [num_threads + 3, num_threads] and torch.get_num_threads() == num_threads
