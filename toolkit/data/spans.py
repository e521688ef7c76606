"""Texts → token ids, with the tokens of marked places told apart exactly.

A text is tokenized whole, because that is how a model sees it; tokens are then told apart by their characters. Where a token
reaches over the start of a marked place (the last space of a prompt and the first word of its completion are one token), the
text is tokenized in two parts there: at inference the model gets the part before alone, too. The second part gets no space of
its own from a tokenizer that puts one before every text (`adds_space`): it is not the beginning of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class TokenizedText:
    """Token ids of a text and where each begins and ends in it, in characters.

    A token begins where the one before it has ended, even if its own offsets leave out a space between: so no character is lost.
    """

    input_ids: list[int]
    starts: list[int]
    ends: list[int]

    def straddles(self, place: int) -> bool:
        """Whether a token begins before `place` and ends behind it."""
        return any(start < place < end for start, end in zip(self.starts, self.ends, strict=True))


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], places: Sequence[Sequence[int]]
) -> list[TokenizedText]:
    """Token ids of texts, without special tokens but those that stand in them.

    Args:
        places: of each text, where a token has to begin (in characters).
    """
    tokenized = [_join([(0, *part)]) for part in _encode(tokenizer, texts)] if texts else []
    for i, text in enumerate(texts):
        cuts: set[int] = set()
        while found := {place for place in places[i] if place not in cuts and tokenized[i].straddles(place)}:
            cuts |= found
            bounds = [0, *sorted(cuts), len(text)]
            parts = [text[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
            encoded = _encode(tokenizer, parts[:1]) + _encode_behind(tokenizer, parts[1:])
            tokenized[i] = _join([(bound, *part) for bound, part in zip(bounds, encoded, strict=False)])
    return tokenized


def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it puts a space before every text, as Llama 2's and Mistral's do."""
    return any(token.startswith(("▁", "Ġ")) for token in tokenizer.tokenize("a")[:1])


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))


def _encode_behind(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """`_encode` of parts that follow others."""
    alone = _encode(tokenizer, parts)
    if not adds_space(tokenizer):
        return alone
    # The space goes before a line break, which is a token of its own and left out again.
    behind = []
    for part, (input_ids, offsets) in zip(alone, _encode(tokenizer, [f"\n{text}" for text in parts]), strict=True):
        first = sum(end <= 1 for _, end in offsets)
        is_apart = all(start >= 1 for start, _ in offsets[first:])
        behind.append((input_ids[first:], [(start - 1, end - 1) for start, end in offsets[first:]]) if is_apart else part)
    return behind


def _join(parts: list[tuple[int, list[int], list[tuple[int, int]]]]) -> TokenizedText:
    """Parts of a text, each with the place where it begins, put together."""
    joined = TokenizedText([], [], [])
    for bound, input_ids, offsets in parts:
        end = bound
        for token_start, token_end in offsets:
            # Several tokens may write one character; each then has the offsets of the whole.
            joined.starts.append(min(bound + token_start, end))
            end = max(end, bound + token_end)
            joined.ends.append(end)
        joined.input_ids += input_ids
    return joined
