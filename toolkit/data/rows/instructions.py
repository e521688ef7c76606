"""Rows of ShareGPT (`conversations`) and Alpaca (`instruction`, `input`, `output`, `system`, `history`) → chats, or pairs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from toolkit.data.rows.messages import read_chat, read_json, read_list, refuse_printed
from toolkit.data.sources.row import check_text, read_optional_text
from toolkit.errors import UserError
from toolkit.files.json_lines import DECODER

_ROLES = {
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant", "chatgpt", "bot", "model", "bing", "bard"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response"),
}
_CALLS = ("function_call", "tool_call")
"""Roles of a turn of the assistant whose text is a call as JSON."""
_ALPACA = "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
_PAIRED = ", paired with an input that provides further context"


def read_sharegpt(
    row: Mapping[str, Any], column: str, tools: Any, where: str, *, for_generation: bool = False
) -> dict[str, Any] | str:
    """The fields of a chat's `Example`, or the reason to skip it. A column `system` becomes the first turn.

    Dumps of ShareGPT are known for conversations that begin in the middle, so these are left out and counted.
    `for_generation` and errors are those of `read_chat`.
    """
    remedy = 'write a list of {"from": ..., "value": ...}'
    turns = read_list(row[column], "a list of turns", f"{where}, column {column}", remedy)
    messages = [read_turn(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, start=1)]
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if roles[:1] == ["assistant"]:
        return "in which the assistant speaks first"
    if "assistant" not in roles and not (for_generation and messages):
        return "without an assistant turn"
    system = read_optional_text(row, "system", where)
    cells = {column: messages}
    return read_chat(cells, tools, where, system=system, calls_may_be_text=True, for_generation=for_generation)


def read_turns(value: Any, where: str) -> Any:
    """A cell with one or several messages, or ShareGPT's turns, also as JSON text, as a list of messages; others as they are.
    Messages as Python prints them are a `UserError`."""
    turns = value
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        refuse_printed(value, where)
        with suppress(ValueError, RecursionError):
            turns = DECODER.decode(value)
    turns = [turns] if isinstance(turns, dict) else turns
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return value
    if isinstance(value, str) and not all(
        {"role", "content"} <= turn.keys() or {"from", "value"} <= turn.keys() for turn in turns
    ):
        return value  # an answer that is JSON
    return [read_turn(turn, f"{where}, turn {number}") if "from" in turn else turn for number, turn in enumerate(turns, start=1)]


def read_turn(turn: Any, where: str) -> dict[str, Any]:
    """A turn as a message; one that is a message with role and content stays as it is, except for the name of its role."""
    if not isinstance(turn, dict):
        raise UserError(f'{where}: {turn!r:.60} is not a turn: write {{"from": ..., "value": ...}}')
    rest = {key: value for key, value in turn.items() if value is not None}
    given, content = (rest.pop(first, rest.pop(second, None)) for first, second in (("from", "role"), ("value", "content")))
    if not isinstance(given, str) or (content is None and "tool_calls" not in rest):
        missing = "value" if isinstance(given, str) else "from"
        raise UserError(
            f'{where} has no text in "{missing}" (its keys: {", ".join(map(str, turn))}): write {{"from": ..., "value": ...}}'
        )
    name = given.strip().lower()
    if name in _CALLS:
        check_text(content, where)
        calls = read_json(content, where)
        return {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls], **rest}
    role = next((role for role, names in _ROLES.items() if name in names), None)
    if role is None:
        known = ", ".join([name for names in _ROLES.values() for name in names] + [*_CALLS])
        raise UserError(f"{where}: {given!r:.60} is not a role of ShareGPT: write one of {known}")
    return {"role": role, **({} if content is None else {"content": content}), **rest}


def read_alpaca(row: Mapping[str, Any], where: str, *, is_chat: bool) -> dict[str, Any] | str:
    """The fields of an `Example` of Alpaca's columns, or the reason to skip it. A cell that is not text, or a history that is not
    a list of pairs, is a `UserError`. If it `is_chat`, `system` and `history` become turns, and each answer is trained on; else
    all before `output` is the prompt."""
    instruction, given = row["instruction"], read_optional_text(row, "input", where)
    for column in ("instruction", "output"):
        check_text(row[column], f"{where}, column {column}")
    system, history = read_optional_text(row, "system", where), _read_history(row.get("history"), where)
    if any(not text.strip() for pair in history for text in pair):
        return "with an empty text in their history"
    request = f"{instruction}\n\n{given}" if given else instruction
    if is_chat:
        texts = [text for pair in history for text in pair] + [request, row["output"]]
        messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
        return {"messages": [{"role": "system", "content": system}] * bool(system) + messages}
    blocks = [system or _ALPACA.format(paired=_PAIRED if given else "")]
    blocks += [f"### {name}:\n{text}" for pair in history for name, text in zip(("Instruction", "Response"), pair, strict=True)]
    blocks += [f"### Instruction:\n{instruction}", *([f"### Input:\n{given}"] if given else []), "### Response:\n"]
    return {"prompt": "\n\n".join(blocks), "completion": row["output"], "lead_text": request}


def _read_history(history: Any, where: str) -> list[list[str]]:
    remedy = "write [[instruction, answer], ...]"
    history = read_list(history, "a list", f"{where}, column history", remedy, is_optional=True)
    for number, pair in enumerate(history, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UserError(f"{where}, history {number}: {pair!r:.60} is not a pair: write [instruction, answer]")
        for text in pair:
            check_text(text, f"{where}, history {number}")
    return history
