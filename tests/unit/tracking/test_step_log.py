"""Lines of steps, and what is printed of those that were skipped."""

import math
from types import SimpleNamespace

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
ROWS = [{"row_id": 1000 + row} for row in range(100)]


@pytest.fixture
def log(tmp_path) -> StepLog:
    """A run may skip two updates in a row."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), log=lambda figures, step: None)
    metrics = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    sharded = SimpleNamespace(accelerator=accelerator)
    return StepLog(metrics, sharded, Progress(100, 0, every_steps=1), ROWS, SkipHistory(), 3)


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


def lines_of(log: StepLog, kind: str) -> list[dict]:
    return [line for line in load_json_lines(log.metrics.path, skip_torn_end=True) if line["kind"] == kind]


@pytest.mark.parametrize(
    ("losses", "norm", "row_ids", "said"),
    [
        ((1.0, NAN, 2.0), 1.0, range(1010, 1012), "(loss nan, gradient norm 1); rows 1010, 1011; 1 skipped so far\n"),
        ((1.0, 2.0), NAN, range(1008, 1012), "rows 1008, 1009, 1010, 1011; 1"),  # no loss is bad: those of the whole step
        ((1.0,) * 10, NAN, range(1008, 1028), "1023 and 4 more; 1 skipped so far"),  # cut short in the sentence alone
    ],
)
def test_rows_of_the_bad_micro_batch_are_named(log, capsys, losses, norm, row_ids, said):
    log.add(figures(4, *losses, norm=norm))
    log.flush()
    (skip,) = lines_of(log, "skip")
    assert (skip["step"], skip["row_ids"]) == (4, [*row_ids])
    if norm == 1:
        assert (skip["loss"], skip["loss_is"], skip["grad_norm"]) == (None, "nan", 1.0)
    printed = capsys.readouterr().err
    assert "step 4: update skipped on all ranks (loss " in printed and said in printed


def test_every_step_has_a_line_and_only_skipped_ones_another(log, tmp_path):
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


def test_speed_is_that_of_a_rank_too_and_mfu_adds_up(log, tmp_path, monkeypatch):
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


def test_routers_have_figures_beside_the_loss_and_the_least_even_layer_its_load(log, tmp_path):
    """Of 20 tokens, each sent to one of two experts, in two layers."""
    step = figures(1, 5.0)
    step.routing = torch.tensor([[1.0, 10.0, 10.0], [3.0, 20.0, 0.0]])
    log.add(step)
    log.flush()
    router, train = load_json_lines(tmp_path / "metrics.jsonl")
    assert router == {"kind": "router", "step": 1, "layer": 1, "load": [1.0, 0.0]}
    assert train["loss"] == 0.5 and train["router_aux_loss"] == pytest.approx(0.2)
    assert train["router_busiest_share"] == 1.0 and train["router_load_entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("losses", "flush_every", "in_a_row", "steps", "rows"),
    [
        *(([1.0, NAN, NAN, 1.0, NAN, NAN, NAN], every, 0, "5, 6, 7", "1010, 1011, 1012, ") for every in (1, 2, 5)),
        ([1.0, NAN, NAN, NAN, 1.0, NAN, 1.0], 7, 0, "2, 3, 4", "1004, "),  # though the next one was taken: all is read at once
        ([NAN], 1, 2, "1", "1002, 1003; "),  # counted from before a resume
    ],
)
def test_too_many_in_a_row_stop_the_run_and_name_steps_and_rows(log, losses, flush_every, in_a_row, steps, rows):
    """Counted across flushes; one that is taken starts the count again."""
    log.skips.num_in_a_row = in_a_row
    with pytest.raises(UserError) as error:
        for step, loss in enumerate(losses, start=1):
            log.add(figures(step, loss))
            if step % flush_every == 0 or step == len(losses):
                log.flush()
    sentence = str(error.value)
    assert sentence.startswith(f"3 updates in a row were skipped, up to step {steps[-1]} (optim.max_skipped_steps)")
    assert f"{steps}: rows {rows}" in sentence and error.value.printed_by == "run"
    assert [line["step"] for line in lines_of(log, "train")] == [*range(1, len(losses) + 1)]
