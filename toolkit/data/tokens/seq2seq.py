"""Text rows of a summarization run → tokenized rows on disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.rows.cache import TextRows, cache_folder
from toolkit.data.rows.source_rows import load_text_rows
from toolkit.data.tokens.cache import About, TokenizedRows, Written, build_once_a_node, save_tokens, tokenize_rows, write_tokens
from toolkit.data.tokens.cuts import tell_cut
from toolkit.data.tokens.languages import marks_languages, set_languages
from toolkit.data.tokens.tokenizer import (
    has_tokenizer,
    hash_tokenizer,
    keep_trained_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 5
"""Part of the cache's name. Raise it when the columns or their meaning change."""


def prepare_rows(config: DataConfig, model: ModelConfig, vocab_size: int) -> TokenizedRows:
    """Read, tokenize and cache the rows on the first process of each node; the others load the cache. Collective.

    Raises:
        UserError: anything wrong with the source or the tokenizer; the nodes have read different data. On every rank.
    """
    return build_once_a_node(cache_folder(config.cache_dir), partial(_build_cache, config, model, vocab_size))


def _build_cache(config: DataConfig, model: ModelConfig, vocab_size: int) -> Written:
    """Write the tokenized rows into the cache unless they are there. For one process per node."""
    tokenizer = load_tokenizer(model, vocab_size) if has_tokenizer(model) else None
    if tokenizer is not None:
        set_languages(tokenizer, model.name_or_path, config.source_language, config.target_language)
    rows = load_text_rows(config)
    training = f"unigram trained on the rows, {vocab_size} tokens"
    identity = {
        "format": FORMAT_VERSION,
        "rows": rows.fingerprint,
        "tokenizer": hash_tokenizer(tokenizer) if tokenizer else training,
        "prefix": config.prefix,
        "max_source_length_tokens": config.max_source_length_tokens,
        "max_target_length_tokens": config.max_target_length_tokens,
    }
    if tokenizer is not None and marks_languages(tokenizer):
        identity["languages"] = f"{tokenizer.src_lang} to {tokenizer.tgt_lang}"

    def write(folder: Path) -> About:
        train = partial(train_tokenizer, rows.train, vocab_size)
        kept = tokenizer or keep_trained_tokenizer(cache, f"{rows.fingerprint} {training}", train)
        return _write_tokens(rows, kept, config, folder)

    cache = cache_folder(config.cache_dir)
    return write_tokens(cache, identity, write)


def _write_tokens(rows: TextRows, tokenizer: PreTrainedTokenizerBase, config: DataConfig, folder: Path) -> About:
    remarks = list(rows.remarks)
    if marks_languages(tokenizer):
        remarks.append(f"sources are marked as {tokenizer.src_lang}, targets as {tokenizer.tgt_lang}")
    arguments = {
        "tokenizer": tokenizer,
        "prefix": config.prefix,
        "max_source_length_tokens": config.max_source_length_tokens,
        "max_target_length_tokens": config.max_target_length_tokens,
    }
    for name, dataset in (("train", rows.train), ("evaluation", rows.evaluation)):
        tokenized = tokenize_rows(
            dataset,
            _tokenize_batch,
            arguments,
            name,
            folder,
            num_workers=config.num_tokenizer_workers,
            placeholder={"source": "", "target": "", "lead_text": ""},
        )
        remarks += _report_truncation(tokenized, config, name)
        save_tokens(tokenized.remove_columns(["num_lost_source_tokens", "num_lost_target_tokens"]), name, folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    return About(remarks)


def _tokenize_batch(
    rows: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    max_source_length_tokens: int,
    max_target_length_tokens: int,
) -> dict[str, list]:
    sources, num_lost_of_sources = _encode(
        tokenizer, [prefix + text for text in rows["source"]], max_source_length_tokens, "text"
    )
    labels, num_lost_of_targets = _encode(tokenizer, rows["target"], max_target_length_tokens, "text_target")
    texts = [
        str(tokenizer.decode(ids, skip_special_tokens=True)) if num_lost else text
        for ids, text, num_lost in zip(labels, rows["target"], num_lost_of_targets, strict=True)
    ]
    return {
        "input_ids": sources,
        "labels": labels,
        "num_tokens": [len(source) + len(target) for source, target in zip(sources, labels, strict=True)],
        "num_label_tokens": [len(ids) for ids in labels],
        "target_bytes": [len(text.encode()) for text in texts],
        "num_lost_source_tokens": num_lost_of_sources,
        "num_lost_target_tokens": num_lost_of_targets,
    }


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int, argument: str
) -> tuple[list[list[int]], list[int]]:
    """Token ids of texts, and how many tokens each has lost. A text that is too long is encoded again, cut by the tokenizer."""
    all_ids = tokenizer(**{argument: texts}, verbose=False)["input_ids"]
    num_lost = [0] * len(texts)
    for i, text in enumerate(texts):
        if (num_given := len(all_ids[i])) > max_length:
            all_ids[i] = tokenizer(**{argument: text}, truncation=True, max_length=max_length)["input_ids"]
            num_lost[i] = num_given - len(all_ids[i])
    return all_ids, num_lost


def _report_truncation(tokenized: Dataset, config: DataConfig, name: str) -> list[str]:
    names = ["num_tokens", "num_label_tokens", "num_lost_source_tokens", "num_lost_target_tokens"]
    numbers = tokenized.select_columns(names).with_format("numpy")[:]
    num_kept = {"source": numbers["num_tokens"] - numbers["num_label_tokens"], "target": numbers["num_label_tokens"]}
    sentences: list[str] = []
    for side, limit in (("source", config.max_source_length_tokens), ("target", config.max_target_length_tokens)):
        num_lost = numbers[f"num_lost_{side}_tokens"]
        sentences += tell_cut(
            num_kept[side] + num_lost, num_lost, len(tokenized), name, f"data.max_{side}_length_tokens = {limit}", side
        )
    return sentences
