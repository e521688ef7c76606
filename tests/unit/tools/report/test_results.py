"""The table and the samples at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.tools.report.results import _print_samples, format_table


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


def test_names_in_a_table_are_one_line_each() -> None:
    table = format_table({"a\nb\u202e": {"mine/x\n1": 2.0}}, ["mine/x\n1"])
    assert [line.split() for line in table.split("\n")] == [[r"mine/x\n1"], [r"a\nb\u202e", "2.00"]]
