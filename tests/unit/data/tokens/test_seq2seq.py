"""The cache of tokenized rows and what a resume compares."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from datasets import Dataset

from tests.support.rows import prepare_rows
from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.tokens import prepare
from toolkit.data.tokens.token_file import TokenFile
from toolkit.data.tokens.tokenizer import train_tokenizer
from toolkit.objectives import seq2seq


def rows_without_a_tokenizer(folder: Path) -> tuple[DataConfig, ModelConfig]:
    """A small source, and a model that brings no tokenizer."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    words = ["read", "write", "open", "close", "file", "path", "line", "für", "count", "split"]
    rows = [{"source": " ".join(words[i % 7 : i % 10 + 1] * 2) + f" {i}", "target": words[i % 10]} for i in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source="jsonl", files=str(folder / "rows.jsonl"), cache_dir=str(folder / "cache"), eval_fraction=0.2)
    model = ModelConfig(name_or_path=str(folder / "model"), from_scratch=True)
    return data, model


def test_the_fingerprint_follows_the_tokenizer_that_came_out_of_training(tmp_path, monkeypatch, capsys):
    """Training it again gives another one on the same rows, and a resume with other tokens must not look exact."""
    data, model = rows_without_a_tokenizer(tmp_path)
    first = prepare_rows(data, model, 80)
    assert prepare_rows(data, model, 80).fingerprint == first.fingerprint
    # On fewer rows: on the same ones it comes out the same now and then.
    some = first.train.select(range(20)).rename_columns({"target": "completion", "lead_text": "prompt"})
    trained_apart = train_tokenizer(some, 80)
    monkeypatch.setattr(seq2seq, "train_tokenizer", lambda rows, vocab_size, prefix: trained_apart)
    elsewhere = prepare_rows(replace(data, cache_dir=str(tmp_path / "elsewhere")), model, 80)
    assert elsewhere.fingerprint != first.fingerprint
    # Damaged tokens are built again with the tokenizer that was trained, and a hidden file beside it does no harm.
    (folder,) = (path.parent for path in (tmp_path / "cache").glob("*/evaluation.arrow"))
    (folder / "tokenizer" / ".DS_Store").touch()
    for damaged in (None, folder / "about.json", folder / "train.arrow"):
        capsys.readouterr()
        if damaged:
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
        assert prepare_rows(data, model, 80).fingerprint == first.fingerprint
        assert ("is damaged" in capsys.readouterr().err) == bool(damaged)


def test_the_fingerprint_does_not_depend_on_how_many_processes_tokenize(tmp_path, monkeypatch):
    """In one process, the cut of the last text stays in the tokenizer."""
    monkeypatch.setattr(prepare, "_ROWS_WORTH_SEVERAL_PROCESSES", 1)
    data, model = rows_without_a_tokenizer(tmp_path)
    prepare_rows(data, model, 80).tokenizer.save_pretrained(model.name_or_path)
    cut = [
        prepare_rows(
            replace(data, max_target_length_tokens=2, num_tokenizer_workers=n, cache_dir=str(tmp_path / str(n))), model, 80
        )
        for n in (1, 2)
    ]
    assert max(cut[0].train["num_label_tokens"]) == 2 and cut[0].fingerprint == cut[1].fingerprint
    assert json.loads(cut[0].tokenizer.backend_tokenizer.to_str())["truncation"] is None


def test_a_tokenizer_that_is_trained_on_the_rows_knows_their_prefix(tmp_path):
    data, model = rows_without_a_tokenizer(tmp_path)
    plain, prefixed = prepare_rows(data, model, 80), prepare_rows(replace(data, prefix="Zürich: "), model, 80)
    assert "Zürich" not in plain.tokenizer.decode(plain.tokenizer("Zürich")["input_ids"])
    num_bytes = {row["target"]: row["target_bytes"] for row in plain.train}
    assert num_bytes == {target: len(target.encode()) for target in num_bytes} and "für" in num_bytes
    text = prefixed.tokenizer.decode(prefixed.train[0]["input_ids"], skip_special_tokens=True)
    assert text == f"Zürich: {prefixed.train[0]['lead_text']}" and not [line for line in prefixed.remarks if "token" in line]


def write_rows(file: Path, block_size: int = 9, **columns: list) -> bytes:
    """Rows of one token each; returns the hash of their values."""
    rows: dict[str, list] = {
        "row_id": [*range(9)],
        "input_ids": [[token] for token in range(9)],
        "target": [f"é{i}" for i in range(9)],
    }
    table = pa.table(rows | columns)
    with closing(TokenFile(file)) as tokens:
        for start in range(0, 9, block_size):
            tokens.add(table.slice(start, block_size))
    assert Dataset.from_file(str(file)).to_dict() == rows | columns
    return tokens.hash_values("train")


def test_the_hash_of_tokens_is_of_their_values_and_not_of_their_blocks(tmp_path):
    whole = write_rows(tmp_path / "whole")
    assert write_rows(tmp_path / "blocks", block_size=4) == whole
    changes: list[dict] = [
        {"input_ids": [[token + (token == 4)] for token in range(9)]},
        {"input_ids": [[0, 1], [], *([token] for token in range(2, 9))]},  # the same tokens, in other rows
        {"target": ["é01", "é", *(f"é{i}" for i in range(2, 9))]},
        {"row_id": [1, 0, *range(2, 9)]},
    ]
    for number, change in enumerate(changes):
        assert write_rows(tmp_path / str(number), **change) != whole, change
