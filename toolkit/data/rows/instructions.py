"""Rows of ShareGPT (`conversations`) and Alpaca (`instruction`, `input`, `output`, `system`, `history`) → chats, or prompts with
completions; two answers to one prompt, a chosen and a rejected one, as texts or as lists of messages → pairs."""

import os.path
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from toolkit.data.rows.messages import read_chat, read_json, read_list, read_message, refuse_printed
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
_TURN_OF_TEXT = "\n\nAssistant:"
"""Begins the answers in the texts of HH-RLHF."""


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


def read_pair(
    cells: Mapping[str, Any], tools: Any, system: str, where: str, *, is_chat: bool, may_guess: bool
) -> dict[str, Any] | str:
    """The fields of a pair's `Example`, or the reason to skip it. Malformed messages are a `UserError`.

    Of lists that begin with the same messages, these are the prompt; so is the common beginning of two texts, up to its last
    `Assistant:` line or else to a whole word, as TRL's `extract_prompt` takes it.

    Args:
        cells: by column: the prompt, if it has one, then the chosen and the rejected answer.
        where: file and row, for messages.
        is_chat: texts among the cells are turns.
        may_guess: two texts without a prompt or an `Assistant:` line may begin with one.
    """
    *given, chosen, rejected = cells.values()
    names = list(cells)[-2:]
    if not is_chat:
        for name, value in cells.items():
            check_text(value, f"{where}, column {name}")
        prompt = given[0] if given else _common_beginning(chosen, rejected)
        if not given and not may_guess and not prompt.endswith(_TURN_OF_TEXT):
            trouble = f"columns {names[0]} and {names[1]} do not begin with a prompt that ends in {_TURN_OF_TEXT.strip()!r}"
            raise UserError(f"{where}: {trouble}: set data.prompt_column to the column that has the prompt")
        texts = [chosen, rejected] if given else [chosen[len(prompt) :], rejected[len(prompt) :]]
        if reason := _find_fault(texts, names, is_empty=lambda text: not text.strip()):
            return reason
        if not prompt.strip():
            return "whose answers begin differently, so that they have no prompt"
        return {"prompt": prompt, "completion": texts[0], "rejected": texts[1], "lead_text": prompt}
    # Lists of messages.
    lists = []
    for name, cell in cells.items():
        turns = [{"role": "assistant" if name in names else "user", "content": cell}] if isinstance(cell, str) else cell
        if not isinstance(turns, list):
            raise UserError(f"{where}, column {name}: {turns!r:.60} is not a text or a list of messages: make it one")
        lists.append([read_message(turn, f"{where}, column {name}, message {i}") for i, turn in enumerate(turns, start=1)])
    *given, chosen, rejected = lists
    prompt, answers = given[0] if given else [], [chosen, rejected]
    if not given or any(answer[0]["role"] not in ("assistant", "tool") for answer in answers):
        common = [message for message, _ in takewhile(lambda both: both[0] == both[1], zip(*answers, strict=False))]
        if prompt and not _hold(common, prompt):
            return f"with a prompt that is not that of {names[0]} and {names[1]}"
        prompt, answers = common, [answer[len(common) :] for answer in answers]
    if reason := _find_fault(answers, names, is_empty=lambda answer: not answer):
        return reason
    if any(answer[0]["role"] != "assistant" for answer in answers):
        return f"whose {names[0]} and {names[1]} have different prompts"
    read = [
        read_chat({"prompt": prompt, name: answer}, tools, where, system=system, for_generation=False)
        for name, answer in zip(names, answers, strict=True)
    ]
    for of_answer in read:
        if isinstance(of_answer, str):
            return of_answer
        if any(place >= of_answer["first_trained"] for place in of_answer["weight_0"]):
            raise UserError(f"{where}: a turn of an answer has weight 0, but answers count as a whole: leave the weight out")
    first, second = (of_answer for of_answer in read if not isinstance(of_answer, str))
    return {**first, "weight_0": [], "rejected": second["messages"]}


def _find_fault(answers: list[Any], names: list[str], is_empty: Any) -> str:
    """Why two answers cannot be compared; empty if they can."""
    empty = [name for name, answer in zip(names, answers, strict=True) if is_empty(answer)]
    if len(empty) == 2 or answers[0] == answers[1]:
        return "with two equal answers"
    return f"with an empty {empty[0]}" if empty else ""


def _common_beginning(first: str, second: str) -> str:
    common = os.path.commonprefix([first, second])
    if _TURN_OF_TEXT in common:
        return common[: common.rindex(_TURN_OF_TEXT) + len(_TURN_OF_TEXT)]
    return re.sub(r"\s*\S*\Z", "", common) if common not in (first, second) else common


def _hold(messages: Sequence[Any], prompt: Sequence[Any]) -> bool:
    """Whether a prompt is among `messages`, perhaps after a system turn or earlier turns, or before others of both answers."""
    said, asked = ([(message["role"], message["content"].strip()) for message in each] for each in (messages, prompt))
    return any(said[place : place + len(asked)] == asked for place in range(len(said)))
