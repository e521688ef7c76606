"""An example: one row of text as it is split, stored and tokenized, of both recipes.

It is a pair (a prompt and its completion, or a source and its target), a text, or a chat. A prompt and a completion that are
lists of messages also become a chat, in which only the turns of the completion are trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from toolkit.data.rows.columns import KINDS, Columns
from toolkit.data.rows.instructions import read_alpaca, read_pair, read_sharegpt, read_turns
from toolkit.data.rows.messages import TOOLS_COLUMN, read_chat, read_tools
from toolkit.data.sources.row import check_text, is_nan, read_optional_text
from toolkit.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(kw_only=True, slots=True)  # frozen ones take three times as long to make
class Example:
    """One row that can be trained on. What its kind does not have is None."""

    prompt: str | None = None
    """Of a pair; for an encoder-decoder, the source."""
    completion: str | None = None
    """Of a pair; for an encoder-decoder, the target."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    """Of a chat, with all keys that its template may read."""
    tools: list[Any] | None = None
    """The JSON schemas of a chat's tools."""
    first_trained: int = 0
    """Of a chat: assistant turns from this message on are trained on …"""
    weight_0: list[int] = field(default_factory=list)
    """… except for these."""
    rejected: str | list[dict[str, Any]] | None = None
    """The worse answer to the prompt, beside `completion`; of a chat, all its messages with that answer."""
    lead_text: str = ""
    """Text whose first sentence is the lead baseline."""
    group: str | None = None
    """Rows of one group go into the same split; None: rows with the same opening form a group. Not in the row files."""
    held_out: bool | None = None
    """True: evaluation, False: training, None: a hash of the group decides. Not in the row files."""

    @property
    def opening(self) -> str:
        """What the model is given first: the prompt, the text, or all of a chat before its first answer (system and user turns,
        tools)."""
        if self.messages is not None:
            turns = takewhile(lambda message: message["role"] != "assistant", self.messages)
            return "\0".join([*(turn["content"] for turn in turns), *([str(self.tools)] if self.tools else [])])
        return str(self.text if self.prompt is None else self.prompt)

    @property
    def content(self) -> str:
        """Two rows with equal content are duplicates: they say and train the same, in whatever order keys are written."""
        chat = self.messages and json.dumps([self.messages, self.tools, self.trained_turns], sort_keys=True)
        rejected = () if self.rejected is None else (json.dumps(self.rejected, sort_keys=True),)
        return "\0".join(map(str, (self.text, self.prompt, self.completion, chat, *rejected)))

    @property
    def trained_turns(self) -> list[int]:
        """Of a chat: the messages to train on."""
        roles = [message["role"] for message in self.messages or []]
        return [i for i, role in enumerate(roles) if role == "assistant" and i >= self.first_trained and i not in self.weight_0]

    @property
    def texts(self) -> list[str]:
        """All texts that a tokenizer should be trained on."""
        if self.messages is not None:
            answer = self.rejected[self.first_trained :] if isinstance(self.rejected, list) else []
            return [message["content"] for message in [*self.messages, *answer]]
        return [text for text in (self.text, self.prompt, self.completion, self.rejected) if isinstance(text, str)]


_STORED = ("prompt", "completion", "rejected", "text", "messages", "tools", "first_trained", "weight_0", "lead_text")
"""The fields of `Example` in the row files. Messages and tools are JSON there, as their keys differ from row to row."""


def build_example(
    row: Mapping[str, Any], columns: Columns, where: str, *, for_generation: bool = False, **known: Any
) -> Example | str:
    """The example in a row of a source, which has the cells of `columns` at least, or the reason to skip it, as in "with an empty
    target". A cell of the wrong type, or a malformed conversation, is a `UserError` that begins with `where`, file and row.

    Args:
        for_generation: `columns` has one column with a prompt; the example has no answer at its end.
        known: `group`, `held_out` and `lead_text`, where the source knows them.
    """
    kind = columns.kind
    wanted = KINDS[kind].cells[:1] if for_generation else KINDS[kind].cells
    cells = {name: row[name] for name in columns.names[: len(wanted)]}
    others = {name: row[name] for name in columns.names[len(cells) :]}
    for what, value in zip(wanted, cells.values(), strict=True):
        is_blank = (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value and kind != "seq2seq")
        if value is None or is_blank:
            return f"with an empty {what}"
        if is_nan(value):
            return f"with a missing {what} (NA, NaN, None)"
    may_be_text = kind in ("prompt", "pair") or kind.startswith("preference")
    if may_be_text:
        cells = {name: read_turns(value, f"{where}, column {name}") for name, value in cells.items()}
    has_messages = any(isinstance(value, list) for value in cells.values())
    system = read_optional_text(others, "system", where) if may_be_text or kind == "chat" else ""
    tools = others.get(TOOLS_COLUMN)
    if may_be_text and not has_messages and kind != "preference_chat":
        for name, value in (("system", system), (TOOLS_COLUMN, read_tools(tools, where))):
            if value:
                trouble = f"column {name} is not empty, but {' and '.join(cells)} hold texts, which have none"
                raise UserError(f"{where}: {trouble}: write them as lists of messages, or take the column {name} out")
    fields: dict[str, Any] | str | None = None
    if kind in ("alpaca", "alpaca_text"):
        given = {"output": ""} if for_generation else {}
        fields = read_alpaca({**cells, **others, **given}, where, is_chat=kind == "alpaca")
        if for_generation and not isinstance(fields, str):
            fields.get("messages", [None]).pop()
    elif kind == "sharegpt":
        fields = read_sharegpt({**cells, **others}, columns.names[0], tools, where, for_generation=for_generation)
    elif kind.startswith("preference") and not for_generation:
        is_chat, may_guess = has_messages or kind == "preference_chat", kind == "preference_alone"
        fields = read_pair(cells, tools, system, where, is_chat=is_chat, may_guess=may_guess)
    elif kind == "chat" or (kind in ("pair", "prompt") and has_messages):
        fields = read_chat(cells, tools, where, system=system, for_generation=for_generation)
    if fields is not None:
        return fields if isinstance(fields, str) else Example(**{**fields, **known})
    for name, value in cells.items():
        check_text(value, f"{where}, column {name}")
    if kind == "text":
        return Example(text=row[columns.names[0]], **known)
    prompt, completion = (*cells.values(), None)[:2]
    return Example(prompt=prompt, completion=completion, **{"lead_text": prompt, **known})


def build_schema() -> pa.Schema:
    """The schema of the row files: `row_id` (position in the source, evaluation files first; unique over both splits),
    `mix_entry` (the entry of `data.mix`; 0 without a mix), and fields of `Example`, those of chats as JSON."""
    import pyarrow as pa

    others = {"row_id": pa.int64(), "mix_entry": pa.int64(), "first_trained": pa.int64(), "weight_0": pa.list_(pa.int64())}
    return pa.schema([(name, others.get(name, pa.string())) for name in ("row_id", "mix_entry", *_STORED)])


def list_cells(row: Example) -> list[Any]:
    """The cells of an example in the row files."""
    cells = (row.prompt, row.completion, row.rejected, row.text, row.messages, row.tools)
    texts = [json.dumps(cell, ensure_ascii=False) if isinstance(cell, list) else cell for cell in cells]
    return [*texts, row.first_trained, row.weight_0, row.lead_text]


def read_examples(rows: Mapping[str, Iterable[Any]]) -> list[Example]:
    """The examples in rows of the row files, given by column."""
    examples, none = [], [None] * len([*rows["prompt"]])  # older files have no column `rejected`
    for cells in zip(*(rows.get(name, none) for name in _STORED), strict=True):
        fields = dict(zip(_STORED, cells, strict=True))
        of_chat = ("messages", "tools", "rejected") if fields["messages"] is not None else ()
        fields |= {name: json.loads(fields[name]) for name in of_chat if fields[name] is not None}
        examples.append(Example(**fields))
    return examples
