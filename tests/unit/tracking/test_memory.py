"""What a run's steps took of memory."""

from __future__ import annotations

from pathlib import Path

import torch

from toolkit.tracking.memory import StepMemory, save_memory
from toolkit.tracking.metrics_log import MetricsLog


def test_the_peak_starts_anew_where_the_system_lets_it() -> None:
    memory = StepMemory(torch.device("cpu"))
    memory.restart()
    before_gib = memory.read()
    held = torch.ones(2**26)  # 256 MiB
    assert memory.read() >= before_gib + 0.2
    del held
    memory.restart()
    assert memory.read() < before_gib + 0.2
    assert memory.peak_gib >= before_gib + 0.2


def test_the_largest_micro_batch_is_remembered_by_its_tokens() -> None:
    memory = StepMemory(torch.device("cpu"))
    for rows, source, target in ((4, 10, 5), (2, 40, 20), (8, 10, 4)):
        memory.see({"input_ids": torch.zeros(rows, source), "decoder_input_ids": torch.zeros(rows, target)})
    assert (memory.num_rows, memory.row_tokens) == (2, {"source": 40, "target": 20})
    assert memory.num_rows == 2


def test_a_run_without_a_step_saves_nothing(tmp_path: Path) -> None:
    save_memory(tmp_path, StepMemory(torch.device("cpu")), 0.0, MetricsLog(tmp_path / "metrics.jsonl", is_writer=True))
    assert not (tmp_path / "memory.json").exists()
