"""Baselines are measured at the end of a run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from toolkit.errors import UserError
from toolkit.evaluation.rows import EvaluationRows
from toolkit.files.json_lines import load_json_lines
from toolkit.tracking.baselines import _baselines, measure_baselines
from toolkit.tracking.metrics_log import MetricsLog


def test_baselines_are_measured_once_and_are_lines_of_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    from toolkit.tracking import baselines

    texts = {"target": ["Return the oar.", "Close the file."], "lead_text": ["Return the oar. And more.", "Nothing alike."]}
    rows, on = Dataset.from_dict(texts), {"rows": "a"}
    data = EvaluationRows(rows, tokenizer=None, collator=None)  # type: ignore[arg-type]
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    log.write("eval", 3, loss=1.0, measured_on=on)
    assert measure_baselines(log, 3, rows, data, on) == {}  # no texts
    log.write("eval", 4, rougeL=1.0, measured_on=on)
    first = measure_baselines(log, 4, rows, data, on)
    assert list(first) == ["lead sentence", 'constant "Return the oar."'] and first["lead sentence"]["rougeL"] == 50.0
    lines = [line for line in load_json_lines(log.path, skip_torn_end=True) if line["kind"] == "baseline"]
    assert [(line["name"], line["step"], line["measured_on"]) for line in lines] == [(name, 4, on) for name in first]
    monkeypatch.setattr(baselines, "_baselines", lambda *_: pytest.fail("measured again"))
    again = measure_baselines(log, 4, rows, data, on)
    assert {name: line["rougeL"] for name, line in again.items()} == {name: line["rougeL"] for name, line in first.items()}
    # On other rows, and a line that cannot be written, as on a full disk.
    monkeypatch.undo()
    log.write("eval", 5, rougeL=1.0, measured_on=(other := {"rows": "b"}))
    log.note_failure(log.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(UserError, match="metrics.jsonl cannot be written .No space left on device.: fix that"):
        measure_baselines(log, 5, rows, data, other)


def test_a_long_constant_is_named_by_its_start_in_quotes() -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"target": ["word " * 20], "lead_text": ["a"]})
    data = EvaluationRows(rows, tokenizer=None, collator=None)  # type: ignore[arg-type]
    assert list(_baselines(rows, data))[1] == f'constant "{"word " * 7}…"'


def test_a_set_has_baselines_of_its_own_rows() -> None:
    from datasets import Dataset

    leads = ["Return the oar. And more.", "Nothing alike.", "Close it."]
    targets = ["Return the oar.", "Close the file.", "Close it."]
    rows = Dataset.from_dict({"row_id": range(3), "target": targets, "lead_text": leads})
    inputs = ((2, "news"), (1, "mail"))
    data = EvaluationRows(rows, tokenizer=None, collator=None, inputs=inputs)  # type: ignore[arg-type]
    lead = _baselines(rows, data)["lead sentence"]
    assert [lead[f"{of_set}rougeL"] for of_set in ("", "news/", "mail/")] == [pytest.approx(200 / 3), 50.0, 100.0]
