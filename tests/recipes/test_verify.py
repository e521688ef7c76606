"""`verify` proves a T5 and a LoRA on a Llama, by real runs; `tests/faults/test_verify_faults.py` has the faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.planting.verify_run import run_verify
from tests.support.workbench import Workbench
from toolkit.tools.verify.verify import DEFAULT_TOLERANCE

CHECKS = {
    "start", "rows", "loss", "gradients", "update", "dropout", "evaluation", "sharding", "ties", "moved", "frozen", "save",
    "resume", "export", "adapter", "generation",
}  # fmt: skip


def test_t5_passes(workbench: Workbench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = [f"--data.{name}={value}" for name, value in data_flags(workbench).items()]
    preset = "fsdp2_activation_checkpointing"
    assert run_verify(tmp_path / "verify", data, model=str(workbench.models["t5"]), presets=[preset], bf16=True)
    printed = capsys.readouterr().out
    assert f"run 8 of 8: {preset} x 2, bf16" in printed and "\nall 34 proven\n" in printed
    check_output(tmp_path / "verify", (CHECKS - {"frozen", "adapter"}) | {"bf16", "recomputation"})


def test_lora_of_a_llama_passes(llm_workbench: Workbench, tmp_path: Path) -> None:
    flags = [f"--data.{name}={value}" for name, value in data_flags(llm_workbench).items()]
    flags += ["--data.max_length_tokens=64", "--adapter.method=lora", "--adapter.rank=4"]
    assert run_verify(tmp_path / "verify", flags, model=str(llm_workbench.models["llama"]))
    check_output(tmp_path / "verify", CHECKS - {"ties"})


def data_flags(bench: Workbench) -> dict[str, object]:
    return {"source": "jsonl", "files": bench.data / bench.rows, "cache_dir": bench.data / "cache", "eval_fraction": 0.25}


def check_output(folder: Path, expected: set[str]) -> None:
    """The table is there, whole, and what it takes to make it is not."""
    verdict = json.loads((folder / "verify.json").read_text())
    assert verdict["passed"] and {proof["check"] for proof in verdict["proofs"]} == expected
    assert all(proof["passed"] for proof in verdict["proofs"])
    of_step_1 = [p["difference"] for p in verdict["proofs"] if p["compared"].endswith(("4 norms", "(with ReLU)"))]
    assert 0 < max(of_step_1) < DEFAULT_TOLERANCE, "several processes add up in another order"
    assert "all" in (folder / "verify.md").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "presets", "verify.json", "verify.md"]
