"""The cache of tokenized rows and what a resume compares."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from toolkit.config_sections import DataConfig, ModelConfig
from toolkit.data.token_cache import About, write_tokens
from toolkit.data.tokens import prepare_rows
from toolkit.errors import UserError


def test_the_fingerprint_follows_the_tokenizer_that_came_out_of_training(tmp_path: Path) -> None:
    """Training it again gives another one on the same rows, and a resume with other tokens must not look exact."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    words = ["read", "write", "open", "close", "file", "path", "line", "text", "count", "split"]
    rows = [{"source": " ".join(words[i % 7 : i % 10 + 1] * 2) + f" {i}", "target": words[i % 10]} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source="jsonl", files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"), eval_fraction=0.2)
    model = ModelConfig(name_or_path=str(tmp_path / "model"), from_scratch=True)
    first = prepare_rows(data, model, 80)
    assert prepare_rows(data, model, 80).fingerprint == first.fingerprint
    (folder,) = (path.parent for path in (tmp_path / "cache").glob("*/about.json"))
    tokenizer_file = folder / "tokenizer" / "tokenizer.json"
    trained = json.loads(tokenizer_file.read_text())
    trained["model"]["vocab"][-1][1] -= 0.5
    tokenizer_file.write_text(json.dumps(trained))
    assert prepare_rows(data, model, 80).fingerprint != first.fingerprint


def test_two_machines_with_one_process_id_may_write_one_cache(tmp_path: Path) -> None:
    def write(folder: Path, name: str) -> About:
        (folder / "train").write_text(name)
        return About([name])

    def write_while_another_does(folder: Path) -> About:
        write_tokens(tmp_path / "cache", {"a": 1}, lambda other: write(other, "first"))
        return write(folder, "second")

    name = write_tokens(tmp_path / "cache", {"a": 1}, write_while_another_does)
    assert os.listdir(tmp_path / "cache") == [name]
    assert (tmp_path / "cache" / name / "train").read_text() == "first"
    assert json.loads((tmp_path / "cache" / name / "about.json").read_text()) == {
        "remarks": ["first"],
        "stop_token_ids": [],
        "a": 1,
    }


def test_a_cache_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"cache folder .*cache cannot be written \(File exists\): set data.cache_dir"):
        write_tokens(tmp_path / "cache", {}, lambda folder: About([]))
