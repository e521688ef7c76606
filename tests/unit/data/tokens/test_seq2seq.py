"""The cache of tokenized rows and what a resume compares: the same rows give the tokens that earlier versions made of them.
Processes that tokenize or collate are killed, or have a long folder of temporary files."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset

from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.model_folders import _build_tokenizer
from tests.support.rows import prepare_rows
from toolkit.config.data import DataConfig, LLMDataConfig, MixEntry
from toolkit.config.schema import ModelConfig
from toolkit.data.tokens import prepare
from toolkit.data.tokens.prepare import TokenFile
from toolkit.data.tokens.tokenizer import train_tokenizer
from toolkit.errors import UserError
from toolkit.objectives import seq2seq

WORDS = ["read", "write", "open", "close", "the", "file", "path", "and", "line", "text", "count", "split", "it", "is"]
WORDS += ["hello", "there", "what", "two", "four"]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 1.5}'}}]}


def words(start: int, number: int) -> str:
    return " ".join(WORDS[(start * 7 + i * i) % len(WORDS)] for i in range(number))


def chat(i: int) -> list[dict]:
    messages = say(words(i % 12, 4), words(i, 3), "thanks", words(i, 1 + i % 8), system="be brief é")
    if i % 5 == 0:
        answer = {"role": "tool", "content": "4", "extra": {"x": [1, 2.5, None]}}
        messages += [*say("2 + 2"), CALL, answer, {"role": "assistant", "content": "it is four"}]
    messages[2]["weight"] = i % 7 and 1
    return messages


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Files of every kind of row, and a tokenizer for each recipe."""
    monkeypatch.chdir(tmp_path)
    build_chat_tokenizer("<|im_start|>", "<|im_end|>", template=CHATML).save_pretrained("llm")
    _build_tokenizer(("<pad>", "</s>")).save_pretrained("t5")
    files = {
        "rows": [{"source": words(i % 30, 3 + i % 25), "target": words(i, i % 9)} for i in range(90)],
        "held_out": [{"source": words(3, 6), "target": "other"}, {"source": "new", "target": "rows"}],
        "chats": [{"messages": chat(i), "tools": [{"name": "add"}] if i % 5 == 0 else None} for i in range(40)],
        "talks": [{"prompt": say(words(i, 4), "it is", words(i, 2)), "completion": say("", words(i, 5))[1:]} for i in range(9)],
        "texts": [{"text": words(i, 1 + i * 37 % 200)} for i in range(20)],
    }
    for name, rows in files.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def chats(**settings) -> LLMDataConfig:
    return LLMDataConfig(**{"source": "jsonl", "eval_fraction": 0.2, "cache_dir": "cache"} | settings)


def pairs(**settings) -> DataConfig:
    return DataConfig(source="jsonl", files="rows.jsonl", cache_dir="cache", **settings)


COLUMNS = {"prompt_column": "source", "completion_column": "target"}
MIX = [MixEntry(source="jsonl", files=["chats.jsonl", "texts.jsonl"]), MixEntry(source="jsonl", files="talks.jsonl", weight=2.0)]


@pytest.mark.parametrize(
    ("model", "config", "expected"),
    [
        ("t5", pairs(eval_fraction=0.2, max_source_length_tokens=20, max_target_length_tokens=6, prefix="read "), "4e873b3711"),
        ("t5", pairs(eval_files="held_out.jsonl", num_rows=60), "9c3d8f5158"),
        ("llm", chats(files="rows.jsonl", max_length_tokens=60, **COLUMNS), "55631bf6b8"),
        ("llm", chats(files="chats.jsonl", max_length_tokens=90), "e9b49b6d8f"),
        ("llm", chats(files="talks.jsonl", loss_on="all"), "f1e664c678"),
        ("llm", chats(files="texts.jsonl", max_length_tokens=50), "e0c4c80990"),
        ("llm", chats(source=None, mix=MIX, num_rows=30), "8c0b5fe567"),
    ],
    ids=["cut pairs", "evaluation file", "completions", "chats", "talks", "texts", "mix"],
)  # fmt: skip
def test_tokens_and_row_ids_are_those_of_earlier_versions(folder, model, config, expected):
    """Version 5 of the reader has another split of chats with a system turn, and leaves out fewer rows for evaluation files."""
    rows = prepare_rows(config, ModelConfig(name_or_path=model), 400)
    columns = [{name: part[name][:] for name in sorted(part.column_names)} for part in (rows.train, rows.evaluation)]
    assert len(rows.train) and len(rows.evaluation)
    assert hashlib.sha256(json.dumps(columns).encode()).hexdigest()[:10] == expected


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


def tokenize(batch: dict[str, list]) -> dict[str, list]:
    if 3 in batch["row_id"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"row_id": batch["row_id"], "length": [len(text) for text in batch["source"]]}


def test_a_killed_worker_is_one_sentence(monkeypatch):
    monkeypatch.setattr(prepare, "_ROWS_WORTH_SEVERAL_PROCESSES", 1)
    rows = Dataset.from_dict({"row_id": list(range(4)), "source": ["a"] * 4})
    with pytest.raises(UserError, match="one of the 2 processes that tokenize the train rows was killed"):
        list(prepare.tokenize_rows(rows, tokenize, "train", 2))


SCRIPT = """
import os, signal, sys, time
import datasets
from toolkit.data import batch_plan, collate
from toolkit.data.tokens import prepare
from toolkit.errors import as_user_error

if __name__ == "__main__":
    prepare._ROWS_WORTH_SEVERAL_PROCESSES = 1
    rows = datasets.Dataset.from_dict({"input_ids": [[5, 6]] * 8, "labels": [[-100, 6]] * 8})
    print(sum(map(len, prepare.tokenize_rows(rows, lambda rows: {"length": [1] * 8}, "train", 2))))

    class Killed(collate.CausalCollator):
        def collate(self, packs, *, is_dummy=False):
            if packs[0][0]["input_ids"] == [0]:
                time.sleep(1)  # the batch before is on its way
                os.kill(os.getpid(), signal.SIGKILL)
            return super().collate(packs, is_dummy=is_dummy)

    rows = datasets.concatenate_datasets([rows, datasets.Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})])
    keys = [batch_plan.MicroBatch(1, number, False, ((row,),), False) for number, row in enumerate((0, 8))]
    try:
        for _, batch in collate.load_micro_batches(rows, keys, Killed(0), num_workers=1, pin_memory=False):
            print(batch["input_ids"].tolist())
    except RuntimeError as error:
        print(as_user_error(error))
"""


def test_workers_need_no_short_folder_of_temporary_files_and_a_lost_one_is_a_sentence(tmp_path):
    """Paths of sockets have at most 107 bytes, and those of workers stood in TMPDIR: a rank waited for one that could not."""
    folder, script = tmp_path / ("long" * 25), tmp_path / "script.py"
    folder.mkdir()
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    *printed, said = ended.stdout.splitlines()
    assert printed == ["8", "[[5, 6]]"], ended.stderr
    assert re.sub("is killed by signal: Killed|exited unexpectedly", "ended", said) == (
        "a process that collates batches ended: free memory, where the system ends processes because it runs out, or set "
        "data.num_loader_workers 0, and start the same command again"
    )
