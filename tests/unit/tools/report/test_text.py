"""Several runs in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UserError
from toolkit.tools.main import main
from toolkit.tools.report.text import show_runs


def save_run(folder: Path, *lines: dict, predictions: dict[int, list[str]] | None = None) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, texts in (predictions or {}).items():
        rows = [{"reference": "Return the oar.", "prediction": text} for text in texts]
        (folder / f"predictions-{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluation(step: int, **figures: Any) -> dict:
    return {"kind": "eval", "step": step, "num_rows": 2, **figures}


def test_first_and_last_evaluation_of_each_run_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = save_run(
        tmp_path / "base", evaluation(0, loss=9.0), {"kind": "train", "step": 1}, evaluation(5, loss=8.0), evaluation(9, loss=7.0)
    )
    rambling = ["Return the oar.\n\n    And more", " Return the oar.\nMore"]
    tuned = save_run(tmp_path / "tuned", evaluation(0, loss=3.25, rougeL=50.0), predictions={0: rambling})
    show_runs([base, tuned])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["loss", "rougeL", "rougeL_line1"]
    assert [row.split() for row in rows] == [
        ["base,", "as", "loaded", "(2", "rows)", "9.00", "–", "–"],
        ["base,", "after", "step", "9", "(2", "rows)", "7.00", "–", "–"],
        ["tuned,", "as", "loaded", "(2", "rows)", "3.25", "50.00", "100.00"],
    ]


@pytest.mark.parametrize("line", [{"num_rows": "2", "measured_on": "a"}, {"measured_on": {}}], ids=["measured_on", "num_rows"])
def test_an_evaluation_that_no_run_writes_is_one_sentence(tmp_path: Path, line: dict[str, Any]) -> None:
    run = save_run(tmp_path / "run", {"kind": "eval", "step": 0, "loss": 1.0, **line})
    with pytest.raises(UserError, match=f"^{run} has evaluations or predictions that no run writes .*: leave it out"):
        show_runs([run])


def test_a_name_that_would_turn_the_line_around_is_escaped_and_keeps_the_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path / "a\u202eb", evaluation(0, loss=9.0))
    (run / "memory.json").write_text("{}")
    for flags in (["--text"], []):
        monkeypatch.setattr("sys.argv", ["toolkit", "report", str(run), *flags])
        main()
    printed = capsys.readouterr().out
    header, row, *rest = printed.splitlines()
    assert len(header) == len(row) and row.startswith("a\\u202eb, as loaded") and "\u202e" not in printed
    assert len(rest) == 4 and rest[-1].endswith("a\\u202eb: open it in a browser")


def test_other_words_than_rouge_scores_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = save_run(tmp_path / "run", evaluation(0, rougeL=50.0, rouge_tokenizer="unicode"))
    lines = [{"reference": "还桨。", "prediction": "还桨\n不"}, {"reference": "Return the oar.", "prediction": ""}]
    (run / "predictions-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    show_runs([run])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("run, as loaded (2 rows, unicode words)") and row.split()[-2:] == ["50.00", "50.00"]


def test_evaluations_of_other_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = ({"loss": 2.0, "measured_on": {"rows": name}} for name in "ab")
    show_runs([save_run(tmp_path / "run", *(evaluation(step, **figures) for step, figures in enumerate(rows)))])
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "run, as loaded (2 other rows)",
        "run, after step 1 (2 rows)",
    ]


def test_runs_of_other_rows_have_a_table_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    measured = {"one": "a", "two": "b\nrows", "three": "a"}
    show_runs([save_run(tmp_path / name, evaluation(0, loss=2.0, measured_on={"rows": of})) for name, of in measured.items()])
    assert [line.split(",")[0].split()[:1] for line in capsys.readouterr().out.splitlines()] == [
        *(["loss"], ["one"], ["three"], [], ["loss"], ["two"], []),
        ["The"],
    ]


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029"])
def test_predictions_with_any_line_separator_are_read(tmp_path: Path, capsys: pytest.CaptureFixture, character: str) -> None:
    """Written by a version that did not escape them."""
    run = save_run(tmp_path / "run", evaluation(0, rougeL=50.0))
    row = {"reference": f"Return{character}the oar.", "prediction": f"Return the{character}oar."}
    (run / "predictions-0.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    show_runs([run])
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["50.00", "100.00"]


def test_a_folder_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is not a run folder"):
        show_runs([tmp_path / "nothing"])
    with pytest.raises(UserError, match="holds no evaluation: let the run evaluate first; without held-out rows it never does"):
        show_runs([save_run(tmp_path / "young", {"kind": "train", "step": 1})])


def test_emptied_predictions_have_no_score(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = save_run(tmp_path / "run", evaluation(1, rougeL=50.0), predictions={1: []})
    show_runs([run])
    assert "rougeL_line1" not in capsys.readouterr().out


def test_a_run_without_its_figures_is_not_taken_for_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    with pytest.raises(UserError, match="has no metrics.jsonl: the run's command writes one again, from its last checkpoint's"):
        show_runs([tmp_path])
