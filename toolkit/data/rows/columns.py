"""Chooses the columns that rows are read from, and with them the reading: as chats, ShareGPT, Alpaca, pairs or text.

The names of the columns decide, unless `data.format` or a setting of a column does. Columns that fit two readings are refused.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.data.rows.messages import TOOLS_COLUMN
from toolkit.data.sources.files import check_columns
from toolkit.data.sources.row import show_names
from toolkit.errors import UserError


class Columns(NamedTuple):
    """The columns of an input that its examples are made from. Its text is part of the rows' fingerprint."""

    kind: str
    """One of `KINDS`."""
    names: tuple[str, ...]
    """The column of each cell of the kind, then the optional columns that there are."""


class Kind(NamedTuple):
    """A kind of row."""

    cells: tuple[str, ...]
    """Those that must not be empty, as messages name them."""
    how: str
    """How rows of it are read, for messages."""
    optional: tuple[str, ...] = ()
    """Columns that are used where they are there."""


_ALPACA = Kind(("instruction", "output"), "alpaca, as chats for the chat template", ("input", "system", "history"))
_ALPACA_TEXT = "alpaca, as prompts in Alpaca's own words with completions, because the tokenizer has no chat template"
_OF_CHATS = ("system", TOOLS_COLUMN)
_PREFERENCE = Kind(("prompt", "chosen", "rejected"), "pairs of answers", _OF_CHATS)
_WITHOUT_PROMPT = Kind(("chosen", "rejected"), "pairs of answers that hold their prompt", _OF_CHATS)
KINDS = {
    "prompt": Kind(("prompt",), "prompts", (TOOLS_COLUMN,)),
    "seq2seq": Kind(("source", "target"), "a source with its target"),
    "pair": Kind(("prompt", "completion"), "prompt_completion", (TOOLS_COLUMN,)),
    "chat": Kind(("chat",), "messages", _OF_CHATS),
    "text": Kind(("text",), "text"),
    "preference": _PREFERENCE,
    "preference_chat": _PREFERENCE._replace(how="pairs of answers, as chats for the chat template"),
    "preference_alone": _WITHOUT_PROMPT,
    "preference_beside": _WITHOUT_PROMPT,
    "sharegpt": Kind(("conversation",), "sharegpt", _OF_CHATS),
    "alpaca": _ALPACA,
    "alpaca_text": _ALPACA._replace(how=_ALPACA_TEXT),
}
_OF_FORMATS = {"messages": "chat", "prompt_completion": "pair"}
"""The kind of each value of `data.format` that has another name."""
_SETTINGS = "data.messages_column, data.text_column, or data.prompt_column and data.completion_column"


def choose_columns(where: object, existing: Sequence[str], config: LLMDataConfig, *, has_chat_template: bool = False) -> Columns:
    """Choose the columns of an input to read: those that the config names, else those with the default names. A column that does
    not exist once, and columns that fit no reading, or more than one, are a `UserError`. Where there `has_chat_template`,
    Alpaca's rows become chats, else prompts with completions."""
    of_sharegpt = config.messages_column if config.format == "sharegpt" and config.messages_column else "conversations"
    readings: dict[str, tuple[str, ...]] = {
        "messages": (config.messages_column or "messages",),
        "sharegpt": (of_sharegpt,),
        "alpaca": ("instruction", "output"),
        "prompt_completion": _name_two("prompt", config.prompt_column, "completion", config.completion_column),
        "text": (config.text_column or "text",),
    }
    chosen: list[str] = [config.format]
    if config.format == "auto":
        if readings["messages"] == readings["sharegpt"]:
            del readings["sharegpt"]  # the setting says that the column has messages
        fitting = [reading for reading, names in readings.items() if all(name in existing for name in names)]
        configured = set(configured_columns(config).values())
        # ShareGPT's and Alpaca's columns are not set, so no setting chooses them.
        set_by_name = [r for r in fitting if r not in ("sharegpt", "alpaca") and configured.intersection(readings[r])]
        chosen = set_by_name or fitting
    if not chosen:
        wanted = ", ".join(" and ".join(map(repr, names)) for names in readings.values())
        raise UserError(
            f"{where} has none of the columns {wanted} (its columns: {show_names(existing) or 'none'}): set {_SETTINGS}"
        )
    if len(chosen) > 1:
        found = " and ".join(f"{reading} ({' with '.join(map(repr, readings[reading]))})" for reading in chosen)
        raise UserError(
            f"{where} can be read in more than one way, as {found} (its columns: {show_names(existing)}): choose by data.format "
            f"{' or '.join(chosen)}, or by {_SETTINGS}"
        )
    reading, names = chosen[0], readings[chosen[0]]
    check_columns(where, existing, names, remedy=f"data.format {reading} reads {' and '.join(map(repr, names))}")
    return with_optional(reading, names, existing, has_chat_template=has_chat_template)


def with_optional(reading: str, names: tuple[str, ...], existing: Sequence[str], *, has_chat_template: bool) -> Columns:
    """The columns of a reading (a value of `data.format`, or `prompt`), with those optional ones that there are."""
    kind = "alpaca_text" if reading == "alpaca" and not has_chat_template else _OF_FORMATS.get(reading, reading)
    return Columns(kind, names + tuple(name for name in KINDS[kind].optional if name in existing and name not in names))


def describe_columns(columns: Columns, existing: Sequence[str]) -> str:
    """The reading, the columns used and those left out, as in "messages, from messages and tools; not read: id"."""
    *first, last = [show_names([name]) for name in columns.names if name in existing]
    used = f"{', '.join(first)} and {last}" if first else last

    def has_read(name: str) -> bool:
        return any(used.startswith(f"{name}.") for used in columns.names)

    # The parts of an object are named where one of them is read, and else the object.
    known = {*existing}
    parts = [name for name in existing if not (outer := name.rpartition(".")[0]) or outer not in known or has_read(outer)]
    left_out = show_names(name for name in parts if name not in columns.names and not has_read(name))
    return f"{KINDS[columns.kind].how}, from {used}; {f'not read: {left_out}' if left_out else 'no other columns'}"


def choose_seq2seq_columns(
    where: object, existing: Sequence[str], config: DataConfig, *, has_chat_template: bool = False
) -> Columns:
    """As `choose_columns`, of a source text and its target, which are read in one way."""
    names = _name_two("source", config.source_column, "target", config.target_column)
    check_columns(where, existing, names)
    return Columns("seq2seq", names)


def choose_preference_columns(where: object, existing: Sequence[str], config: Any, *, has_chat_template: bool = False) -> Columns:
    """As `choose_columns`, of two answers and their prompt, if it is not in both. Beside a column of system turns or tools, texts
    are chats where there `has_chat_template`; beside other columns, a prompt in both texts is not guessed."""
    answers = _name_two("chosen", config.chosen_column, "rejected", config.rejected_column)
    prompt = config.prompt_column or next((name for name in ("prompt", "conversations") if name in existing), "prompt")
    for name, column in zip(("chosen", "rejected"), answers, strict=True):
        _name_two("prompt", prompt, name, column)
    kind, names = ("preference", (prompt, *answers)) if prompt in existing else ("preference_alone", answers)
    remedy = "set data.chosen_column and data.rejected_column to columns that exist"
    check_columns(where, existing, names, remedy)
    of_chats = [name for name in KINDS[kind].optional if name in existing and name not in names]
    if kind == "preference" and of_chats and has_chat_template:
        kind = "preference_chat"
    if kind == "preference_alone" and any(name not in (*names, *of_chats) and "." not in name for name in existing):
        kind = "preference_beside"
    return Columns(kind, (*names, *of_chats))


def _name_two(first: str, first_column: str | None, second: str, second_column: str | None) -> tuple[str, ...]:
    """Two columns by their settings, with the cells' names as default."""
    names = (first_column or first, second_column or second)
    if names[0] == names[1]:
        raise UserError(f"data.{first}_column and data.{second}_column are both {names[0]}: name two columns")
    return names


def configured_columns(config: DataConfig | LLMDataConfig) -> dict[str, str]:
    """The columns that the config names, by setting."""
    return {f"data.{name}": value for name, value in asdict(config).items() if name.endswith("_column") and value}
