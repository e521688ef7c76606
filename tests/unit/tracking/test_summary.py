"""The samples at the end of a run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from toolkit.errors import UserError
from toolkit.tracking.metrics_log import MetricsLog, load_metrics
from toolkit.tracking.summary import _print_samples, format_table, measure_baselines


def test_samples_are_printed_without_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from datasets import Dataset

    title = "\x1b]0;owned\x07"
    path = tmp_path / "predictions-1.jsonl"
    path.write_text(json.dumps({"reference": f"b{title}", "prediction": f"c{title}\nd"}) + "\n")
    _print_samples(path, Dataset.from_dict({"lead_text": [f"a{title}"]}))
    escaped = r"\x1b]0;owned\x07"
    sample = f"  text:      a{escaped}\n  reference: b{escaped}\n  generated: c{escaped}\nd\n\n"
    assert capsys.readouterr().out == sample * 3
    assert f"lead {escaped}" in format_table({f"lead {title}": {"loss": 1.0}})


@pytest.mark.parametrize("content", [None, "", '{"reference": "a", "predi'])
def test_predictions_that_are_gone_or_changed(tmp_path: Path, capsys: pytest.CaptureFixture, content: str | None) -> None:
    from datasets import Dataset

    path = tmp_path / "predictions-1.jsonl"
    if content is not None:
        path.write_text(content)
    _print_samples(path, Dataset.from_dict({"lead_text": ["a"]}))
    assert capsys.readouterr().out == f"no samples: {path} is missing, or is not what the evaluation wrote\n\n"


def test_baselines_are_measured_once_and_are_lines_of_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    from toolkit.evaluation.rows import EvaluationRows
    from toolkit.tracking import summary

    texts = {"target": ["Return the oar.", "Close the file."], "lead_text": ["Return the oar. And more.", "Nothing alike."]}
    rows, on = Dataset.from_dict(texts), {"rows": "a"}
    data = EvaluationRows(rows, tokenizer=None, collator=None)  # type: ignore[arg-type]
    log = MetricsLog(tmp_path / "metrics.jsonl", is_writer=True)
    log.write("eval", 3, loss=1.0, measured_on=on)
    assert measure_baselines(log, 3, rows, data, on) == {}  # no texts
    log.write("eval", 4, rougeL=1.0, measured_on=on)
    first = measure_baselines(log, 4, rows, data, on)
    assert list(first) == ["lead sentence", 'constant "Return the oar."'] and first["lead sentence"]["rougeL"] == 50.0
    lines = [line for line in load_metrics(log.path) if line["kind"] == "baseline"]
    assert [(line["name"], line["step"], line["measured_on"]) for line in lines] == [(name, 4, on) for name in first]
    monkeypatch.setattr(summary, "_baselines", lambda *_: pytest.fail("measured again"))
    again = measure_baselines(log, 4, rows, data, on)
    assert {name: line["rougeL"] for name, line in again.items()} == {name: line["rougeL"] for name, line in first.items()}
    # On other rows, and a line that cannot be written, as on a full disk.
    monkeypatch.undo()
    log.write("eval", 5, rougeL=1.0, measured_on=(other := {"rows": "b"}))
    log.note_failure(log.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(UserError, match="metrics.jsonl cannot be written .No space left on device.: fix that"):
        measure_baselines(log, 5, rows, data, other)


def test_names_in_a_table_are_one_line_each() -> None:
    table = format_table({"a\nb\u202e": {"mine/x\n1": 2.0}}, ["mine/x\n1"])
    assert [line.split() for line in table.split("\n")] == [[r"mine/x\n1"], [r"a\nb\u202e", "2.00"]]
