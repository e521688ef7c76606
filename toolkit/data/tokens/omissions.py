"""What a chat template leaves out of a chat: many know no tools, calls, thinking or system turn, and print the rest.

A template trims and escapes what it prints, and writes a call's arguments as JSON, as Python or as XML. So texts are compared
without what that changes: escapes are decoded; white space, control characters, quotes and backslashes are dropped.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from toolkit.data.tokens.chat_template import Turn

KINDS = ("tools", "system turn", "text", "thinking", "tool call")

_THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")  # transformers gives templates the first of them that is there
_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[bfnrt])")
_CHANGED = re.compile(r"[\s\x00-\x1f\x7f\"'\\]+")


class Omission(NamedTuple):
    """Something that the template does not print."""

    what: str
    """One of `KINDS`."""
    message: int | None
    """The 0-based number of its message; None for tools."""
    excerpt: str
    """The text that is left out, or the name of the call or tool."""


def find_omissions(
    text: str, messages: list[dict[str, Any]], tools: list[Any] | None, turns: Sequence[Turn] = ()
) -> Iterator[Omission]:
    """What does not occur in `text`, the rendering of a chat, in the order of the messages.

    Args:
        turns: of all assistant messages: each message's text and calls are looked for in its turn. If empty, they are looked for
            in all of `text`.
    """
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    own = dict(zip(spoken, (text[turn.start : turn.end] for turn in turns), strict=False))
    for i, message in enumerate(messages):
        *thinking, said = re.split("</?think>", message["content"]) if message["role"] == "assistant" else [message["content"]]
        thinking += [value for value in [message[key] for key in _THINKING_KEYS if key in message][:1] if isinstance(value, str)]
        place = own.get(i, text)
        if not _occurs(said, place):
            yield Omission("system turn" if message["role"] == "system" else "text", i, said.strip())
        for part in thinking:
            if not _occurs(part, text):
                yield Omission("thinking", i, part.strip())
        wanted: Counter[frozenset[str]] = Counter()
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            wanted.update(_list_texts([function[key] for key in ("name", "arguments", "parameters") if key in function]))
            # Whatever the content mentions must stand there once more.
            if not _all_occur(wanted, place, {part.strip() for part in (*thinking, said) if _occurs(part, place)}):
                yield Omission("tool call", i, function["name"])
                break
    if tools:
        begins, ends = [turn.start for turn in turns], [turn.end for turn in turns]
        rest = "\n".join(text[begin:end] for begin, end in zip([0, *ends], [*begins, len(text)], strict=True))
        mentions = [m["content"] for m in messages if m["role"] != "assistant" and _occurs(m["content"], rest)]
        for tool in tools:
            name = (tool["function"] if isinstance(tool.get("function"), dict) else tool).get("name")
            if isinstance(name, str) and not _all_occur(Counter(_list_texts(name)), rest, mentions):
                yield Omission("tools", None, name)
                break


def _occurs(part: str, place: str) -> bool:
    return part.strip() in place or _strip(part) in _strip(place)


def _all_occur(wanted: Counter[frozenset[str]], place: str, beside: Iterable[str]) -> bool:
    """Whether each text, in one of its spellings, stands in `place` as often as wanted, beside the texts `beside`."""
    stripped, others = _strip(place), [_strip(text) for text in beside]
    return all(
        sum(stripped.count(spelling) for spelling in spellings)
        >= number + sum(other.count(spelling) for other in others for spelling in spellings)
        for spellings, number in wanted.items()
    )


def _list_texts(value: Any) -> Iterator[frozenset[str]]:
    """The spellings of each text, number and constant in a JSON value, and of its keys."""
    if isinstance(value, dict):
        value = [text for pair in value.items() for text in pair]
    if isinstance(value, list):
        for item in value:
            yield from _list_texts(item)
    else:
        yield frozenset({_strip(value)} if isinstance(value, str) else {json.dumps(value), str(value)})


def _strip(text: str) -> str:
    """The text without what escaping changes; a text has the same form however often it was escaped."""
    if "\\" in text:
        text = _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or found[3] or "20", 16)), text)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins pairs of \ud83d\ude00
    while "&" in text and (decoded := html.unescape(text)) != text:
        text = decoded
    return _CHANGED.sub("", text)
