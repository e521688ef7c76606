"""Special tokens in the texts of rows: which belong to a text, and what only looks like one.

Those that targets hold (T5's sentinels, tags, a template's tokens of calls) belong to the text: references keep them, and so does
`decode_texts`. Tokens that pad, begin or end a text never do.
In the content of a chat, what looks like a special token is text. So the special tokens of a chat's text are marked: their first
character is moved into Unicode's last private plane. `tokenize_texts` knows them by that name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from toolkit.data.rows.messages import ROLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLANE = 0x100000
INNER_END = "an end token stands in the middle of the text in {}: generated texts end at it; take it out where it is only text"
LOOKS_SPECIAL = "messages hold what looks like a special token in {}: there it is text"
Kept = Mapping[str, Sequence[str]]
"""The special tokens that belong to texts. In a decoded text, what matches the first text of each is replaced by the second: the
token, with spaces around it where the tokenizer loses them."""


@lru_cache(maxsize=2)
def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The tokens that decoding with `skip_special_tokens` leaves out."""
    named = dict(zip(map(str, tokenizer.all_special_tokens), tokenizer.all_special_ids, strict=True))
    return named | {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


@lru_cache(maxsize=8)
def compile_special_tokens(tokenizer: PreTrainedTokenizerBase, *forms: Callable[[str], str]) -> re.Pattern[str]:
    """Matches special tokens, the longest first, as they are or in these forms."""
    tokens = sorted({form(token) for token in special_ids(tokenizer) for form in forms or (str,)}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, filter(None, tokens))) or "(?!)")


def mark(token: str) -> str:
    """The name of a special token in the text of a chat, and the token of such a name."""
    first = ord(token[0])
    return (chr(first ^ _PLANE) if not 2**16 <= first < _PLANE else token[0]) + token[1:]


def show(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text of a chat, without marks."""
    return compile_special_tokens(tokenizer, mark).sub(lambda found: mark(found[0]), text)


def swap_marks(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Mark what is not marked, and the other way round."""
    return compile_special_tokens(tokenizer, str, mark).sub(lambda found: mark(found[0]), text)


def mark_content(tokenizer: PreTrainedTokenizerBase, value: Any, left: Collection[str] = ()) -> Any:
    """Messages or tools, with all marked in them that looks like a special token, but those `left`, white space, and those that
    `set_content_tokens` found."""
    if isinstance(value, str):
        own = {*left, *(getattr(tokenizer, "content_tokens", None) or ())}
        return compile_special_tokens(tokenizer).sub(
            lambda found: found[0] if found[0] in own or found[0].isspace() else mark(found[0]), value
        )
    if isinstance(value, list | tuple):
        return type(value)(mark_content(tokenizer, item, left) for item in value)
    if isinstance(value, dict):
        names = [mark_content(tokenizer, key, left) for key in value]
        items = [item if key == "role" and item in ROLES else mark_content(tokenizer, item, left) for key, item in value.items()]
        return dict(zip(names, items, strict=True))
    return value


@lru_cache(maxsize=2)
def list_outer_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The special tokens that belong to no text: they pad, begin or end one, for the model too (`end_token_ids`)."""
    outer = {*tokenizer(text_target="")["input_ids"], *getattr(tokenizer, "end_token_ids", ())}
    outer |= {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    return {token for token, number in special_ids(tokenizer).items() if number in outer}


@lru_cache(maxsize=2)
def compile_inner_ends(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches an end token in a text that goes on after it."""
    ends = {tokenizer.eos_token_id, *getattr(tokenizer, "end_token_ids", ())}
    tokens = [re.escape(token) for token, number in special_ids(tokenizer).items() if number in ends]
    return re.compile(rf"(?:{'|'.join(tokens) or '(?!)'})(?!(?:{compile_special_tokens(tokenizer).pattern}|\s)*\Z)")


def read_target(tokenizer: PreTrainedTokenizerBase, text: str, form: Callable[[str], str] = str) -> tuple[str, set[str]]:
    """A target without the special tokens that belong to no text, unmarked, and the others that it holds."""
    outer = list_outer_tokens(tokenizer)
    held = {form(found) for found in compile_special_tokens(tokenizer, form).findall(text)} - outer
    return compile_special_tokens(tokenizer, form).sub(lambda found: form(found[0]) * (form(found[0]) not in outer), text), held


def decode_texts(tokenizer: PreTrainedTokenizerBase, all_ids: list[list[int]], kept: Kept) -> list[str]:
    """The texts of generated tokens."""
    if not kept:
        return tokenizer.batch_decode(all_ids, skip_special_tokens=True)
    left_out = {number for token, number in special_ids(tokenizer).items() if token not in kept}
    texts = tokenizer.batch_decode([[number for number in ids if number not in left_out] for ids in all_ids])
    return [put_spaces(text, kept) for text in texts]


def put_spaces(text: str, kept: Kept) -> str:
    """A decoded text with the spaces around its special tokens."""
    for place, spaced in kept.values():
        text = re.sub(place, lambda _, spaced=spaced: spaced, text)  # type: ignore[misc]
    return text


def learn_spaces(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[str], targets: Sequence[str]) -> dict[str, list[str]]:
    """`Kept` of these tokens. Many tokenizers, as T5's, lose or add a space beside one: then most of the targets decide."""

    def is_lost(text: str) -> bool:
        ids = [tokenizer(form, add_special_tokens=False)["input_ids"] for form in (text, text.replace(" ", ""))]
        return [str(tokenizer.decode(form)).lstrip(" ") for form in ids] != [text, text.replace(" ", "")]

    kept: dict[str, list[str]] = {}
    for token in tokens:
        name, lost = re.escape(token), [is_lost(f"a {token}"), is_lost(f"{token} a")]
        found = [re.findall(rf"(.?){name}(?=(.?))", text, re.DOTALL) for text in targets if any(lost) and token in text]
        sides = list(zip(*itertools.chain.from_iterable(found), strict=True)) or [(), ()]
        spaces = [" " * (2 * side.count(" ") > sum(map(bool, side))) * there for side, there in zip(sides, lost, strict=True)]
        kept[token] = [name.join(" *" * there for there in lost), token.join(spaces)]
    # Between two tokens are the spaces of the one that has fewer, which comes last.
    return dict(sorted(kept.items(), key=lambda item: len(item[0]) - len(item[1][1])))
