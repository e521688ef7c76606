"""What a run's steps took of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from toolkit.data.collate import CausalCollator
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


@pytest.mark.parametrize("one_row", [True, False])
def test_the_largest_micro_batch_is_remembered_by_its_tokens_and_packs_are_no_longer_than_they_are(one_row: bool) -> None:
    """A plan of `make llm` was refused: the longest row has 1132 tokens, where packs have 512 at most."""
    packs = [[{"input_ids": [5] * length, "labels": [5] * length} for length in pack] for pack in ((300, 200), (512,), (100, 20))]
    batch = CausalCollator(pad_token_id=0, one_row=one_row).collate(packs)
    assert batch["input_ids"].shape == ((1, 1132) if one_row else (3, 512))
    memory = StepMemory(torch.device("cpu"))
    for rows, source, target in ((4, 10, 5), (2, 40, 20), (8, 10, 4)):
        memory.see({"input_ids": torch.zeros(rows, source), "decoder_input_ids": torch.zeros(rows, target)}, rows)
    assert (memory.num_rows, memory.row_tokens) == (2, {"source": 40, "target": 20})
    memory.see(batch, len(packs))
    assert (memory.num_rows, memory.row_tokens) == (3, {"row": 378 if one_row else 512})


@pytest.mark.parametrize("gpu_bytes", [None, 2**30])
def test_the_peak_of_gpus_is_printed_and_that_of_cpus_which_is_mostly_the_libraries_only_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, gpu_bytes: int | None
) -> None:
    monkeypatch.setattr("toolkit.tracking.memory.smallest_gpu_bytes", lambda device: gpu_bytes)
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    save_memory(tmp_path, memory := StepMemory(torch.device("cpu")), log)
    assert not (tmp_path / "memory.json").exists(), "of a run without a step"
    memory.read()
    with caplog.at_level("INFO"):
        save_memory(tmp_path, memory, log)
    assert ("memory of training steps" in caplog.text) == (gpu_bytes is not None) and (tmp_path / "memory.json").exists()
