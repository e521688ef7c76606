"""The texts of a page stand beside their own row's source, reference and scores; what a run keeps for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from tests.support.report_runs import evaluation, save_run
from toolkit.data.collate import CausalCollator
from toolkit.evaluation.rows import EvaluationRows, even_places
from toolkit.parallel.units import describe_units
from toolkit.tools.preview.summary import _sources
from toolkit.tools.report import facts
from toolkit.tools.report.facts import MOST_PREDICTIONS, read_runs
from toolkit.tools.report.page import collect_predictions


def save_texts(folder: Path, first_reference: str, sources: dict[str, str], **texts: list[str]) -> Path:
    """A run that predicts rows 7 and 8 in every second step; other rows at first."""
    lines = [evaluation(step, rougeL=step) for step in (2, 4, 6)]
    run = save_run(folder, evaluation(0, rougeL=0.0, measured_on={"rows": "b"}), *lines)
    for step, predicted in ((0, ["old", "old"]), (2, texts["first"]), (4, ["no", "no"]), (6, texts["last"])):
        rows = [
            {"row_id": 7 + place, "reference": reference, "prediction": predicted[place], "rougeL": 10 * step + place}
            for place, reference in enumerate((first_reference, "both"))
        ]
        (run / f"predictions-{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "record.json").write_text(json.dumps({"sources": sources}))
    return run


def collected(*runs: Path) -> tuple[list[str], list[tuple[Any, ...]]]:
    found = collect_predictions(read_runs(runs))
    assert found is not None
    names = ("id", "reference", "source", "texts", "scores")
    return found["columns"], [tuple(row[name] for name in names) for row in found["rows"]]


def test_first_and_last_texts_of_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = save_texts(tmp_path / "one", "ref", {"7": "source 7", "8": "source 8"}, first=["a", "b"], last=["c", "d"])
    assert collected(one) == (
        ["after step 2", "after step 6"],
        [
            ("7", "ref", "source 7", ["a", "c"], [{"rougeL": 20}, {"rougeL": 60}]),
            ("8", "both", "source 8", ["b", "d"], [{"rougeL": 21}, {"rougeL": 61}]),
        ],
    )
    monkeypatch.setattr(facts, "MOST_PREDICTIONS", 1)
    assert [row[0] for row in collected(one)[1]] == ["7"]


def test_a_row_of_another_run_has_the_source_of_its_own_run(tmp_path: Path) -> None:
    """Runs on other data number other rows: an id says nothing about another run's row."""
    one = save_texts(tmp_path / "one", "ref", {"7": "source 7"}, first=["a", "b"], last=["c", "d"])
    two = save_texts(tmp_path / "two", "other", {"7": "their 7", "8": "source 8"}, first=["e", "f"], last=["g", "h"])
    assert collected(one, two) == (
        ["one: after step 6", "two: after step 6"],
        [
            ("7", "ref", "source 7", ["c", None], [{"rougeL": 60}, {}]),
            ("8", "both", "source 8", ["d", "h"], [{"rougeL": 61}, {"rougeL": 61}]),
            ("7", "other", "their 7", [None, "g"], [{}, {"rougeL": 60}]),
        ],
    )


def test_a_text_that_is_cut_is_counted(tmp_path: Path) -> None:
    sources = {"7": "s" * facts.LONGEST_TEXT, "8": "s" * (facts.LONGEST_TEXT + 1)}
    run = save_texts(tmp_path / "run", "ref", sources, first=["a", "b"], last=["c", "d" * (facts.LONGEST_TEXT + 1)])
    found = collect_predictions(read_runs([run]))
    assert found is not None and found["num_cut"] == 1 and len(found["rows"][1]["texts"][1]) == facts.LONGEST_TEXT
    whole, cut = (row["source"] for row in found["rows"])
    assert whole == sources["7"] and cut == f"{'s' * (facts.LONGEST_TEXT - 1)}…" and found["rows"][1]["texts"][1].endswith("d…")


def test_equal_units_share_a_line_with_the_bytes_of_all() -> None:
    def unit(class_name: str, name: str, num_trainable: int, num_bytes: int) -> Any:
        facts = {"num_parameters": 10, "num_trainable": num_trainable, "dtypes": ("float32",), "local_bytes": lambda: num_bytes}
        facts |= {"cut": lambda: ""}
        return SimpleNamespace(class_name=class_name, name=name, **facts)

    units = [unit("Block", "0", 0, 4), unit("Block", "1", 10, 5), unit("Block", "2", 10, 6), unit("Model", "", 10, 7)]
    names = ("unit", "count", "num_trainable", "bytes_on_rank_0")
    assert [tuple(line[name] for name in names) for line in describe_units(units)] == [
        ("Block 0", 1, 0, 4),
        ("Block", 2, 10, 11),
        ("Model (the rest)", 1, 10, 7),
    ]


def test_sources_are_kept_of_the_rows_with_a_prompt_and_predictions_at_even_distances() -> None:
    columns = {"row_id": [5, 6, 7, 8], "prompt_length": [0, 3, 0, 5], "lead_text": ["a", "b", "c", "d"]}
    tokenizer: Any = None
    assert _sources(EvaluationRows(Dataset.from_dict(columns), tokenizer, CausalCollator(0))) == {"6": "b", "8": "d"}
    assert even_places(3, MOST_PREDICTIONS) == [0, 1, 2]
    places = even_places(5 * MOST_PREDICTIONS // 2, MOST_PREDICTIONS)
    assert len(places) == MOST_PREDICTIONS and places[:3] == [0, 2, 5] and places[-1] == 5 * MOST_PREDICTIONS // 2 - 3
