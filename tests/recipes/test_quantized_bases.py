"""Runs on bases that are quantized already: they train as on the plain model of the same values, and export plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import REPOSITORY, run_on_ranks
from tests.support.workbench import FP32, RELOAD, Workbench, call_toolkit, run_without_toolkit

LORA: dict[str, Any] = {"adapter__method": "lora", "adapter__rank": 2, "optim__lr": 1e-2, "export__merge": True}
SHORT: dict[str, Any] = {"eval__generate": False, "train__max_steps": 2}
BNB = REPOSITORY / "tests" / "support" / "quantized" / "bnb_nested"
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp8": ("fp8", "fsdp2_cpu", LORA),
    "fp8_single": ("fp8", "single", LORA | {"train__micro_batch_size_rows": 8}),
    "nf4": ("nf4", "fsdp2_cpu", LORA),
    "nf4_as_plain": ("nf4_as_plain", "fsdp2_cpu", LORA),
    "nf4_full": ("nf4", "single", {"train__micro_batch_size_rows": 8}),
}
"""Model, preset and settings."""
EXPORTS = {"fp8": "merged", "fp8_single": "merged", "nf4": "merged", "nf4_as_plain": "merged", "nf4_full": "export"}
"""The model's folder in a run."""


@pytest.fixture(scope="module")
def trained(llm_bench: Workbench) -> Workbench:
    """All runs of `RUNS`."""
    folders = run_on_ranks(
        build_folders, preset="single", overrides=FP32, args=(llm_bench.runs.parent / "quantized", llm_bench.models["llama"])
    )[0]
    for preset in ("fsdp2_cpu", "single"):
        of = {name: (model, settings) for name, (model, where, settings) in RUNS.items() if where == preset}
        runs = {name: {"model": folders[model]} | SHORT | settings for name, (model, settings) in of.items()}
        llm_bench.run_all(runs, preset=preset)
    return llm_bench


def build_folders(parent: Path, llama: Path) -> dict[str, Path]:
    """Quantized models with a tokenizer, and NF4's values in a plain folder; on one process."""
    import transformers

    from tests.support.quantized.fp8 import save_fp8_model
    from toolkit.config.schema import ModelConfig
    from toolkit.models.config import load_model_config
    from toolkit.models.load import load_model
    from toolkit.tasks import causal

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(llama)
    folders = {"fp8": save_fp8_model(parent / "fp8"), "nf4": Path(shutil.copytree(BNB, parent / "nf4"))}
    config = ModelConfig(name_or_path=str(BNB))
    plain = load_model(config, load_model_config(config, causal.TASK), causal.TASK, 0)
    folders["nf4_as_plain"] = parent / "nf4_as_plain"
    plain.save_pretrained(folders["nf4_as_plain"])
    for folder in folders.values():
        tokenizer.save_pretrained(folder)
    return folders


def losses(bench: Workbench, name: str) -> list[float]:
    return [line["loss"] for kind in ("train", "eval") for line in bench.lines(name, kind)]


def test_ranks_train_as_one_process_and_as_on_the_plain_model(trained: Workbench) -> None:
    assert losses(trained, "fp8") == pytest.approx(losses(trained, "fp8_single"), rel=1e-5)
    assert losses(trained, "nf4") == losses(trained, "nf4_as_plain")
    assert all(len(set(losses(trained, name))) > 2 for name in RUNS)
    # An adapter's base is known by the values that it was trained on, whatever they are stored as.
    records = [json.loads((trained.runs / name / "export" / "base.json").read_text()) for name in ("nf4", "nf4_as_plain")]
    assert records[0]["bf16_sha256"] == records[1]["bf16_sha256"]


def test_what_is_exported_is_a_plain_model(trained: Workbench, tmp_path: Path) -> None:
    for name, folder in EXPORTS.items():
        assert "quantization" not in (trained.runs / name / folder / "config.json").read_text()
    found = run_without_toolkit(RELOAD, [trained.runs / name for name in RUNS], tmp_path)
    assert found.keys() == RUNS.keys()
    for name, about in found.items():
        assert about.get("merged", about.get("export")) < 1e-4, (name, about)


def test_generate_takes_a_quantized_model_and_an_adapter_on_one(trained: Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    folders = trained.runs.parent / "quantized"
    words = [word for text in ("alpha beta", "gamma", "delta alpha") for word in ("--text", text)]
    for one, other in ((folders / "nf4", folders / "nf4_as_plain"), (trained.runs / "fp8", trained.runs / "fp8" / "merged")):
        texts = []
        for folder in (one, other):
            assert call_toolkit("generate", folder, *words, "--max-new-tokens", 8) == 0, capsys.readouterr()
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] and texts[0].count("\n") == 3, (one, other)
