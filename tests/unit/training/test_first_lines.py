"""The line of a run's first ones that names its training data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from toolkit.config.data import LLMDataConfig, MixEntry
from toolkit.data.rows.load import load_rows
from toolkit.training.first_lines import _describe_data


def describe(**settings: Any) -> str:
    texts = load_rows(LLMDataConfig(cache_dir="cache", **settings))
    run: Any = SimpleNamespace(train_rows=texts.train, plan=SimpleNamespace(pack_length_tokens=None, num_tokens=np.array([1234])))
    rows: Any = SimpleNamespace(texts=texts)
    return _describe_data(run, rows)


def test_an_evaluation_file_is_not_named_as_training_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "held_out"):
        Path(f"{name}.csv").write_text(f"text\n{name}\n")
    mix = [MixEntry(source="csv", files="a.csv"), MixEntry(source="csv", files="b.csv")]
    assert describe(mix=mix, eval_files="held_out.csv") == "a.csv and 1 more: 2 training rows of 1,234 tokens"
    assert describe(files="a.csv", eval_files="held_out.csv") == "a.csv: 1 training rows of 1,234 tokens"
    assert describe(files="a.csv", eval_fraction=0.0) == "a.csv: 1 training rows of 1,234 tokens"
