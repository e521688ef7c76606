"""Small files of rows, which a test writes in a folder of its own, and the rows that a run reads from them, by the objective of
their config's recipe."""

import json
from pathlib import Path

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.data.rows import load
from toolkit.data.rows.load import TextRows
from toolkit.data.tokens import prepare
from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.objectives import built_in

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one"}]
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "one"}]


def load_rows(config, **options) -> TextRows:
    return load.load_rows(built_in(config.objective), config, **options)


def prepare_rows(config, *args) -> TokenizedRows:
    return prepare.prepare_rows(built_in(config.objective), config, *args)


def load_llm(*files: str, **settings) -> TextRows:
    """As recipes/llm.py does with a chat model."""
    given = {"files": list(files) or None, "eval_fraction": 0.0, "cache_dir": "cache", **settings}
    return load_rows(LLMDataConfig(**given), has_chat_template=True)


def load_t5(*files: str, **settings) -> TextRows:
    return load_rows(DataConfig(**{"files": list(files), "eval_fraction": 0.0, "cache_dir": "cache", **settings}))


def list_pairs(rows: TextRows) -> list[tuple[str, str]]:
    return list(zip(rows.train["prompt"], rows.train["completion"], strict=True))


def write(place: str, content: str = "text\na row\n") -> None:
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text(content, encoding="utf-8")


def write_objects(name: str, rows: list, *, is_array: bool = False) -> None:
    lines = [json.dumps(row) for row in rows]
    Path(name).write_text("[" + ",\n".join(lines) + "]" if is_array else "\n".join(lines))


def with_call(arguments) -> list[dict]:
    """The messages of a chat in which the assistant calls a tool."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]


def stored_call(rows: TextRows, place: int = 0):
    """The arguments of `with_call`, as a run has read them."""
    return json.loads(rows.train["messages"][place])[1]["tool_calls"][0]["function"]["arguments"]
