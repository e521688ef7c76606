"""Figures of runs as written in metrics.jsonl, their differences, the table and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.tools.compare.table import (
    Outcome,
    as_json,
    common_changes,
    format_comparison,
    loss_difference,
    read_figures,
)


def step(number: int, loss: float | None, seconds: float, **others: Any) -> dict[str, Any]:
    figures = {"loss": loss, "step_time_s": seconds, "num_rows": 4, "num_tokens": 40, "peak_memory_gib": 1.0 + number / 8}
    return {"kind": "train", "step": number, **figures, **others}


LINES = [
    {"kind": "eval", "step": 0, "loss": 9.0, "rougeL": 1.0},
    *[step(number, 1 / number, 100.0 if number <= 2 else 0.5) for number in range(1, 7)],
    {"kind": "checkpoint", "step": 3, "blocking_s": 0.25, "write_s": 1.0, "num_bytes": 10},
    {"kind": "eval", "step": 6, "loss": 2.5, "token_accuracy": 50.0, "rougeL": 12.5},
    {"kind": "checkpoint", "step": 6, "blocking_s": 0.75, "write_s": 0.5, "num_bytes": 20},
]


def save(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def outcome(tmp_path: Path, preset: str, lines: list[dict[str, Any]], *changes: str) -> Outcome:
    return Outcome(preset, 2, "no", list(changes), read_figures(save(tmp_path / "metrics.jsonl", lines), 2))


def test_the_first_steps_are_not_timed_and_a_save_that_training_waits_for_stands_when_it_goes_on(tmp_path: Path) -> None:
    figures = read_figures(save(tmp_path / "metrics.jsonl", LINES), 2)
    assert (figures.num_timed_steps, figures.loop_s, figures.speed, figures.unit) == (4, 2.0, 80.0, "tokens/s")
    assert list(figures.losses) == [1, 2, 3, 4, 5, 6] and figures.peak_memory_gib == 1.75
    assert figures.evaluation == {"loss": 2.5, "token_accuracy": 50.0, "rougeL": 12.5}
    assert (figures.save_waits_s, figures.save_stands_s, figures.num_bytes) == (0.5, (1.25 + 0.75) / 2, 20)
    with pytest.raises(ValueError, match="no step after step 6"):
        read_figures(tmp_path / "metrics.jsonl", 6)
    # Rows of one token are counted as rows; what a run lacks has no column.
    lines = [step(number, 1.0, 0.5, num_tokens=4) for number in range(1, 5)]
    few = outcome(tmp_path, "ddp", lines)
    assert few.figures is not None and (few.figures.save_waits_s, few.figures.evaluation) == (None, {})
    head, _, row = format_comparison([few]).splitlines()
    assert "rows/s" in head and "ROUGE" not in head and len(head.split("|")) == len(row.split("|")) == 13


def test_the_loss_difference_is_the_largest_relative_one(tmp_path: Path) -> None:
    def figures(*losses: float | None) -> Any:
        lines = [step(number, loss, 1.0) for number, loss in enumerate(losses, start=1)]
        return read_figures(save(tmp_path / "metrics.jsonl", lines), 0)

    assert loss_difference(figures(2.0, 4.0), figures(2.0, 4.0)) == 0
    assert loss_difference(figures(2.002, 4.4), figures(2.0, 4.0)) == pytest.approx(0.1)
    assert loss_difference(figures(2.0, 4.0, 9.0), figures(2.0, 5.0)) == pytest.approx(0.2)
    assert loss_difference(figures(2.0, None), figures(2.0, None)) == 0
    assert loss_difference(figures(2.0, None), figures(2.0, 1.0)) == float("inf")


def test_the_table_names_the_reference_the_failures_and_what_was_changed(tmp_path: Path) -> None:
    other = [line | ({"loss": 1.25 * line["loss"]} if line["kind"] == "train" else {}) for line in LINES]
    outcomes = [
        Outcome("hsdp", 2, "no", ["use_cpu false → true"], failure="a mesh | of 3"),
        outcome(tmp_path, "ddp", LINES, "use_cpu false → true", "num_processes 8 → 2"),
        outcome(tmp_path, "fsdp2", other, "use_cpu false → true"),
    ]
    assert common_changes(outcomes) == ["use_cpu false → true"]
    head, rule, *rows = format_comparison(outcomes).splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-1]] == [
        "preset", "ranks", "precision", "loop s", "tokens/s", "peak GiB", "loss difference", "save waits s", "save stands s",
        "held-out loss", "ROUGE-L", "remarks",
    ]  # fmt: skip
    cells = [[cell.strip() for cell in row.replace("\\|", "/").split("|")[1:-1]] for row in rows]
    assert cells == [
        ["hsdp", "2", "no", *"––––––––", "failed: a mesh / of 3"],
        ["ddp", "2", "no", "2.00", "80", "1.75", "reference", "0.500", "1.000", "2.5000", "12.50", "num_processes 8 → 2"],
        ["fsdp2", "2", "no", "2.00", "80", "1.75", "2.5e-01", "0.500", "1.000", "2.5000", "12.50", ""],
    ]
    assert len({row.rindex("|", 0, len(head) - len(" remarks |") + 1) for row in (head, rule, rows[1])}) == 1, "aligned"
    differences = [plain.get("loss_difference") for plain in as_json(outcomes)]
    assert differences == [None, 0.0, pytest.approx(0.25)]
