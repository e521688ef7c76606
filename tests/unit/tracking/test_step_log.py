"""Lines of steps, and what is printed of those that were skipped."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.checkpoint.state import SkipHistory
from toolkit.data.batch_plan import MicroBatch, Step
from toolkit.distributed.progress import Progress
from toolkit.errors import UserError
from toolkit.files.json_lines import load_json_lines
from toolkit.tracking import step_log
from toolkit.tracking.metrics_log import MetricsLog
from toolkit.tracking.step_log import StepFigures, StepLog

NAN = math.nan
ROWS: Any = [{"row_id": 1000 + row} for row in range(100)]


@pytest.fixture
def log(tmp_path: Path) -> StepLog:
    return new_log(tmp_path, SkipHistory())


def new_log(folder: Path, skips: SkipHistory, max_skipped_steps: int = 3) -> StepLog:
    accelerator = SimpleNamespace(device=torch.device("cpu"), log=lambda figures, step: None)
    metrics = MetricsLog(folder / "metrics.jsonl", is_writer=True)
    sharded: Any = SimpleNamespace(accelerator=accelerator)
    return StepLog(metrics, sharded, Progress(100, 0, every_steps=1), ROWS, skips, max_skipped_steps)


def figures(step: int, *losses: float, norm: float = 1.0, skipped: bool | None = None) -> StepFigures:
    """A step of two rows a micro-batch, rows 2·step and so on, with these summed losses."""
    first = 2 * step
    rows = tuple(range(first, first + 2 * len(losses)))
    micro_batches = [
        (MicroBatch(step, i, i == len(losses) - 1, ((first + 2 * i,), (first + 2 * i + 1,)), False), torch.tensor(loss))
        for i, loss in enumerate(losses)
    ]
    total = sum(losses)
    bad = not math.isfinite(total + norm) if skipped is None else skipped
    return StepFigures(
        Step(step, 0, rows, 10, 20), 1e-3, torch.tensor(total), torch.tensor(norm), torch.tensor(float(bad)), micro_batches
    )


def skipped(log: StepLog) -> dict[str, Any]:
    """The one line of a skipped step."""
    log.flush()
    (skip,) = [line for line in load_json_lines(log.metrics.path, skip_torn_end=True) if line["kind"] == "skip"]
    return skip


def test_rows_of_the_bad_micro_batch_are_named(log: StepLog, capsys: pytest.CaptureFixture[str]) -> None:
    log.add(figures(4, 1.0, NAN, 2.0))
    skip = skipped(log)
    expected = {"kind": "skip", "step": 4, "loss": None, "loss_is": "nan", "grad_norm": 1.0, "row_ids": [1010, 1011]}
    assert skip == expected
    assert (
        "step 4: update skipped on all ranks (loss nan, gradient norm 1); rows 1010, 1011; 1 skipped so far\n"
        in capsys.readouterr().err
    )


def test_rows_of_the_whole_step_are_named_where_no_loss_is_bad(log: StepLog) -> None:
    log.add(figures(4, 1.0, 2.0, norm=NAN))
    skip = skipped(log)
    assert skip["row_ids"] == [1008, 1009, 1010, 1011]


def test_every_step_has_a_line_and_only_skipped_ones_another(log: StepLog, tmp_path: Path) -> None:
    for step, loss in enumerate([5.0, NAN, 7.0], start=1):
        log.add(figures(step, loss))
    assert not (tmp_path / "metrics.jsonl").read_text(), "read before it was asked to"
    log.flush()
    log.flush()
    lines = load_json_lines(tmp_path / "metrics.jsonl", skip_torn_end=True)
    assert [(line["kind"], line["step"]) for line in lines] == [("train", 1), ("train", 2), ("skip", 2), ("train", 3)]
    assert [line["loss"] for line in lines] == [0.5, None, None, 0.7]
    assert log.skips == SkipHistory(num_skipped=1, num_in_a_row=0)
    train = [line for line in lines if line["kind"] == "train"]
    assert not any("mfu_percent" in line for line in train)
    num_tokens = sum(line["num_tokens"] for line in train)
    assert sum(line["step_time_s"] * line["tokens_per_s"] for line in train) == pytest.approx(num_tokens)


def test_speed_is_that_of_a_rank_too_and_mfu_adds_up(log: StepLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "world_size", lambda: 4)
    log.num_input_tokens_seen, log.seconds_at_peak = 1000, np.arange(100) / 1000
    for step in (1, 2):  # rows 2 and 3, 4 and 5
        log.add(figures(step, 1.0))
    log.flush()
    train = load_json_lines(tmp_path / "metrics.jsonl")
    assert [line["num_input_tokens_seen"] for line in train] == [1020, 1040]
    assert all(line["tokens_per_s_per_rank"] * 4 == pytest.approx(line["tokens_per_s"]) for line in train)
    at_peak_s = sum(line["mfu_percent"] / 100 * line["step_time_s"] * 4 for line in train)
    assert at_peak_s == pytest.approx((2 + 3 + 4 + 5) / 1000)


def test_routers_have_figures_beside_the_loss_and_the_least_even_layer_its_load(log: StepLog, tmp_path: Path) -> None:
    """Of 20 tokens, each sent to one of two experts, in two layers."""
    step = figures(1, 5.0)
    step.routing = torch.tensor([[1.0, 10.0, 10.0], [3.0, 20.0, 0.0]])
    log.add(step)
    log.flush()
    router, train = load_json_lines(tmp_path / "metrics.jsonl")
    assert router == {"kind": "router", "step": 1, "layer": 1, "load": [1.0, 0.0]}
    assert train["loss"] == 0.5 and train["router_aux_loss"] == pytest.approx(0.2)
    assert train["router_busiest_share"] == 1.0 and train["router_load_entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize("flush_every", [1, 2, 5])
def test_too_many_in_a_row_stop_the_run_and_name_steps_and_rows(log: StepLog, flush_every: int) -> None:
    """Counted across flushes; one that is taken starts the count again."""
    losses = [1.0, NAN, NAN, 1.0, NAN, NAN, NAN]
    with pytest.raises(UserError) as error:
        for step, loss in enumerate(losses, start=1):
            log.add(figures(step, loss))
            if step % flush_every == 0 or step == len(losses):
                log.flush()
    sentence = str(error.value)
    assert sentence.startswith("3 updates in a row were skipped, up to step 7 (optim.max_skipped_steps)")
    assert "steps 5, 6, 7: rows 1010, 1011, 1012, 1013, 1014, 1015; " in sentence
    assert error.value.printed_by == "run"


def test_too_many_in_a_row_stop_the_run_though_the_next_one_was_taken(log: StepLog, tmp_path: Path) -> None:
    """All of it is read at once, as with a large `log_every_steps`."""
    for step, loss in enumerate([1.0, NAN, NAN, NAN, 1.0, NAN, 1.0], start=1):
        log.add(figures(step, loss))
    with pytest.raises(UserError, match=r"^3 updates in a row were skipped, up to step 4 .* steps 2, 3, 4: rows 1004, "):
        log.flush()
    assert [
        line["step"] for line in load_json_lines(tmp_path / "metrics.jsonl", skip_torn_end=True) if line["kind"] == "train"
    ] == list(range(1, 8))


def test_skips_in_a_row_are_counted_from_before_a_resume(tmp_path: Path) -> None:
    log = new_log(tmp_path, SkipHistory(num_skipped=7, num_in_a_row=2))
    log.add(figures(9, NAN))
    with pytest.raises(UserError, match=r"^3 updates in a row were skipped, up to step 9 .* rows 1018, 1019; "):
        log.flush()
    assert log.skips == SkipHistory(num_skipped=8, num_in_a_row=3)


def test_many_rows_are_cut_short_in_the_sentence_but_not_in_the_log(log: StepLog, capsys: pytest.CaptureFixture[str]) -> None:
    log.add(figures(1, *[1.0] * 10, norm=NAN))
    skip = skipped(log)
    assert len(skip["row_ids"]) == 20
    assert "1017 and 4 more; 1 skipped so far" in capsys.readouterr().err
