"""The same rows give the tokens that earlier versions made of them: a resume compares them, and refuses others."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.support.chats import CHATML, build_chat_tokenizer, say
from tests.support.model_folders import _build_tokenizer
from tests.support.rows import prepare_rows
from toolkit.config.data import DataConfig, LLMDataConfig, MixEntry
from toolkit.config.schema import ModelConfig

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
