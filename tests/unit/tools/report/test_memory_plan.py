"""The memory plan of a run beside what it took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from toolkit.tools.plan import plan
from toolkit.tools.report.memory_plan import compare_with_plan, describe_memory
from toolkit.tracking import memory as step_memory
from toolkit.tracking.memory import StepMemory, save_memory
from toolkit.tracking.metrics_log import MetricsLog

PRESET = Path(__file__).parents[4] / "accelerate_configs" / "fsdp2_cpu.yaml"
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
CONFIG = """
model: {name_or_path: MODEL, from_scratch: true}
data: {source: not/read, max_length_tokens: 128}
train: {global_batch_size_rows: 8, micro_batch_size_rows: 4, max_steps: 1}
"""


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one process that has saved what it took."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "config.yaml").write_text(CONFIG.replace("MODEL", str(tmp_path / "model")))
    monkeypatch.setattr(step_memory, "find_accelerate_yaml", lambda: PRESET)
    memory = StepMemory(torch.device("cpu"))
    memory.see({"input_ids": torch.zeros(4, 96)})
    memory.read()
    save_memory(tmp_path, memory, 0.0, MetricsLog(tmp_path / "metrics.jsonl", is_writer=True))
    return tmp_path


def change(folder: Path, **figures: Any) -> None:
    found = json.loads((folder / "memory.json").read_text())
    (folder / "memory.json").write_text(json.dumps(found | figures))


def test_the_plan_of_a_run_stands_beside_its_memory(run_folder: Path) -> None:
    found = json.loads((run_folder / "memory.json").read_text())
    assert found["row_tokens"] == {"row": 96} and found["micro_batch_size_rows"] == 4 and found["device"] == "cpu"
    change(run_folder, num_processes=2, peak_gib=[1.5, 1.25], before_model_gib=[1.0, 1.0])
    said = compare_with_plan(run_folder)
    assert "measured 0.50, 0.25 GiB by rank (resident above the 1.00 to 1.00 GiB before the model loaded" in said
    assert said.startswith("predicted 0.00 GiB") and said.endswith("-99 %")
    assert json.loads((run_folder / "memory_plan.json").read_text())["device_bytes_total"] > 0
    change(run_folder, device="cuda", num_processes=2, peak_gib=[0.0075, 0.0075])
    assert "measured 0.01, 0.01 GiB by rank (allocated on the GPU)" in compare_with_plan(run_folder)
    assert describe_memory({"device": "cuda", "peak_gib": [1.0, 2.0]}, 3 * 2**30).endswith("; +50 %")  # than the rank with most


def test_a_run_is_planned_for_its_own_gpu_and_launch(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = MagicMock(return_value=MagicMock(total=2**30))
    monkeypatch.setattr(plan, "build_plan", planned)
    for gpu_gib in (23.6, None):
        (run_folder / "memory_plan.json").unlink(missing_ok=True)
        change(run_folder, device="cuda", num_processes=2, gpu_gib=gpu_gib, micro_batch_size_rows=3)
        compare_with_plan(run_folder)
    assert [call.args[-1] for call in planned.call_args_list] == [23.6, 80.0]
    # For its processes and its largest micro-batch; again if these change.
    _, _, num_processes, arguments, *_ = planned.call_args.args
    assert num_processes == 2 and arguments[1:] == ["--data.max_length_tokens=96", "--train.micro_batch_size_rows=3"]
    for name, value in (("num_processes", 1), ("micro_batch_size_rows", 2), ("row_tokens", {"row": 64})):
        planned.reset_mock()
        change(run_folder, **{name: value})
        compare_with_plan(run_folder)
        compare_with_plan(run_folder)
        assert planned.call_count == 1, name


def test_why_there_is_no_plan_is_reported(run_folder: Path) -> None:
    change(run_folder, num_processes=2, peak_gib=[1.5, 1.25], before_model_gib=[1.0, 1.0])
    (run_folder / "model" / "config.json").unlink()
    assert compare_with_plan(run_folder).startswith("not planned: model.name_or_path")
    (run_folder / "accelerate.yaml").unlink()
    assert compare_with_plan(run_folder) == "not planned: the run was launched without an accelerate YAML"
    (run_folder / "memory.json").write_text("{")
    assert "cannot be read" in compare_with_plan(run_folder)
    (run_folder / "memory.json").unlink()
    assert "no memory.json" in compare_with_plan(run_folder)
