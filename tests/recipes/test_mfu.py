"""The log line and `metrics.jsonl` of a run on devices whose peak is known."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.launch import run_on_ranks
from tests.support.small_run import run_in_this_process
from tests.support.workbench import FP32, new_bench

PEAK_TFLOPS = 3


def run_on_known_devices(argv: list[str]) -> str:
    """On every rank: the recipe, and what it printed."""
    from toolkit.tracking import flops

    printed = io.StringIO()
    with patch.dict(flops.PEAK_TFLOPS, {"cpu": PEAK_TFLOPS}), contextlib.redirect_stdout(printed):
        run_in_this_process("t5", argv)
    return printed.getvalue()


def test_mfu_is_the_flops_of_the_rows_over_those_of_all_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    bench = new_bench(tmp_path_factory, "mfu")
    flags = bench.flags("run", eval__generate=False)
    first, second = run_on_ranks(run_on_known_devices, preset="fsdp2_cpu", overrides=FP32, args=(flags,))
    lines = bench.lines("run", "train")
    # T5 with hidden states of 32, 64 inside of a block, 2 layers, 256 tokens: FLOPs of products by the formula.
    of_sources = 6 * 2 * (4 * 32 * 32 + 2 * 32 * 64 + 2 * 32 * 32)
    of_targets = 6 * (2 * (4 * 32 * 32 + 2 * 32 * 32 + 2 * 32 * 64) + 32 * 256)
    for line in lines:
        assert line["tokens_per_s_per_rank"] == pytest.approx(line["tokens_per_s"] / 2)
        products = of_sources * (line["num_tokens"] - line["num_label_tokens"]) + of_targets * line["num_label_tokens"]
        flops = line["mfu_percent"] / 100 * line["step_time_s"] * 2 * PEAK_TFLOPS * 1e12
        assert products < flops < 1.3 * products, "attention over short rows is less than the rest"
    shown = f"({lines[-1]['tokens_per_s_per_rank']:,.0f} a rank), MFU {lines[-1]['mfu_percent']:.1f} %\n"
    assert shown in first and "MFU" not in second
    assert Path(bench.runs / "run" / "export" / "trainer_state.json").exists()
