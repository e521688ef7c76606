"""Renders chats with a chat template and finds the assistant's turns in the text.

A template is a program that prints a chat. It marks where a turn begins and ends only if it has `{% generation %}` markers.
Without them, a turn is located by rendering the beginnings of the chat: the messages before the turn plus the generation prompt,
and the messages up to the end of the turn. Both must be prefixes of the full text. Otherwise the template changes earlier turns
when later ones follow (some leave out earlier thinking), and the positions cannot be trusted.

A turn ends with its end-of-turn token, which is trained on: a model that never learns it never stops. This is the first special
token after the message's content. Whatever the template prints after it is not part of the turn, because generation stops
before it: a line break, the end token of a document (Phi-3), an unrequested generation prompt (early Llama 3).
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from toolkit.data.rows.messages import ROLES
from toolkit.data.tokens.special_tokens import (
    compile_special_tokens,
    list_outer_tokens,
    mark_content,
    show,
    special_ids,
    swap_marks,
)
from toolkit.errors import UserError, refusal_named
from toolkit.files.durable import refuse_pointers
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Some templates print today's date, by `strftime_now` or (Llama's) a variable. Rows must not depend on the day of tokenization,
# so templates get a fixed date, the one that Llama 3.1 falls back to. They have no other clock.
_CLOCK = datetime.datetime(2024, 7, 26)
DATE = _CLOCK.strftime("%d %b %Y")

_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What rendering raises: the template's own errors, and Python's for the operations in it."""


class Turn(NamedTuple):
    """Character positions in a text of one turn that the model has to write."""

    start: int
    content_end: int
    """End of the content, before the tokens that end the turn."""
    end: int
    """End of the turn, after those tokens."""


class RefusedChatError(Exception):
    """The template cannot render these messages; the message says why."""


class NoMaskError(Exception):
    """The assistant's text cannot be located; the message says why."""


def read_chat_template(setting: str) -> str:
    """The template in `data.chat_template`, or in the file that it names; a `UserError` if that cannot be read."""
    if any(mark in setting for mark in ("{{", "{%", "\n")):
        return setting
    path = Path(setting).expanduser()
    try:
        with refusal_named(f"data.chat_template {setting} cannot be read", "give a file, or the template"):
            refuse_pointers([path])
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data.chat_template {setting} is not valid UTF-8 ({error.reason}): convert the file") from None


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a template with a syntax error before any row is read, by a `UserError` with its line."""
    if tokenizer.chat_template is not None:
        with suppress(RefusedChatError):  # the template may require more than one message
            render_chat(tokenizer, [{"role": "user", "content": "a"}], None)


def set_content_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str] | None) -> None:
    """Note on the tokenizer which tokens of `model.add_tokens` stay tokens in the content of a chat: those that neither the
    tokenizer nor its template has a use for. A template may build one of a role, in any way, so chats are rendered to see it."""
    used = f"{tokenizer.chat_template} {tokenizer.special_tokens_map}"
    system, user, assistant, tool = ({"role": role, "content": "\ue000"} for role in ROLES)
    call: dict[str, Any] = {**assistant, "tool_calls": [{"type": "function", "function": {"name": "", "arguments": {}}}]}
    for chat in ([user, assistant], [system, user, assistant], [user, call, tool, assistant]) if tokens else ():
        with suppress(RefusedChatError, UserError):  # no template, or one without system turns or tools
            used += _render(tokenizer, chat, None, add_generation_prompt=True)[0]
    tokenizer.content_tokens = tokens and [token for token in tokens if token not in used]  # type: ignore[attr-defined]


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None, *, for_generation: bool = False
) -> str:
    """Render a chat as text, with its special tokens marked as in `special_tokens.py`. No template, or one with a syntax error,
    is a `UserError`; one that cannot render these messages, a `RefusedChatError`."""
    text, _ = _render(tokenizer, *_mark(tokenizer, messages, tools), add_generation_prompt=for_generation)
    return swap_marks(tokenizer, text)


def render_turns(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None
) -> tuple[str, list[Turn]]:
    """As `render_chat`, with the assistant's turns in the text, one per assistant message; a `NoMaskError` if they cannot be
    located."""
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    messages, tools = _mark(tokenizer, messages, tools)
    has_markers = _GENERATION_MARKER.search(_get_template(tokenizer, tools)) is not None
    text, marked = _render(tokenizer, messages, tools, add_generation_prompt=False, return_assistant_tokens_mask=has_markers)
    # The template marks the turns itself.
    if has_markers:
        spans = _merge(marked)
        if len(spans) != len(spoken):
            raise NoMaskError(f"its {{% generation %}} markers mark {len(spans)} texts for {len(spoken)} assistant turns")
        return swap_marks(tokenizer, text), [
            Turn(start, start + _find_ends("", text[start:end], messages[i], tokenizer)[0], end)
            for i, (start, end) in zip(spoken, spans, strict=True)
        ]
    # Otherwise each turn lies between two prefixes of the chat.
    turns = []
    for i in spoken:
        prompt = _render_beginning(tokenizer, text, messages[:i], tools, for_generation=True)
        end = len(_render_beginning(tokenizer, text, messages[: i + 1], tools, for_generation=False))
        start = len(prompt)
        turns.append(Turn(start, *(start + n for n in _find_ends(prompt, text[start:end], messages[i], tokenizer))))
    return swap_marks(tokenizer, text), turns


def _merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent spans, because a template may mark a turn in several parts; drop empty ones."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return merged


def _find_ends(prompt: str, turn: str, message: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Where in the text of a turn, which follows `prompt`, its content and its end-of-turn token end; or a `NoMaskError`."""
    special_tokens = compile_special_tokens(tokenizer, str.strip)  # white space ends no turn
    # The normal case: the content, then a special token.
    said = _find_content_end(turn, message)
    if said is not None and (mark := special_tokens.search(turn, said)):
        return mark.span()
    # A turn that ends like its prompt may contain a second generation prompt.
    shared = os.path.commonprefix([prompt.rstrip()[::-1], turn.rstrip()[::-1]])[::-1]
    if said is None:
        goes_on = any(text.strip() for text in special_tokens.split(shared)[1:])
        closing = re.search(rf"(?:{special_tokens.pattern}|\s)*\Z", turn)
        assert closing is not None, "the pattern matches the empty text"
        ends = re.compile(rf"(?:{special_tokens.pattern})+").search(turn, closing.start())
        found = len(turn.rstrip()), len(turn)
        if ends:  # what closes a call comes before the token that ends the turn
            *closed, last = special_tokens.finditer(turn, *ends.span())
            end = next((token for token in closed if token[0] in list_outer_tokens(tokenizer)), last)
            found = end.start(), ends.end()
    else:
        # The template is for another tokenizer, whose <|im_end|> is plain text here, or it ends turns with a line break.
        after = turn[said:].strip()
        goes_on = after != "" and shared.endswith(after)
        found = said, len(turn.rstrip()) if after else len(turn)
    if goes_on:
        raise NoMaskError(
            "it prints a generation prompt after the last turn without being asked, so the end of the turn is unknown"
        )
    return found


def _find_content_end(turn: str, message: dict[str, Any]) -> int | None:
    """End of the message's content in its turn; None if it does not occur exactly once, or if the message has tool calls too."""
    content = message["content"].strip()
    if not content or message.get("tool_calls"):
        return None
    num_spaces = len(turn) - len(turn.lstrip())
    if turn.startswith(content, num_spaces):
        return num_spaces + len(content)
    return turn.index(content) + len(content) if turn.count(content) == 1 else None


def _render_beginning(
    tokenizer: PreTrainedTokenizerBase, text: str, first: list[dict[str, Any]], tools: list[Any] | None, *, for_generation: bool
) -> str:
    """The text of a chat's first messages, which must be a prefix of the full text."""
    try:
        beginning, _ = _render(tokenizer, first, tools, add_generation_prompt=for_generation)
    except RefusedChatError as error:
        raise NoMaskError(f"it refuses the first {len(first)} messages on their own ({error})") from None
    if text.startswith(beginning):
        return beginning
    if not for_generation:
        # Phi-3's template closes every text with the document's end token, after the turn's; in a longer chat it comes later.
        any_special = f"({compile_special_tokens(tokenizer).pattern})"
        pairs = zip(re.split(any_special, beginning), re.split(any_special, text), strict=False)
        common = "".join(ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        is_only_closed = not re.sub(any_special, "", beginning[len(common) :]).strip()
        if is_only_closed and re.search(rf"{any_special}\s*\Z", common):
            return common
    raise NoMaskError(
        f"it prints the first {len(first)} messages differently when more follow (as if it left out earlier thinking)"
    )


def _mark(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None) -> tuple[Any, Any]:
    """Messages and tools, with what looks like a special token in them marked; but not what the template looks for, as some do
    to cut out thinking."""
    given = (messages, tools)

    def show_chat(left: Collection[str]) -> str:
        marked = mark_content(tokenizer, given, left)
        return show(tokenizer, _render(tokenizer, *marked, add_generation_prompt=False)[0])

    if mark_content(tokenizer, given) == given:
        return given
    with suppress(RefusedChatError):
        every = special_ids(tokenizer).keys()
        if (text := show_chat(every)) == show_chat(()):
            return mark_content(tokenizer, given)
        found = set(compile_special_tokens(tokenizer).findall(str(given)))
        left = {token for token in found if show_chat(every - {token}) != text}
        if show_chat(left) == text:
            return mark_content(tokenizer, given, left)
    return given


def _get_template(tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template, which chats need: set data.chat_template to one, or to a file with one"
        )
    try:
        return tokenizer.get_chat_template(tools=tools)
    except ValueError:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise UserError(f"the tokenizer has chat templates {names}, but no default one: set data.chat_template") from None


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None, **options: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text and, on request, the spans that `{% generation %}` markers mark."""
    template = _get_template(tokenizer, tools)
    variables: dict[str, Any] = {**tokenizer.special_tokens_map, "date_string": DATE, **options}
    compile_template, render = private("_compile_jinja_template"), private("render_jinja_template")
    try:
        # Variables can only be plain data, so our clock function is set on the compiled template, which is cached.
        compile_template(template).environment.globals["strftime_now"] = _CLOCK.strftime
        texts, all_spans = render(conversations=[messages], tools=tools, chat_template=template, **variables)
    except jinja2.TemplateSyntaxError as error:
        line = re.split(r"\r\n|\r|\n", template)[error.lineno - 1].strip()  # as jinja counts; splitlines() splits at more
        raise UserError(
            f"the chat template is broken in line {error.lineno} ({error.message}): {line!r:.80}; correct it, or set "
            "data.chat_template"
        ) from None
    except _TEMPLATE_ERRORS as error:
        raise RefusedChatError(str(error) or type(error).__name__) from None
    return texts[0], all_spans[0] if all_spans else []
