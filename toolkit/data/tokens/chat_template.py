"""Chats as text: rendered by a chat template, with the places of the assistant's turns.

A template is a program that prints a chat; where in its output a turn begins and ends it says only if it has `{% generation %}`
markers. Without them the places come from what it prints of the chat's beginnings: of the messages before a turn with the
generation prompt, and of those up to and with it. Both must begin the text of the whole chat, or the template changes earlier
turns when later ones come, as those do that leave out earlier thinking, and no place can be trusted.

The text of a turn ends with its end-of-turn token, which is trained on: a model that never learns it never stops. It is the
first special token behind what the message says. What the template prints after it is not the turn's, because generation ends
before it: a line break, the end token of a document (Phi-3), the generation prompt though nobody asked for it (early Llama 3).
"""

from __future__ import annotations

import datetime
import os
import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from toolkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Templates print today's date, by `strftime_now` or (Llama's) a variable. Rows must not depend on the day that they were
# tokenized on; it is the date that Llama 3.1 falls back to. No other clock is in reach of a template.
_CLOCK = datetime.datetime(2024, 7, 26)

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What rendering raises: the template's own refusals, and Python's of the operations in it."""


class Turn(NamedTuple):
    """Places in a text, in characters, of what the model is to write."""

    start: int
    content_end: int
    """End of what it says, before the tokens that end its turn."""
    end: int
    """End of the turn, with them."""


class NoMaskError(Exception):
    """Why the template cannot say which text is the assistant's."""


def read_chat_template(setting: str) -> str:
    """The template that `data.chat_template` holds or names.

    Raises:
        UserError: no such file, or one that is not text.
    """
    if any(mark in setting for mark in ("{{", "{%", "\n")):
        return setting
    path = Path(setting).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"data.chat_template {setting} cannot be read ({error.strerror}): give a file, or the template") from None
    except UnicodeDecodeError as error:
        raise UserError(f"data.chat_template {setting} is not valid UTF-8 ({error.reason}): convert the file") from None


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a broken template before any row is read.

    Raises:
        UserError: a syntax error, naming the line.
    """
    if tokenizer.chat_template is not None:
        try:
            render_chat(tokenizer, [{"role": "user", "content": "a"}], None)
        except UserError:
            raise
        except TEMPLATE_ERRORS:
            return  # it may want more than one message


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None, *, for_generation: bool = False
) -> str:
    """The template's text of a chat.

    Raises:
        UserError: no template, or one with a syntax error.
        One of `TEMPLATE_ERRORS`: it cannot print these messages.
    """
    return _render(tokenizer, messages, tools, add_generation_prompt=for_generation)[0]


def find_turns(
    tokenizer: PreTrainedTokenizerBase, text: str, messages: list[dict[str, Any]], tools: list[Any] | None
) -> list[Turn]:
    """The assistant's turns in `text`, which is `messages` rendered whole; one for each assistant message.

    Raises:
        NoMaskError: the template cannot tell.
        UserError, or one of `TEMPLATE_ERRORS`: as `render_chat`.
    """
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    special_tokens = list_special_tokens(tokenizer)
    if _GENERATION_MARKER.search(_get_template(tokenizer, tools)):
        _, marked = _render(tokenizer, messages, tools, return_assistant_tokens_mask=True)
        spans = _merge(marked)
        if len(spans) != len(spoken):
            raise NoMaskError(f"its {{% generation %}} markers mark {len(spans)} texts for {len(spoken)} assistant turns")
        return [
            Turn(start, start + _find_ends("", text[start:end], messages[i], special_tokens).content_end, end)
            for i, (start, end) in zip(spoken, spans, strict=True)
        ]
    turns = []
    for i in spoken:
        prompt = _render_beginning(tokenizer, text, messages[:i], tools, special_tokens, for_generation=True)
        end = len(_render_beginning(tokenizer, text, messages[: i + 1], tools, special_tokens, for_generation=False))
        start = len(prompt)
        ends = _find_ends(prompt, text[start:end], messages[i], special_tokens)
        turns.append(Turn(start, start + ends.content_end, start + ends.end))
    return turns


def list_special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What decoding leaves out when asked to skip special tokens."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*added, *map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)


def _merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Marked texts without empty ones; a template may mark a turn in several parts."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return merged


class _Ends(NamedTuple):
    content_end: int
    end: int


def _find_ends(prompt: str, turn: str, message: dict[str, Any], special_tokens: list[str]) -> _Ends:
    """Where in the text of one turn, printed behind `prompt`, its content ends, and where its end-of-turn token does.

    Raises:
        NoMaskError: the text goes on with another generation prompt, and nothing tells where.
    """
    any_special = "|".join(map(re.escape, special_tokens)) or "(?!)"
    said = _find_content_end(turn, message)
    if said is not None and (mark := re.compile(any_special).search(turn, said)):
        return _Ends(mark.start(), mark.end())
    shared = os.path.commonprefix([prompt.rstrip()[::-1], turn.rstrip()[::-1]])[::-1]
    if said is None:
        goes_on = any(text.strip() for text in re.split(any_special, shared)[1:])
        closing = re.search(rf"(?:{any_special}|\s)*\Z", turn)
        assert closing is not None, "it matches an empty text too"
        ends = re.compile(rf"(?:{any_special})+").search(turn, closing.start())
        found = _Ends(ends.start(), ends.end()) if ends else _Ends(len(turn.rstrip()), len(turn))
    else:
        # A template for another tokenizer, whose <|im_end|> is plain text to this one, or one that ends turns with a line break.
        after = turn[said:].strip()
        goes_on = after != "" and shared.endswith(after)
        found = _Ends(said, len(turn.rstrip()) if after else len(turn))
    if goes_on:
        raise NoMaskError(
            "it prints a generation prompt after the last turn without being asked, so the turn's end cannot be told"
        )
    return found


def _find_content_end(turn: str, message: dict[str, Any]) -> int | None:
    """End of the message's content in the text of its turn; None: it is not there once, or not all that the message says."""
    content = message["content"].strip()
    if not content or message.get("tool_calls"):
        return None
    num_spaces = len(turn) - len(turn.lstrip())
    if turn.startswith(content, num_spaces):
        return num_spaces + len(content)
    return turn.index(content) + len(content) if turn.count(content) == 1 else None


def _render_beginning(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    special_tokens: list[str],
    *,
    for_generation: bool,
) -> str:
    """The text of a chat's first messages, which must begin the text of the whole."""
    try:
        beginning = render_chat(tokenizer, messages, tools, for_generation=for_generation)
    except UserError:
        raise
    except TEMPLATE_ERRORS as error:
        raise NoMaskError(f"it refuses the first {len(messages)} messages on their own ({error})") from None
    if text.startswith(beginning):
        return beginning
    if not for_generation and special_tokens:
        # Phi-3's closes every text with the end token of a document, behind that of the turn; a longer chat has it only later.
        any_special = f"({'|'.join(map(re.escape, special_tokens))})"
        pairs = zip(re.split(any_special, beginning), re.split(any_special, text), strict=False)
        common = "".join(ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        is_only_closed = not re.sub(any_special, "", beginning[len(common) :]).strip()
        if is_only_closed and re.search(rf"{any_special}\s*\Z", common):
            return common
    raise NoMaskError(
        f"it prints the first {len(messages)} messages differently when more follow (as if it left out earlier thinking)"
    )


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
    """Text and the places that `{% generation %}` markers mark, where asked for."""
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    template = _get_template(tokenizer, tools)
    variables: dict[str, Any] = {**tokenizer.special_tokens_map, "date_string": _CLOCK.strftime("%d %b %Y"), **options}
    try:
        # What is given for a variable becomes plain data, so no function: the compiled template, which is cached, gets ours.
        _compile_jinja_template(template).environment.globals["strftime_now"] = _CLOCK.strftime
        rendered: Any = render_jinja_template(conversations=[messages], tools=tools, chat_template=template, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the chat template is broken in line {error.lineno} ({error.message}): {_get_line(template, error.lineno)!r:.80}; "
            "correct it, or set data.chat_template"
        ) from None
    texts, all_spans = rendered
    return texts[0], all_spans[0] if all_spans else []


def _get_line(text: str, number: int) -> str:
    return re.split(r"\r\n|\r|\n", text)[number - 1].strip()  # where jinja ends lines; splitlines() knows more of them
