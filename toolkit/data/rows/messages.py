"""Chats: checks the messages of a row, and brings them and their tools into one form.

A malformed conversation is an error that names the row, because it hints at a broken export. An empty one is left out and
counted, as rows with empty cells are.
"""

import re
from collections.abc import Mapping
from typing import Any

from toolkit.data.sources.row import check_text, is_nan
from toolkit.errors import UserError
from toolkit.files.json_lines import DECODER

ROLES = ("system", "user", "assistant", "tool")
_OTHER_ROLES = {"function": "tool", "developer": "system"}
"""OpenAI's, before there were tools, and in place of `system` for models that reason."""
TOOLS_COLUMN = "tools"
_MESSAGE_FORM = 'write {"role": ..., "content": ...}'
_WEIGHTS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Keys that say whether a turn counts in the loss: OpenAI's `weight`, axolotl's `train` and `training`, ms-swift's `loss`, …"""
_OTHER_WEIGHTS = {"train_detail", "loss_scale", "mask", "masked"}
"""Keys that say it for parts of a turn, by other numbers, or the other way round."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_PRINTED = re.compile(r"\s*\[?\s*\{'(role|content|from|value)': ")


def read_chat(
    cells: Mapping[str, Any], tools: Any, where: str, *, system: str, calls_may_be_text: bool = False, for_generation: bool
) -> dict[str, Any] | str:
    """The fields of a chat's `Example`, or the reason to skip it. A malformed conversation is a `UserError`.

    Args:
        cells: by column: the messages; or a prompt and its completion, of which at least one is a list of messages.
        tools: the cell of the tools.
        where: file and row, for messages.
        system: the text of a column `system`, which becomes the first turn.
        calls_may_be_text: a tool may answer any assistant turn, not only one with `tool_calls`.
        for_generation: the answer may be missing; assistant turns at the end are left out.
    """
    names, (*first, completion) = list(cells), cells.values()
    for name, value in cells.items():
        if first and not isinstance(value, list):
            raise UserError(
                f"{where}: columns {names[0]} and {names[1]} are of different kinds, and {name} is not a list of messages: "
                "make both text, or both lists of messages"
            )
    prompt, column = first[0] if first else [], names[-1]
    completion = read_list(completion, "a list of messages", f"{where}, column {column}", f"{_MESSAGE_FORM} for each in a list")
    # Broken conversations are errors.
    messages = [read_message(item, f"{where}, message {i}") for i, item in enumerate([*prompt, *completion], start=1)]
    _check_order(messages, where, calls_may_be_text=calls_may_be_text)
    while for_generation and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if for_generation and all(message["role"] == "system" for message in messages):
        return "without a turn to answer"
    if not for_generation and all(message["role"] != "assistant" for message in messages[len(prompt) :]):
        raise UserError(f"{where}, column {column}: no assistant turn, so there is nothing to train on: leave the row out")
    # Conversations with nothing to train on are skipped and counted.
    for message in messages:
        if message["role"] in ("user", "assistant") and not (message["content"].strip() or message.get("tool_calls")):
            return f"with an empty {message['role']} turn"
    weight_0 = [i for i, message in enumerate(messages) if _take_weight(message, f"{where}, message {i + 1}") == 0]
    roles = [message["role"] for message in messages]
    if not for_generation and all(role != "assistant" or i in weight_0 for i, role in enumerate(roles) if i >= len(prompt)):
        return "with weight 0 on every assistant turn"
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        prompt = prompt and [messages[0], *prompt]
        weight_0 = [i + 1 for i in weight_0]
    elif system and messages[0]["content"] != system:
        raise UserError(f"{where}: the column system and the system turn are different texts: leave one of them out")
    return {"messages": messages, "tools": read_tools(tools, where), "first_trained": len(prompt), "weight_0": weight_0}


def read_message(item: Any, where: str) -> dict[str, Any]:
    """A message with content and calls as templates expect them. Keys of a message, or of a call, that are null are left out;
    nulls in arguments and in the schemas of tools are the user's own."""
    if not isinstance(item, dict):
        raise UserError(f"{where}: {item!r:.60} is not a message: {_MESSAGE_FORM}")
    message = _without_nulls(item)
    if {"from", "value"} <= message.keys() and "role" not in message:
        raise UserError(f"{where} has from and value, as ShareGPT's turns do: set data.format sharegpt")
    if "role" not in message:
        raise UserError(f"{where} has no role (its keys: {', '.join(map(str, message)) or 'none'}): {_MESSAGE_FORM}")
    message["role"] = _OTHER_ROLES.get(str(message["role"]), message["role"])
    if message["role"] not in ROLES:
        raise UserError(f"{where}: {message['role']!r:.60} is not a role: write one of {', '.join(ROLES)}")
    if call := message.pop("function_call", None):  # likewise
        if message.get("tool_calls"):
            raise UserError(f"{where} has function_call and tool_calls: leave one of them out")
        message["tool_calls"] = [{"type": "function", "function": call}]
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # an empty list, which some templates print as a call
    else:
        if message["role"] != "assistant":
            raise UserError(f"{where}: tool calls of role {message['role']}: only an assistant turn calls tools")
        message["tool_calls"] = _read_tool_calls(message["tool_calls"], where)
        message.setdefault("content", "")
    if isinstance(parts := message.get("content"), list):  # OpenAI's parts, each of type text
        for part in parts:
            is_text = isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str)
            if not is_text:
                raise UserError(f"{where}, content: {part!r:.60} is not a part of type text: leave the part or the row out")
        message["content"] = "".join(part["text"] for part in parts)
    if "content" not in message:
        raise UserError(f"{where} has no content (its keys: {', '.join(map(str, message))}): {_MESSAGE_FORM}")
    check_text(message["content"], f"{where}, content")
    _check_values(message, where)
    return message


def _take_weight(message: dict[str, Any], where: str) -> int:
    """Remove the keys of `_WEIGHTS` from a message and return what they say: 0 (does not count in the loss) or 1, the default.

    Weight 0 on another turn than the assistant's changes nothing. Columns with nulls turn whole numbers into 0.0 and 1.0.
    """
    for key in message.keys() & _OTHER_WEIGHTS:
        raise UserError(f'{where}: {key} is not read: write "weight": 0 for a turn that does not count in the loss')
    given = {key: message.pop(key) for key in _WEIGHTS if key in message}
    allowed = (0, 1) if message["role"] == "assistant" else (0,)
    if any(value not in allowed for value in given.values()) or len(set(given.values())) > 1:
        found = " and ".join(f"{key} {value!r:.60}" for key, value in given.items())
        raise UserError(
            f"{where}, a turn of role {message['role']}: {found}: write 0 for a turn that does not count in the loss, 1 or none "
            "for an assistant turn that does"
        )
    return int(all(given.values()))


def _read_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{where}: tool_calls {calls!r:.60} is not a list of calls: write a list of objects")
    read = []
    for call in calls:
        call = _without_nulls(call)
        function = _without_nulls(call.get("function", call))
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f'{where}: a tool call without a name: write {{"function": {{"name": ..., "arguments": {{...}}}}}}')
        if isinstance(function.get("arguments"), str):  # OpenAI's format; templates expect the object
            function = {**function, "arguments": read_json(function["arguments"], f"{where}, arguments of {function['name']}")}
        read.append({**call, "function": function} if "function" in call else function)
    return read


def _check_order(messages: list[dict[str, Any]], where: str, *, calls_may_be_text: bool) -> None:
    """Refuse an impossible order of roles. Whether roles must alternate is up to the chat template."""
    before = None
    calls_are_open = False
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role == "system" and before is not None:
            trouble = "a system turn comes after others: put it first"
        elif role == "assistant" and before in (None, "system"):
            trouble = "the assistant speaks first: begin with a user turn"
        elif role == "tool" and not calls_are_open:
            trouble = "a tool turn follows no assistant turn with tool_calls: put it behind its call"
        else:
            before = role
            calls_are_open = calls_are_open if role == "tool" else bool(message.get("tool_calls"))
            calls_are_open |= calls_may_be_text and role == "assistant"
            continue
        raise UserError(f"{where}, message {number}: roles out of order, {trouble}")


def read_tools(tools: Any, where: str) -> list[Any] | None:
    read, place = [], f"{where}, column {TOOLS_COLUMN}"
    tools = read_list(tools, "a list of tools", place, "write a list of JSON schemas", is_optional=True)
    for number, tool in enumerate(tools, start=1):
        tool = read_json(tool, f"{where}, tool {number}") if isinstance(tool, str) else tool
        if not isinstance(tool, dict):
            raise UserError(f"{where}, tool {number}: {tool!r:.60} is not a tool: write its JSON schema as an object")
        _check_values(tool, f"{where}, tool {number}")
        read.append(tool)
    return read or None


def read_list(value: Any, what: str, where: str, remedy: str, *, is_optional: bool = False) -> list[Any]:
    """A cell that is a list, or JSON text of one; if it may be missing, nothing is an empty list. Others are a `UserError`."""
    if isinstance(value, str) and value.strip():
        value = read_json(value, where)
    if is_optional and (is_nan(value) or not value):
        return []
    if not isinstance(value, list):
        raise UserError(f"{where}: {value!r:.60} is not {what}: {remedy}")
    return value


def refuse_printed(text: str, where: str) -> None:
    """Refuse messages as Python, numpy and pandas print them, which a CSV file of theirs has."""
    if _PRINTED.match(text) and text.rstrip()[-1] in "]}":
        remedy = "write the column as JSON, as in df[column].map(lambda cell: json.dumps(list(cell)))"
        raise UserError(f"{where}: {text!r:.60} are messages as Python prints them: {remedy}")


def read_json(text: str, where: str) -> Any:
    """The value of a cell that is JSON text; a `UserError` if it is not."""
    refuse_printed(text, where)
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        reason = str(error).replace("line 1 column", "column")
        raise UserError(f"{where}: not JSON ({reason}): {text!r:.60}") from None


def _without_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _check_values(value: Any, where: str) -> None:
    """Check that all strings are valid text and that JSON can represent every value."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_text(key, f"{where}, a key")
            _check_values(item, f"{where}, {key}")
    elif isinstance(value, list):
        for item in value:
            _check_values(item, where)
    elif not isinstance(value, bool | int | float | None):
        check_text(value, where)
