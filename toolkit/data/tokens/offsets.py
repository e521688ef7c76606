"""Tokenizes texts so that the end of each prompt is an exact token boundary.

At inference the model gets the prompt alone, so the tokens before a prompt's end (a marked place) are those of the prompt
tokenized alone. The tokens after it are those of the full text. Only if a token would span the boundary (the last space of a
prompt and the first word of its completion, two line breaks), the rest is tokenized separately, without the space that some
tokenizers put before every text, because it is not the beginning of one.

Every tokenizer splits a text at its added tokens (`<|im_end|>`) first, so a prompt is compared only from the last one on. Most
byte-level ones then split it into words, which mostly are the same whatever follows: such a prompt is not tokenized at all.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.data.tokens.special_tokens import mark, swap_marks

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

_MOST_CHARACTERS_AT_ONCE = 2**22
"""Characters per call: the library holds about 150 bytes per token until its result is read."""
_MORE_THAN_ANY_TEXT = 2**40
_BLOCK_CHARACTERS = 2**18
# Boundaries that hardly any tokenizer's tokens span: after a single line break, else before a single space.
_BLOCK_ENDS = (re.compile(r"(?<=\S\n)(?=\S)"), re.compile(r"(?<=\S)(?= \S)"))
# In the regular expression of a tokenizer: what sees more than a word's own characters, unless it is `|\s+(?!\S)|\s+`.
_LOOKS_AROUND = re.compile(r"(?!(?<=\|\\s\+)\(\?!\\S\)\|\\s\+(?![^|]))\(\?(?!i?:)|\\[bBAzZGK]|\$|(?<!\[)\^")


class TokenizedText(NamedTuple):
    """Token ids of a text with their start and end offsets in characters.

    A token begins where the previous one ends, even if its own offsets leave out a space between them, so no character is lost.
    """

    input_ids: np.ndarray
    """int32."""
    starts: np.ndarray
    ends: np.ndarray
    firsts: tuple[int, ...] = ()
    """The index of the first token after each marked place."""


class _Encoders(NamedTuple):
    whole: Tokenizer
    behind: Tokenizer
    """Adds no space before a text."""
    added_tokens: dict[int, str]
    keeps_words: bool


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], places: Sequence[Sequence[int]], are_chats: Sequence[bool] = ()
) -> list[TokenizedText]:
    """Token ids of texts, with only those special tokens that are written in the text.

    A long text without marked places is tokenized in blocks, so that time grows linearly and memory is bounded.

    Args:
        tokenizer: a fast tokenizer, not changed between calls.
        places: for each text, the character positions where prompts end, in order.
        are_chats: for each text, whether its special tokens are marked.
    """
    # Tokenize every text in full; go on with those whose prompts may have other tokens alone.
    if is_marked := any(are_chats):
        texts = [text if is_chat else swap_marks(tokenizer, text) for text, is_chat in zip(texts, are_chats, strict=True)]
    encoders = _build_encoders(tokenizer, is_marked)
    tokenized = _encode_in_blocks(encoders, texts, places)
    places = [() if tokens.firsts else marked for tokens, marked in zip(tokenized, places, strict=True)]
    if not any(places):
        return tokenized
    # Find the last added token before each marked place, or 0: only from there on can prompts alone have other tokens.
    added = [_find_added(encoders, *pair) for pair in zip(texts, tokenized, strict=True)]
    anchors = [
        [indices[n - 1] if (n := bisect.bisect_right(indices, place, key=tokens.ends.__getitem__)) else 0 for place in marked]
        for tokens, indices, marked in zip(tokenized, added, places, strict=True)
    ]
    pieces = [
        text[tokens.starts[anchor] if anchor else 0 : place]
        for text, tokens, marked, begins in zip(texts, tokenized, places, anchors, strict=True)
        for place, anchor in zip(marked, begins, strict=True)
    ]
    # Tokenize the ends of the prompts alone, most of which are alike in chats, and use their tokens where they differ.
    alone = dict(zip(alike := list(dict.fromkeys(pieces)), _encode(encoders.whole, alike), strict=True))
    prompts = map(alone.__getitem__, pieces)
    return [
        _split(encoders, text, tokens, indices, list(zip(marked, begins, prompts, strict=False))) if marked else tokens
        for text, tokens, indices, marked, begins in zip(texts, tokenized, added, places, anchors, strict=True)
    ]


@functools.lru_cache(maxsize=2)
def _build_encoders(tokenizer: PreTrainedTokenizerBase, is_marked: bool) -> _Encoders:
    from tokenizers import Tokenizer

    backend = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    if is_marked:
        _mark_tokens(backend)
    # Post-processors add special tokens around a text, and may trim spaces from the offsets.
    whole = backend | {"post_processor": None, "truncation": None, "padding": None}
    behind = whole | {name: _leave_out_prefix(whole[name]) for name in ("normalizer", "pre_tokenizer")}
    added_tokens = {token["id"]: token["content"] for token in whole["added_tokens"]}
    built = [Tokenizer.from_str(json.dumps(part)) for part in (whole, behind)]
    encoders = _Encoders(built[0], built[1], added_tokens, _keeps_words(whole))
    for encoder in encoders[:2]:
        encoder.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    return encoders


def _mark_tokens(backend: dict[str, Any]) -> None:
    """Give the special tokens their marked names, so that the plain ones are text, which no model finds in its vocabulary."""
    model = backend["model"]
    names = {token["content"]: mark(token["content"]) for token in backend["added_tokens"] if token["special"]}
    for token in backend["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    made = {pair.replace(" ", "") if isinstance(pair, str) else "".join(pair) for pair in model.get("merges", ())}
    if isinstance(model["vocab"], dict):
        model["vocab"] |= {names[token]: number for token, number in model["vocab"].items() if token in names}
        model["vocab"] = {token: number for token, number in model["vocab"].items() if token not in names or token in made}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def _keeps_words(backend: dict[str, Any]) -> bool:
    """Whether a text has the same words up to the end of one without what follows it; `_find_firsts` has the exceptions.

    An expression that does not look around is matched from left to right, so what it matches before a boundary stays.
    """
    step = backend["pre_tokenizer"] or {}
    steps = step.get("pretokenizers", [step])
    patterns = [step.get("pattern", {}).get("Regex", "") for step in steps if "pattern" in step or step.get("use_regex")]
    return (
        all(step.get("behavior", step.get("type")) in ("Isolated", "Removed", "ByteLevel", "Digits") for step in steps)
        and len(patterns) < 2
        and not any(map(_LOOKS_AROUND.search, patterns))
        and (backend["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and not any(token["single_word"] for token in backend["added_tokens"])
    )


def _leave_out_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """The normalizer or pre-tokenizer without the space that those of Llama 2, Mistral and RoBERTa put before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            return part | {name: [left for inner in part[name] if (left := _leave_out_prefix(inner)) is not None]}
    changes: dict[str, dict[str, Any]] = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    return part | changes.get(part["type"], {})


def _encode(encoder: Tokenizer, texts: Sequence[str], places: Sequence[Sequence[int]] = ()) -> list[TokenizedText]:
    """The tokens of each text; given `places`, with `firsts` if `_find_firsts` finds all of them."""
    rows = zip(texts, itertools.accumulate(map(len, texts)), places or [()] * len(texts), strict=True)
    tokenized: list[TokenizedText] = []
    for _, group in itertools.groupby(rows, key=lambda row: row[1] // _MOST_CHARACTERS_AT_ONCE):
        part, _, marked = zip(*group, strict=True)
        encodings = encoder.encode_batch(part, add_special_tokens=False)
        tokenized += _read(encodings, map(_find_firsts, encodings, part, marked, itertools.repeat(encoder.normalizer)))
    return tokenized


def _find_firsts(encoding: Encoding, text: str, places: Sequence[int], normalizer: object) -> tuple[int, ...]:
    """The index of the first token after each place; empty if one ends no word that is the last one without the rest too.

    White space at an end is all in one word. A normalizer may join a character to the one before, unless it is of ASCII.
    """
    firsts = []
    for place in places:
        first = (encoding.char_to_token(place) or 0) if place < len(text) else len(encoding)
        word = encoding.token_to_word(first - 1) if first else None
        if (
            word is None
            or (encoding.token_to_chars(first - 1) or (0, 0))[1] != place
            or (place < len(text) and encoding.token_to_word(first) == word)
            or (text[place - 2 : place].isspace() and encoding.char_to_word(len(text[:place].rstrip())) != word)
            or (normalizer and not text[place : place + 1].isascii())
        ):
            return ()
        firsts.append(first)
    return tuple(firsts)


def _read(encodings: Sequence[Encoding], firsts: Iterable[tuple[int, ...]]) -> list[TokenizedText]:
    """The tokens of several texts, read at once, because a call of numpy takes as long as the tokens of a short text."""
    chain = itertools.chain.from_iterable
    bounds = [0, *itertools.accumulate(map(len, encodings))]
    input_ids = np.fromiter(chain(encoding.ids for encoding in encodings), np.int32, bounds[-1])
    offsets = np.fromiter(chain(chain(encoding.offsets for encoding in encodings)), np.int64, 2 * bounds[-1])
    # As if the texts followed each other, with a gap: then what is compared with the token before stays within a text.
    gaps = np.repeat(np.arange(len(encodings)) * _MORE_THAN_ANY_TEXT, np.diff(bounds))
    token_starts, token_ends = offsets[::2] + gaps, offsets[1::2] + gaps
    # Several tokens may stand for one character; each then has the character's offsets.
    ends = np.maximum.accumulate(token_ends)
    starts = np.minimum(token_starts, np.maximum(np.concatenate([[0], ends[:-1]]), gaps)) - gaps
    ends -= gaps
    parts = zip(itertools.pairwise(bounds), firsts, strict=True)
    return [TokenizedText(input_ids[i:j], starts[i:j], ends[i:j], found) for (i, j), found in parts]


def _encode_in_blocks(encoders: _Encoders, texts: Sequence[str], places: Sequence[Sequence[int]]) -> list[TokenizedText]:
    bounds = [[0, len(text)] if marked else _cut_blocks(text) for text, marked in zip(texts, places, strict=True)]
    begins = [text[: bound[1]] for text, bound in zip(texts, bounds, strict=True)]
    first = _encode(encoders.whole, begins, places if encoders.keeps_words else ())
    behind = [
        text[start:end]
        for text, bound in zip(texts, bounds, strict=True)
        for start, end in zip(bound[1:], bound[2:], strict=False)
    ]
    if not behind:
        return first
    rest = iter(_encode(encoders.behind, behind))
    return [
        _join([tokens, *(_move(next(rest), start) for start in bound[1:-1])]) for tokens, bound in zip(first, bounds, strict=True)
    ]


def _cut_blocks(text: str) -> list[int]:
    bounds = [0]
    while len(text) - bounds[-1] > _BLOCK_CHARACTERS:
        most = bounds[-1] + _BLOCK_CHARACTERS
        least = most - _BLOCK_CHARACTERS // 2
        last_ends = (max((found.start() for found in end.finditer(text, least, most)), default=0) for end in _BLOCK_ENDS)
        bounds.append(next(filter(None, last_ends), most))
    return [*bounds, len(text)]


def _find_added(encoders: _Encoders, text: str, tokens: TokenizedText) -> list[int]:
    """Indices of added tokens that are written in a text, unlike one that stands for an unknown character."""
    names = [(i, encoders.added_tokens[id]) for i, id in enumerate(tokens.input_ids.tolist()) if id in encoders.added_tokens]
    return [i for i, name in names if text[tokens.starts[i] : tokens.ends[i]].strip() == name.strip()]


def _split(
    encoders: _Encoders, text: str, tokens: TokenizedText, added: list[int], marked: list[tuple[int, int, TokenizedText]]
) -> TokenizedText:
    """Make tokens begin at the marked places; `marked` has each place, its anchor, and the tokens of the text between them."""
    joint, firsts = tokens, []
    cut, cut_index, num_more = 0, 0, 0
    for place, anchor, prompt in marked:
        before, begin = anchor + num_more, int(joint.starts[anchor]) if anchor else 0
        if begin < cut:
            # An earlier prompt ends after this anchor: its tokens stay, and this prompt's are compared from its end on.
            before, begin = cut_index, cut
            first, straddles = _find(tokens, place, before)
            if not straddles:
                firsts.append(first)
                continue
            (prompt,) = _encode(encoders.behind, [text[begin:place]])
        # White space that the tokenizer drops at the end of a text belongs to the next token.
        end = begin + int(prompt.ends[-1]) if len(prompt.ends) else begin
        first, straddles = _find(tokens, end, before)
        if straddles or tokens.input_ids[before:first].tobytes() != prompt.input_ids.tobytes():
            # Replace the prompt's tokens; if a token spans the place, retokenize up to the next added token.
            rest, stop = [], first
            if straddles:
                stop = next((index + num_more for index in added if joint.starts[index] >= end), len(tokens.input_ids))
                stop_place = int(tokens.starts[stop]) if stop < len(tokens.input_ids) else len(text)
                rest = [_move(tokens_behind, end) for tokens_behind in _encode(encoders.behind, [text[end:stop_place]])]
            num_before = len(tokens.input_ids)
            tokens = _join([_take(tokens, slice(before)), _move(prompt, begin), *rest, _take(tokens, slice(stop, None))])
            num_more += len(tokens.input_ids) - num_before
            first = before + len(prompt.input_ids)
            cut, cut_index = end, first
        firsts.append(first)
    return tokens._replace(firsts=tuple(firsts))


def _find(tokens: TokenizedText, place: int, least: int) -> tuple[int, bool]:
    """Index of the first token, from `least` on, that begins at or after a place; and whether the token before spans it."""
    first = max(int(tokens.starts.searchsorted(place)), least)
    return first, first > least and bool(tokens.ends[first - 1] > place)


def _move(tokens: TokenizedText, num_characters: int) -> TokenizedText:
    return TokenizedText(tokens.input_ids, tokens.starts + num_characters, tokens.ends + num_characters)


def _take(tokens: TokenizedText, part: slice) -> TokenizedText:
    return TokenizedText(tokens.input_ids[part], tokens.starts[part], tokens.ends[part])


def _join(parts: Sequence[TokenizedText]) -> TokenizedText:
    if len(parts) == 1:
        return parts[0]
    input_ids, starts, ends = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return TokenizedText(input_ids, starts, ends)
