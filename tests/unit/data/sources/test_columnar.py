"""Parquet, Arrow and datasets: the null keys that structs get, and objects that are stored as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.row_files import load_llm, stored_call, with_call

NULLS = {"x": None, "y": 1, "list": [None, {"z": None}], "deep": {"a": None}}


def test_null_keys_that_structs_get_are_left_out() -> None:
    from datasets import Dataset

    rows = [{"messages": with_call({"x": "a", "list": [None, "b"]})}, {"messages": with_call({"y": 1})}]
    dataset = Dataset.from_list(rows)
    assert dataset[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["y"] is None
    dataset.to_parquet("rows.parquet")
    dataset.save_to_disk("saved")
    shutil.copy(next(Path("saved").glob("*.arrow")), "rows.arrow")
    Path("folder").mkdir()
    shutil.copy("rows.parquet", "folder/train.parquet")
    Path("own.py").write_text("from datasets import Dataset\ndef load(config): return Dataset.from_parquet('rows.parquet')\n")
    for settings in ({"files": "rows.parquet"}, {"files": "rows.arrow"}, {"source": "./folder"}, {"source": "own.py:load"}):
        loaded = load_llm(**settings)
        assert [stored_call(loaded, place) for place in (0, 1)] == [{"x": "a", "list": [None, "b"]}, {"y": 1}], settings


def test_objects_of_mixed_types_keep_their_nulls_in_parquet_and_hub_datasets() -> None:
    """`datasets` stores these as JSON text."""
    from datasets import Dataset

    rows = [{"messages": with_call(NULLS)}, {"messages": with_call({"y": "text", "list": 3})}]
    dataset = Dataset.from_list(rows, on_mixed_types="use_json")
    dataset.to_parquet("rows.parquet")
    Path("folder").mkdir()
    Path("folder/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.py").write_text("from datasets import Dataset\ndef load(config): return Dataset.from_parquet('rows.parquet')\n")
    for settings in ({"files": "rows.parquet"}, {"source": "./folder"}, {"source": "own.py:load"}):
        loaded = load_llm(**settings)
        assert [stored_call(loaded, place) for place in (0, 1)] == [NULLS, {"y": "text", "list": 3}], settings
