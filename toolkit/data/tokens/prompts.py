"""Examples of a causal model's run → text, with the positions of the turns that the model has to write; and what a chat template
leaves out of a chat: many know no tools, calls, thinking or system turn, and print the rest.

A template trims and escapes what it prints, and writes a call's arguments as JSON, as Python or as XML. So texts are compared
without what that changes: escapes are decoded; white space, control characters, quotes and backslashes are dropped.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.data.rows.example import Example
from toolkit.data.tokens.chat_template import NoMaskError, RefusedChatError, Turn, render_chat, render_turns
from toolkit.data.tokens.special_tokens import show
from toolkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("tools", "system turn", "text", "thinking", "tool call")

_THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")  # transformers gives templates the first of them that is there
_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[bfnrt])")
_CHANGED = re.compile(r"[\s\x00-\x1f\x7f\"'\\]+")


class Prepared(NamedTuple):
    """An example as text, with the positions of the turns that the model has to write."""

    text: str
    """Of a chat, with its special tokens marked."""
    turns: list[Turn]
    """The turns to train on; for a prompt with its completion, the completion."""
    lead_texts: list[str]
    """The text that the lead baseline reads, for each turn."""
    counts_whole: bool
    """Whether all tokens of the text count in the loss."""
    is_chat: bool
    omitted: str = ""
    """Which of `KINDS` the chat template leaves out of what is not to be trained on."""


def prepare_text(example: Example, loss_on: str) -> Prepared:
    """Prepare a text, or a prompt with its completion."""
    if example.prompt is None or example.completion is None:
        return Prepared(str(example.text), [], [], counts_whole=True, is_chat=False)
    text = example.prompt + example.completion
    turn = Turn(len(example.prompt), len(text), len(text) + 1)  # the end token counts as one more character
    return Prepared(text, [turn], [example.lead_text], counts_whole=loss_on == "all", is_chat=False)


def prepare_chat(tokenizer: PreTrainedTokenizerBase, example: Example, loss_on: str, where: str) -> Prepared:
    """Prepare a chat as its template renders it; a `UserError` if the template refuses the chat, leaves out what is to be trained
    on, or does not show which text is the assistant's, or a turn has weight 0 although all tokens count."""
    messages, tools, weight_0 = example.messages or [], example.tools, example.weight_0
    if weight_0 and loss_on == "all":
        raise UserError(
            f"{where}: message {weight_0[0] + 1} has weight 0, but data.loss_on all counts every token: set it to completions, "
            "or leave the weight out"
        )
    # Render, and locate the assistant's turns; without them, only data.loss_on all is possible.
    turns: list[Turn] = []
    try:
        text, turns = render_turns(tokenizer, messages, tools)
    except NoMaskError as error:
        if loss_on == "completions":
            or_all = ", or set data.loss_on all" if example.rejected is None else ""
            raise UserError(
                f"{where}: the chat template does not show which tokens are the assistant's: {error}; give "
                "data.chat_template with {% generation %} ... {% endgeneration %} around the assistant's text "
                f"(recipes/chat_templates/chatml_generation.jinja is one for ChatML){or_all}"
            ) from None
        text = render_chat(tokenizer, messages, tools)
    except RefusedChatError as error:
        raise UserError(
            f"{where}: the chat template refuses this conversation ({error}): change the row, or set data.chat_template to a "
            "template that takes it"
        ) from None
    # Check that the template has printed everything, then keep the turns to train on.
    trained_turns = set(example.trained_turns)
    omitted = set()
    for what, i, excerpt in find_omissions(show(tokenizer, text), messages, tools, turns):
        # Many templates leave out earlier thinking. Where all tokens count, that is the form that was asked for.
        is_asked_for = what == "thinking" and loss_on == "all" and any(m["role"] == "user" for m in messages[i or 0 :])
        if i in trained_turns and not is_asked_for:
            raise UserError(
                f"{where}: the chat template leaves out the {what} of message {i + 1}, {excerpt!r:.60}, which is to be trained "
                "on: set data.chat_template to a template that prints it, or take it out of the row"
            )
        omitted.add(what)
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [(i, turn) for i, turn in zip(spoken, turns, strict=False) if i in trained_turns]
    lead_texts = [next(m["content"] for m in reversed(messages[:i]) if m["role"] == "user") for i, _ in trained]
    turns = [turn for _, turn in trained]
    return Prepared(text, turns, lead_texts, counts_whole=loss_on == "all", is_chat=True, omitted=", ".join(sorted(omitted)))


def find_omissions(
    text: str, messages: list[dict[str, Any]], tools: list[Any] | None, turns: Sequence[Turn] = ()
) -> Iterator[tuple[str, int | None, str]]:
    """What does not occur in `text`, the rendering of a chat, in the order of the messages. Given the `turns` of all assistant
    messages, each message's text and calls are looked for in its turn, else in all of `text`.

    Yields one of `KINDS`; the 0-based number of its message, None for tools; and the text that is left out, or the first lost
    text of calls or tools, mostly a name.
    """
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    own = dict(zip(spoken, (text[turn.start : turn.end] for turn in turns), strict=False))
    parts = [re.split("</?think>", m["content"]) if m["role"] == "assistant" else [m["content"]] for m in messages]
    every = "\uffff".join(said for *_, said in parts)
    for i, (message, [*thinking, said]) in enumerate(zip(messages, parts, strict=True)):
        thinking += [value for value in [message[key] for key in _THINKING_KEYS if key in message][:1] if isinstance(value, str)]
        place = own.get(i, text)
        if _is_rarer(said, text, every) if place is text else not _occurs(said, place):
            yield "system turn" if message["role"] == "system" else "text", i, said.strip()
        for part in thinking:
            if not _occurs(part, text):
                yield "thinking", i, part.strip()
        if calls := [call.get("function", call) for call in message.get("tool_calls") or []]:
            wanted = [call[key] for call in calls for key in ("name", "arguments", "parameters") if key in call]
            printed = {part.strip() for part in (*thinking, said) if _occurs(part, place)}
            yield from (("tool call", i, lost) for lost in _list_lost(wanted, place, printed)[:1])
    if tools:
        begins, ends = [turn.start for turn in turns], [turn.end for turn in turns]
        rest = "\n".join(text[begin:end] for begin, end in zip([0, *ends], [*begins, len(text)], strict=True))
        functions = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]
        names = [function["name"] for function in functions if isinstance(function.get("name"), str)]
        printed = {m["content"].strip() for m in messages if m["role"] != "assistant" and _occurs(m["content"], rest)}
        yield from (("tools", None, lost) for lost in _list_lost(names, rest, printed)[:1])


def _occurs(part: str, place: str) -> bool:
    return part.strip() in place or _strip(part) in _strip(place)


def _is_rarer(part: str, text: str, every: str) -> bool:
    """Whether a part stands in `text` less often than in the messages, of which others may quote it."""
    pairs = ((form(part.strip()), form(text), form(every)) for form in (str, _strip))
    return part.strip() != "" and all(place.count(part) < whole.count(part) for part, place, whole in pairs)


def _list_lost(values: list[Any], place: str, beside: Iterable[str]) -> list[str]:
    """The texts in JSON values that do not stand in `place` as often as there, beside the texts in `beside`, which it has too."""
    stripped, others = _strip(place), [_strip(text) for text in beside]
    return [
        text
        for (text, *spellings), number in Counter(_list_texts(values)).items()
        if sum(stripped.count(spelling) - sum(other.count(spelling) for other in others) for spelling in spellings) < number
    ]


def _list_texts(value: Any) -> Iterator[tuple[str, ...]]:
    """Each text, number and constant in a JSON value, and its keys: as it is, and as it may stand in a stripped text."""
    if isinstance(value, dict):
        value = [text for pair in value.items() for text in pair]
    if isinstance(value, list):
        for item in value:
            yield from _list_texts(item)
    else:
        yield str(value), *({_strip(value)} if isinstance(value, str) else sorted({json.dumps(value), str(value)}))


@lru_cache(maxsize=16)
def _strip(text: str) -> str:
    """The text without what escaping changes; a text has the same form however often it was escaped."""
    if "\\" in text:
        text = _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or found[3] or "20", 16)), text)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins pairs of \ud83d\ude00
    while "&" in text and (decoded := html.unescape(text)) != text:
        text = decoded
    return _CHANGED.sub("", text)
