"""Chats, pairs and texts → tokens of a causal model, with -100 as label where a token does not count: what `prepare.py` calls for
its rows."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config.data import LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.rows.example import read_examples
from toolkit.data.rows.load import TextRows
from toolkit.data.tokens.chat_template import check_chat_template, read_chat_template, set_content_tokens
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE, SIDES, describe_cut, describe_lost_text, describe_split, split_text
from toolkit.data.tokens.offsets import TokenizedText, tokenize_texts
from toolkit.data.tokens.prompts import KINDS, Prepared, prepare_chat, prepare_text
from toolkit.data.tokens.special_tokens import (
    INNER_END,
    LOOKS_SPECIAL,
    compile_inner_ends,
    compile_special_tokens,
    mark,
    read_target,
)
from toolkit.data.tokens.tokenizer import train_byte_level_tokenizer
from toolkit.errors import UserError, first_of
from toolkit.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

REPORTED = ("num_given_tokens", "num_lost_tokens", "piece", "is_chat", "is_endless", "omitted", "stop_token_ids")
"""Columns for `report`: tokens before and lost to the cut; a row's 0-based number in its text; a chat, one with an endless turn;
`Prepared.omitted`. Of the last, the tokens that end turns, `prepare.py` keeps the set."""
_NUM_ROWS_TRIED = 1000  # to see whether the tokenizer preserves their text


def set_up(tokenizer: PreTrainedTokenizerBase, config: LLMDataConfig, model: ModelConfig) -> None:
    """Set the tokenizer's chat template, which is exported with it, and refuse an unsuitable tokenizer or template."""
    name = tokenizer.name_or_path or "trained on the rows"
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {name} is a slow one ({type(tokenizer).__name__}) without offsets: convert it to a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer {name} has no end token to put after texts: set eos_token in its tokenizer_config.json")
    least = len(_get_prefix(tokenizer)) + 2
    if config.max_length_tokens < least:
        raise UserError(
            f"data.max_length_tokens = {config.max_length_tokens} leaves no room for a label: give a row at least {least}"
        )
    if config.chat_template:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    check_chat_template(tokenizer)
    set_content_tokens(tokenizer, model.add_tokens)


def list_settings(config: LLMDataConfig, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """What decides the tokens, beside the rows and the tokenizer."""
    if tokenizer is not None:
        template: Any = tokenizer.chat_template
    else:
        template = read_chat_template(config.chat_template) if config.chat_template else None
    return {
        "chat_template": hashlib.sha256(json.dumps(template).encode()).hexdigest(),
        "content_tokens": getattr(tokenizer, "content_tokens", None),
        "loss_on": config.loss_on,
        "max_length_tokens": config.max_length_tokens,
    }


def train(rows: Dataset, vocab_size: int, config: LLMDataConfig) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer, from the training rows."""
    texts = (text for batch in rows.iter(batch_size=1000) for example in read_examples(batch) for text in example.texts)
    return train_byte_level_tokenizer(texts, vocab_size)


def describe(tokenizer: PreTrainedTokenizerBase, rows: TextRows) -> list[str]:
    """What to print about a tokenizer: whether it loses text of the first rows, and keys of messages that its template does not
    read, because they may say what is to be trained on."""
    sentences = describe_lost_text(tokenizer, [example.texts for example in read_examples(choose_few(rows))])
    unread = {key: number for key, number in rows.message_keys.items() if key not in json.dumps(tokenizer.chat_template)}
    unread.pop("tool_call_id", None)  # in each answer of a tool, as OpenAI writes them; few templates print ids of calls
    if tokenizer.chat_template and unread:
        named = first_of((f"{key!r:.40} ({number} messages)" for key, number in unread.items()), most=5)
        sentences.append(f"keys of messages that the chat template does not name, so the model does not see them: {named}")
    return sentences


def choose_few(rows: TextRows) -> dict[str, list]:
    """Training rows at even distances, as columns."""
    return rows.train[:: -(-len(rows.train) // _NUM_ROWS_TRIED)]


def tokenize(
    rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, config: LLMDataConfig, origins: list[tuple[str, int]]
) -> dict[str, list]:
    """The columns of `TokenizedRows`, `REPORTED`, and `odd` and `held` as of `Seq2Seq.tokenize`."""
    # Render each example as text with the positions of its turns, and tokenize all of them.
    examples = read_examples(rows)
    prepared = [
        prepare_chat(tokenizer, example, config.loss_on, locate(row_id, origins))
        if example.messages is not None
        else prepare_text(example, config.loss_on)
        for row_id, example in zip(rows["row_id"], examples, strict=True)
    ]
    tokenized = tokenize_texts(
        tokenizer,
        [item.text for item in prepared],
        [[turn.start for turn in item.turns] for item in prepared],
        [item.is_chat for item in prepared],
    )
    # Turn each example into one row, or a long text into several.
    prefix, limit = np.array(_get_prefix(tokenizer), dtype=np.int32), config.max_length_tokens
    before, end_token = np.zeros(len(prefix), dtype=np.int64), np.array([tokenizer.eos_token_id], dtype=np.int32)
    marked = compile_special_tokens(tokenizer, mark)
    all_columns = []
    for row_id, mix_entry, text, item, tokens in zip(
        rows["row_id"], rows["mix_entry"], rows["text"], prepared, tokenized, strict=True
    ):
        if not item.is_chat:  # add the special tokens around a text; a chat's template has printed its own
            length = np.array([len(item.text)])
            tokens = TokenizedText(
                np.concatenate([prefix, tokens.input_ids, end_token]),
                np.concatenate([before, tokens.starts, length]),
                np.concatenate([before, tokens.ends, length]),
                tuple(first + len(prefix) for first in tokens.firsts),
            )
        columns = [_mask(item, tokens, limit, tokenizer)] if text is None else _split(item, tokens, len(prefix), limit)
        ends = [[*map(mark, marked.findall(item.text[turn.content_end : turn.end]))] for turn in item.turns if item.is_chat]
        ends = [[token for token in found if token.strip()] for found in ends]
        stop_token_ids = _list_stop_ids(tokenizer, frozenset(found[-1] for found in ends if found))
        of_row = {"is_chat": item.is_chat, "is_endless": not all(ends), "stop_token_ids": stop_token_ids}
        spoken = [item.text[turn.start : turn.content_end] for turn in item.turns] if text is None else [text]
        _, held = read_target(tokenizer, "\0".join(spoken), mark if item.is_chat else str)
        odd = compile_special_tokens(tokenizer) if item.is_chat else compile_inner_ends(tokenizer)
        of_row |= {"held": "\0".join(held), "odd": (LOOKS_SPECIAL if item.is_chat else INNER_END) * bool(odd.search(item.text))}
        of_row |= {"source_index": mix_entry, "omitted": item.omitted}
        all_columns += [
            {**part, **of_row, "row_id": row_id + piece * ROW_IDS_OF_A_PIECE, "piece": piece}
            for piece, part in enumerate(columns)
        ]
    by_name = {name: [columns[name] for columns in all_columns] for name in all_columns[0]}
    num_label_tokens = [int(np.count_nonzero(labels != IGNORED_LABEL)) for labels in by_name["labels"]]
    return {**by_name, "num_tokens": list(map(len, by_name["input_ids"])), "num_label_tokens": num_label_tokens}


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], are_chats: Sequence[bool]) -> list[list[int]]:
    """The tokens of prompts, as `tokenize` makes them of the text before a completion or (`are_chats`, from `render_chat`) an
    assistant's turn."""
    prefix, tokenized = _get_prefix(tokenizer), tokenize_texts(tokenizer, texts, [[]] * len(texts), are_chats)
    return [
        [*([] if is_chat else prefix), *tokens.input_ids.tolist()] for tokens, is_chat in zip(tokenized, are_chats, strict=True)
    ]


def report(counts: dict[str, np.ndarray], config: LLMDataConfig, name: str, origins: list[tuple[str, int]]) -> list[str]:
    """Sentences about rows that were split, cut, left out without a label, have no end of turn or are not printed in full by the
    chat template. No training row left, over all or in an entry of `data.mix`, is a `UserError`."""
    is_kept = counts["num_label_tokens"] > 0
    is_bare = ~is_kept & (counts["num_lost_tokens"] == 0)  # no label before any cut, as with zero-width characters for BERT's
    limit, side = f"data.max_length_tokens = {config.max_length_tokens}", SIDES[name]
    what = "conversations" if counts["is_chat"].all() else "rows"
    num_rows, num_bare, num_lost = int((counts["piece"] == 0).sum()), int(is_bare.sum()), int((~is_kept & ~is_bare).sum())
    # Without a training row left there is no run.
    if num_bare and num_bare == num_rows and name == "train":
        raise UserError(f"the tokenizer leaves nothing to predict in all {num_rows} {side} {what}: change the rows or the model")
    if name == "train" and num_lost + num_bare == num_rows:
        raise UserError(f"all {num_rows} {side} {what} lost their whole completion to {limit}: raise it")
    # Everything else is reported.
    given = counts["num_given_tokens"]
    sentences = describe_split(counts["piece"], name, limit)
    sentences += describe_cut(given, np.where(is_kept | is_bare, counts["num_lost_tokens"], given), num_rows, name, limit)
    if num_lost:
        sentences.append(
            f"{num_lost} of {num_rows} {what} lost their whole completion to {limit} and were left out ({side} rows)"
        )
    if num_bare:
        sentences.append(f"left out {num_bare} of {num_rows} {side} {what}, in which the tokenizer leaves nothing to predict")
    if num_rows and not is_kept.any():
        sentences.append("no held-out row is left to evaluate on")
    if num_endless := int(counts["is_endless"].sum()):
        sentences.append(
            f"the chat template ends the turns of {num_endless} of {num_rows} {side} rows with no special token, so generation "
            "has nothing to stop at: take a data.chat_template that ends assistant turns with eos_token, as "
            "recipes/chat_templates/plain.jinja does"
        )
    for kind in KINDS:
        if len(found := np.flatnonzero(np.char.count(counts["omitted"].astype(str), kind))):
            sentences.append(
                f"WARNING: the chat template leaves out context in {len(found)} of {num_rows} {side} rows: {kind} (first: "
                f"{locate(counts['row_id'][found[0]], origins)}); set data.chat_template to a template that prints it"
            )
    if name == "train":
        for number, entry in enumerate(config.mix):
            if number not in counts["source_index"][is_kept]:
                raise UserError(
                    f"data.mix[{number}] ({entry.source or entry.files}) has no training row left (all its rows are held out, "
                    "skipped or cut off): leave it out, or change data.eval_fraction or data.max_length_tokens"
                )
    return sentences


def locate(row_id: int, origins: list[tuple[str, int]]) -> str:
    """The label of a row's input and its row number, for messages."""
    for label, num_rows in origins:
        if row_id < num_rows:
            return f"{label}, row {row_id + 1}"
        row_id -= num_rows
    raise AssertionError("row ids count through the inputs")


def _get_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer puts before any text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    num_special = [*encoded["special_tokens_mask"], 0].index(0)
    return encoded["input_ids"][:num_special]


def _split(item: Prepared, tokens: TokenizedText, num_prefix: int, max_length_tokens: int) -> list[dict[str, Any]]:
    """The columns of the rows that a text is split into."""
    return [
        {
            "input_ids": input_ids,
            "labels": labels,
            # The first token has no label, so its text does not count either.
            "target_bytes": len(item.text[tokens.ends[max(begin - 1, 0)] : tokens.ends[end - 1]].encode()),
            "prompt_length": 0,
            "target": "",
            "lead_text": "",
            "num_given_tokens": end - begin,
            "num_lost_tokens": 0,
        }
        for input_ids, labels, begin, end in split_text(tokens.input_ids, num_prefix, max_length_tokens)
    ]


def _mask(item: Prepared, tokens: TokenizedText, max_length_tokens: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The columns of one chat or pair, cut to `max_length_tokens`."""
    input_ids = tokens.input_ids[:max_length_tokens]
    end_place = tokens.ends[len(input_ids) - 1] if len(input_ids) < len(tokens.input_ids) else len(item.text)
    labels = input_ids.copy() if item.counts_whole else np.full_like(input_ids, IGNORED_LABEL)
    # The first token has no label, so its text does not count either.
    pieces = [item.text[tokens.ends[:1].max(initial=0) : end_place]] if item.counts_whole else []
    prompt_length, target, lead_text = 0, "", ""
    for turn, turn_lead_text, first in zip(item.turns, item.lead_texts, tokens.firsts, strict=True):
        last = min(int(tokens.starts.searchsorted(turn.end)), len(input_ids))
        if first >= last:  # cut off
            continue
        said = item.text[turn.start : min(turn.content_end, end_place)]
        if not item.counts_whole:
            labels[first:last] = input_ids[first:last]
            pieces.append(said)
        prompt_length, lead_text = first, turn_lead_text
        target, _ = read_target(tokenizer, said, mark if item.is_chat else str)
    labels[:1] = IGNORED_LABEL
    if item.is_chat:
        pieces = [compile_special_tokens(tokenizer, mark).sub("", piece) for piece in pieces]
    return {
        "input_ids": input_ids,
        "labels": labels,
        "target_bytes": sum(len(piece.encode()) for piece in pieces),
        "prompt_length": prompt_length,
        "target": target.strip(),
        "lead_text": lead_text,
        "num_given_tokens": len(tokens.input_ids),
        "num_lost_tokens": len(tokens.input_ids) - len(input_ids),
    }


@functools.lru_cache
def _list_stop_ids(tokenizer: PreTrainedTokenizerBase, stop_tokens: frozenset[str]) -> list[int]:
    """The tokenizer's end token is always one, because an empty list has no type."""
    ids: Any = tokenizer.convert_tokens_to_ids([str(tokenizer.eos_token), *stop_tokens])
    return sorted(set(ids))
