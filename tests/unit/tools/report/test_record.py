"""What a run keeps for its report: equal shard units in one line, the texts of rows at even distances, sources by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from datasets import Dataset

from toolkit.data.collate import CausalCollator
from toolkit.evaluation.rows import EvaluationRows, even_places
from toolkit.parallel.units import describe_units
from toolkit.tools.preview.summary import _sources
from toolkit.tools.report.record import MOST_PREDICTIONS


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


def test_places_are_at_even_distances() -> None:
    assert even_places(3, MOST_PREDICTIONS) == [0, 1, 2]
    places = even_places(5 * MOST_PREDICTIONS // 2, MOST_PREDICTIONS)
    assert len(places) == MOST_PREDICTIONS and places[:3] == [0, 2, 5] and places[-1] == 5 * MOST_PREDICTIONS // 2 - 3


def test_sources_are_kept_of_the_rows_with_a_prompt() -> None:
    columns = {"row_id": [5, 6, 7, 8], "prompt_length": [0, 3, 0, 5], "lead_text": ["a", "b", "c", "d"]}
    tokenizer: Any = None
    assert _sources(EvaluationRows(Dataset.from_dict(columns), tokenizer, CausalCollator(0))) == {"6": "b", "8": "d"}
