"""Rows of a causal model's run → token ids with a mask of what counts, on disk."""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.config_sections import LLMDataConfig, ModelConfig
from toolkit.data.chat import (
    TEMPLATE_ERRORS,
    NoMaskError,
    Turn,
    check_chat_template,
    find_turns,
    list_special_tokens,
    read_chat_template,
    render_chat,
)
from toolkit.data.examples import list_texts
from toolkit.data.llm_sources import load_llm_rows
from toolkit.data.row_cache import TextRows, cache_folder
from toolkit.data.spans import TokenizedText, tokenize_texts
from toolkit.data.token_cache import TokenizedRows, build_once_a_node, save_tokens, tokenize_rows, write_tokens
from toolkit.data.tokenizer import has_tokenizer, hash_tokenizer, load_tokenizer, train_byte_level_tokenizer
from toolkit.errors import UserError
from toolkit.losses import IGNORED_LABEL

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 1
"""Goes into the cache's name: raise it when the columns or their meaning change."""


def prepare_llm_rows(config: LLMDataConfig, model: ModelConfig, vocab_size: int) -> TokenizedRows:
    """Read, tokenize and cache the rows on each node's first process; the others load the cache. Collective.

    A chat is what its template makes of it. A prompt is followed by its completion and the end token, a text by the end token;
    both begin with what the tokenizer puts before any text (Llama's `<s>`). Rows longer than `data.max_length_tokens` are cut.

    Raises:
        UserError: whatever is wrong with the source, the tokenizer or the chat template, no row with a label left after the cut,
            or nodes that read different data; on every rank.
    """
    return build_once_a_node(cache_folder(config.cache_dir), partial(_build_cache, config, model, vocab_size))


def _build_cache(config: LLMDataConfig, model: ModelConfig, vocab_size: int) -> str:
    """Make sure the tokenized rows lie in the cache; returns their folder's name. On one process of a node."""
    template = read_chat_template(config.chat_template) if config.chat_template else None
    tokenizer = load_tokenizer(model, vocab_size) if has_tokenizer(model) else None
    if tokenizer is not None:
        _set_up(tokenizer, template)
    rows = load_llm_rows(config)
    identity = {
        "format": FORMAT_VERSION,
        "rows": rows.fingerprint,
        "tokenizer": hash_tokenizer(tokenizer) if tokenizer else f"byte-level trained on the rows, {vocab_size} tokens",
        "chat_template": hashlib.sha256(json.dumps(tokenizer.chat_template if tokenizer else template).encode()).hexdigest(),
        "loss_on": config.loss_on,
        "max_length_tokens": config.max_length_tokens,
    }

    def write(folder: Path) -> list[str]:
        if tokenizer is not None:
            return _write_tokens(rows, tokenizer, config, folder)
        texts = (text for row in rows.train for text in list_texts(json.loads(row["source"])))
        trained = train_byte_level_tokenizer(texts, vocab_size)
        _set_up(trained, template)
        return _write_tokens(rows, trained, config, folder)

    return write_tokens(cache_folder(config.cache_dir), identity, write)


def _set_up(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Give the tokenizer the template, which goes into the export with it, and refuse one that cannot do what is needed."""
    name = tokenizer.name_or_path or "trained on the rows"
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {name} is a slow one ({type(tokenizer).__name__}), which does not say where its tokens stand in a "
            "text: convert it to a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer {name} has no end token to put after texts: set eos_token in its tokenizer_config.json")
    if template is not None:
        tokenizer.chat_template = template
    check_chat_template(tokenizer)


def _write_tokens(rows: TextRows, tokenizer: PreTrainedTokenizerBase, config: LLMDataConfig, folder: Path) -> list[str]:
    remarks = list(rows.remarks)
    arguments = {
        "tokenizer": tokenizer,
        "loss_on": config.loss_on,
        "max_length_tokens": config.max_length_tokens,
        "origins": rows.origins,
    }
    for name, dataset in (("train", rows.train), ("evaluation", rows.evaluation)):
        tokenized = tokenize_rows(
            dataset,
            _tokenize_batch,
            arguments,
            name,
            folder,
            num_workers=config.num_tokenizer_workers,
            placeholder={"source": '{"text": "", "mix_entry": 0}', "target": "", "lead_text": ""},
        )
        kept, told = _drop_lost_rows(tokenized, config, name)
        remarks += told
        save_tokens(kept.remove_columns(["was_cut", "is_endless"]), name, folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    return remarks


def _drop_lost_rows(tokenized: Dataset, config: LLMDataConfig, name: str) -> tuple[Dataset, list[str]]:
    """The rows with a label that counts, and remarks on what the cut and the template did to them."""
    numbers = tokenized.select_columns(["num_label_tokens", "was_cut", "is_endless"]).with_format("numpy")[:]
    is_kept = numbers["num_label_tokens"] > 0
    limit = f"data.max_length_tokens = {config.max_length_tokens}"
    num_rows, num_lost = len(tokenized), int((~is_kept).sum())
    if num_lost and num_lost == num_rows:
        raise UserError(f"all {num_rows} {name} conversations lost their whole completion to {limit}: raise it")
    told = []
    if num_cut := int(numbers["was_cut"].sum()):
        told.append(f"cut {num_cut} of {num_rows} {name} rows to {limit}")
    if num_lost:
        told.append(
            f"{num_lost} of {num_rows} conversations lost their whole completion to {limit} and were left out ({name} rows)"
        )
    if num_endless := int(numbers["is_endless"].sum()):
        told.append(
            f"the chat template ends the turns of {num_endless} of {num_rows} {name} rows with no special token, so nothing "
            "tells generation to stop: end assistant turns with eos_token in data.chat_template"
        )
    return tokenized.select(np.flatnonzero(is_kept)) if num_lost else tokenized, told


class _Prepared(NamedTuple):
    """An example as text, with the places of what the model is to write."""

    text: str
    turns: list[Turn]
    """Those to train on: of a prompt with its completion, the completion."""
    lead_texts: list[str]
    """What the lead baseline reads, for each turn."""
    counts_whole: bool
    is_chat: bool


def _tokenize_batch(
    rows: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    loss_on: str,
    max_length_tokens: int,
    origins: list[tuple[str, int]],
) -> dict[str, list]:
    """The columns of `TokenizedRows`, and `was_cut` and `is_endless` (a turn ends with no special token)."""
    examples = [json.loads(source) for source in rows["source"]]
    prepared = [
        _prepare_chat(tokenizer, example, loss_on, _locate(row_id, origins))
        if "messages" in example
        else _prepare_text(example, loss_on, lead_text)
        for row_id, example, lead_text in zip(rows["row_id"], examples, rows["lead_text"], strict=True)
    ]
    tokenized = tokenize_texts(
        tokenizer, [item.text for item in prepared], [[turn.start for turn in item.turns] for item in prepared]
    )
    prefix = _get_prefix(tokenizer)
    special_tokens = re.compile("|".join(map(re.escape, list_special_tokens(tokenizer))) or "(?!)")
    all_columns = []
    for example, item, tokens in zip(examples, prepared, tokenized, strict=True):
        if not item.is_chat:
            length = len(item.text)
            tokens = TokenizedText(
                [*prefix, *tokens.input_ids, int(tokenizer.eos_token_id)],
                [0] * len(prefix) + tokens.starts + [length],
                [0] * len(prefix) + tokens.ends + [length],
            )
        all_columns.append(_mask(item, tokens, max_length_tokens, special_tokens) | {"source_index": example["mix_entry"]})
    return {name: [columns[name] for columns in all_columns] for name in all_columns[0]}


def _locate(row_id: int, origins: list[tuple[str, int]]) -> str:
    """Input and row number, for messages."""
    for label, num_rows in origins:
        if row_id < num_rows:
            return f"{label}, row {row_id + 1}"
        row_id -= num_rows
    raise AssertionError("row ids count through the inputs")


def _prepare_text(example: dict[str, Any], loss_on: str, lead_text: str) -> _Prepared:
    if "text" in example:
        return _Prepared(example["text"], [], [], counts_whole=True, is_chat=False)
    text = example["prompt"] + example["completion"]
    # One character more, for the end token.
    turn = Turn(len(example["prompt"]), len(text), len(text) + 1)
    return _Prepared(text, [turn], [lead_text], counts_whole=loss_on == "all", is_chat=False)


def _prepare_chat(tokenizer: PreTrainedTokenizerBase, example: dict[str, Any], loss_on: str, where: str) -> _Prepared:
    """A chat as its template prints it.

    Raises:
        UserError: the template refuses it, prints nothing of a turn, or does not tell which text is the assistant's.
    """
    messages, tools = example["messages"], example["tools"]
    try:
        text = render_chat(tokenizer, messages, tools)
        turns = find_turns(tokenizer, text, messages, tools)
    except NoMaskError as error:
        if loss_on == "completions":
            raise UserError(
                f"{where}: the chat template does not tell which tokens are the assistant's: {error}; give "
                "data.chat_template with {% generation %} ... {% endgeneration %} around the assistant's text, or set "
                "data.loss_on all"
            ) from None
        return _Prepared(text, [], [], counts_whole=True, is_chat=True)
    except UserError:
        raise
    except TEMPLATE_ERRORS as error:
        raise UserError(
            f"{where}: the chat template refuses this conversation ({str(error) or type(error).__name__}): change the row, or "
            "set data.chat_template to a template that takes it"
        ) from None
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, turn in zip(spoken, turns, strict=True):
        if not text[turn.start : turn.content_end].strip():
            has_calls = " (it has tool_calls, which the template may not know)" if messages[i].get("tool_calls") else ""
            raise UserError(f"{where}: the chat template prints nothing of message {i + 1}{has_calls}: set data.chat_template")
    trained = [(i, turn) for i, turn in zip(spoken, turns, strict=True) if i >= example["first_trained"]]
    lead_texts = [next(m["content"] for m in reversed(messages[:i]) if m["role"] == "user") for i, _ in trained]
    return _Prepared(text, [turn for _, turn in trained], lead_texts, counts_whole=loss_on == "all", is_chat=True)


def _get_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer puts before any text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    num_special = [*encoded["special_tokens_mask"], 0].index(0)
    return encoded["input_ids"][:num_special]


def _mask(item: _Prepared, tokens: TokenizedText, max_length_tokens: int, special_tokens: re.Pattern) -> dict[str, Any]:
    """The columns of one example."""
    input_ids = tokens.input_ids[:max_length_tokens]
    was_cut = len(tokens.input_ids) > len(input_ids)
    end_place = tokens.ends[len(input_ids) - 1] if was_cut else len(item.text)
    labels = list(input_ids) if item.counts_whole else [IGNORED_LABEL] * len(input_ids)
    pieces = [item.text[:end_place]] if item.counts_whole else []
    prompt_length, target, lead_text = 0, "", ""
    for turn, turn_lead_text in zip(item.turns, item.lead_texts, strict=True):
        first, last = (min(bisect.bisect_left(tokens.starts, place), len(input_ids)) for place in (turn.start, turn.end))
        if first == last:  # cut off
            continue
        said = item.text[turn.start : min(turn.content_end, end_place)]
        if not item.counts_whole:
            labels[first:last] = input_ids[first:last]
            pieces.append(said)
        prompt_length, target, lead_text = first, said, turn_lead_text
    # Nothing predicts the first token.
    labels[:1] = [IGNORED_LABEL] * len(labels[:1])
    if item.is_chat:  # elsewhere what looks like a special token is the row's own text
        pieces, target = [special_tokens.sub("", piece) for piece in pieces], special_tokens.sub("", target)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "num_tokens": len(input_ids),
        "num_label_tokens": sum(label != IGNORED_LABEL for label in labels),
        "target_bytes": sum(len(piece.encode()) for piece in pieces),
        "prompt_length": prompt_length,
        "target": target.strip(),
        "lead_text": lead_text,
        "was_cut": was_cut,
        "is_endless": item.is_chat and any(not special_tokens.search(item.text[t.content_end : t.end]) for t in item.turns),
    }
