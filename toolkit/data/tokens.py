"""Text rows of a summarization run → tokenized rows on disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config_sections import DataConfig, ModelConfig
from toolkit.data.languages import marks_languages, set_languages
from toolkit.data.row_cache import TextRows, cache_folder
from toolkit.data.sources import load_text_rows
from toolkit.data.token_cache import About, TokenizedRows, build_once_a_node, save_tokens, tokenize_rows, write_tokens
from toolkit.data.tokenizer import has_tokenizer, hash_tokenizer, load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 3
"""Goes into the cache's name: raise it when the columns or their meaning change."""


def prepare_rows(config: DataConfig, model: ModelConfig, vocab_size: int) -> TokenizedRows:
    """Read, tokenize and cache the rows on each node's first process; the others load the cache. Collective.

    Raises:
        UserError: whatever is wrong with the source or the tokenizer, or nodes that read different data; on every rank.
    """
    return build_once_a_node(cache_folder(config.cache_dir), partial(_build_cache, config, model, vocab_size))


def _build_cache(config: DataConfig, model: ModelConfig, vocab_size: int) -> str:
    """Make sure the tokenized rows lie in the cache; returns their folder's name. On one process of a node."""
    tokenizer = load_tokenizer(model, vocab_size) if has_tokenizer(model) else None
    if tokenizer is not None:
        set_languages(tokenizer, model.name_or_path, config.source_language, config.target_language)
    rows = load_text_rows(config)
    identity = {
        "format": FORMAT_VERSION,
        "rows": rows.fingerprint,
        "tokenizer": hash_tokenizer(tokenizer) if tokenizer else f"unigram trained on the rows, {vocab_size} tokens",
        "prefix": config.prefix,
        "max_source_length_tokens": config.max_source_length_tokens,
        "max_target_length_tokens": config.max_target_length_tokens,
    }
    if tokenizer is not None and marks_languages(tokenizer):
        identity["languages"] = f"{tokenizer.src_lang} to {tokenizer.tgt_lang}"

    def write(folder: Path) -> About:
        return _write_tokens(rows, tokenizer or train_tokenizer(rows.train, vocab_size), config, folder)

    return write_tokens(cache_folder(config.cache_dir), identity, write)


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
        remarks += _tell_truncation(tokenized, config, name)
        save_tokens(tokenized.remove_columns(["source_was_cut", "target_was_cut"]), name, folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    return About(remarks)


def _tokenize_batch(
    rows: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    max_source_length_tokens: int,
    max_target_length_tokens: int,
) -> dict[str, list]:
    sources, sources_cut = _encode(tokenizer, [prefix + text for text in rows["source"]], max_source_length_tokens, "text")
    labels, targets_cut = _encode(tokenizer, rows["target"], max_target_length_tokens, "text_target")
    texts = [
        str(tokenizer.decode(ids, skip_special_tokens=True)) if was_cut else text
        for ids, text, was_cut in zip(labels, rows["target"], targets_cut, strict=True)
    ]
    return {
        "input_ids": sources,
        "labels": labels,
        "num_tokens": [len(source) + len(target) for source, target in zip(sources, labels, strict=True)],
        "num_label_tokens": [len(ids) for ids in labels],
        "target_bytes": [len(text.encode()) for text in texts],
        "source_was_cut": sources_cut,
        "target_was_cut": targets_cut,
    }


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int, argument: str
) -> tuple[list[list[int]], list[bool]]:
    """Token ids of texts and whether each was cut. Only a text that is too long is encoded again, cut by the tokenizer."""
    all_ids = tokenizer(**{argument: texts}, verbose=False)["input_ids"]
    was_cut = [len(ids) > max_length for ids in all_ids]
    for i, text in enumerate(texts):
        if was_cut[i]:
            all_ids[i] = tokenizer(**{argument: text}, truncation=True, max_length=max_length)["input_ids"]
    return all_ids, was_cut


def _tell_truncation(tokenized: Dataset, config: DataConfig, name: str) -> list[str]:
    told = []
    for side, limit in (("source", config.max_source_length_tokens), ("target", config.max_target_length_tokens)):
        num_cut = sum(tokenized[f"{side}_was_cut"])
        if num_cut:
            told.append(f"cut the {side} of {num_cut} of {len(tokenized)} {name} rows to data.max_{side}_length_tokens = {limit}")
    return told
