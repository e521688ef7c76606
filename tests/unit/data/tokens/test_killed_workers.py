"""A process that tokenizes is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from datasets import Dataset

from toolkit.data.tokens import prepare
from toolkit.errors import UserError


def tokenize(batch: dict[str, list]) -> dict[str, list]:
    if 3 in batch["row_id"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"row_id": batch["row_id"], "length": [len(text) for text in batch["source"]]}


def test_a_killed_worker_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_ROWS_WORTH_SEVERAL_PROCESSES", 1)
    rows = Dataset.from_dict({"row_id": list(range(4)), "source": ["a"] * 4})
    with pytest.raises(UserError, match="one of the 2 processes that tokenize the train rows was killed"):
        prepare.tokenize_rows(rows, tokenize, "train", tmp_path, num_workers=2)
