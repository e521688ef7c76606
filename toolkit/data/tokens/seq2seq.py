"""A text and its summary or translation → tokens of an encoder-decoder: what `prepare.py` calls for its rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.rows.load import TextRows
from toolkit.data.tokens.causal import choose_few
from toolkit.data.tokens.cuts import describe_cut, describe_unknown
from toolkit.data.tokens.languages import marks_languages, set_languages
from toolkit.data.tokens.special_tokens import INNER_END, compile_inner_ends, read_target
from toolkit.data.tokens.tokenizer import describe_lost_text, train_tokenizer

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

REPORTED = (
    "num_lost_source_tokens", "num_lost_target_tokens", "num_unknown_source_tokens", "num_unknown_target_tokens",
)  # fmt: skip
"""Columns for `report`."""


def set_up(tokenizer: PreTrainedTokenizerBase, config: DataConfig, model: ModelConfig) -> None:
    """Set the languages of a translation model."""
    set_languages(tokenizer, model.name_or_path, config.source_language, config.target_language)


def list_settings(config: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """What decides the tokens, beside the rows and the tokenizer."""
    settings = {name: getattr(config, name) for name in ("prefix", "max_source_length_tokens", "max_target_length_tokens")}
    if tokenizer is not None and marks_languages(tokenizer):
        settings["languages"] = f"{tokenizer.src_lang} to {tokenizer.tgt_lang}"
    return settings


def train(rows: Dataset, vocab_size: int, config: DataConfig) -> PreTrainedTokenizerBase:
    """A tokenizer like T5's, from the training rows."""
    return train_tokenizer(rows, vocab_size, config.prefix)


def describe(tokenizer: PreTrainedTokenizerBase, rows: TextRows) -> list[str]:
    """What to print about a tokenizer."""
    marks = [f"sources are marked as {tokenizer.src_lang}, targets as {tokenizer.tgt_lang}"] if marks_languages(tokenizer) else []
    sides = {"targets": choose_few(rows)["completion"], "sources": choose_few(rows)["prompt"]}
    lost = [describe_lost_text(tokenizer, [[text] for text in texts], what) for what, texts in sides.items()]
    return [*marks, *itertools.chain.from_iterable(lost)]


def tokenize(
    rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, config: DataConfig, origins: list[tuple[str, int]]
) -> dict[str, list]:
    """The columns of `TokenizedRows`, `REPORTED`, `odd`, what to say of a row's special tokens, and `held`, those of its target,
    with zeros between them."""
    prompts = [config.prefix + text for text in rows["prompt"]]
    sources, num_lost_of_sources = encode_texts(tokenizer, prompts, config.max_source_length_tokens, "text")
    labels, num_lost_of_targets = encode_texts(tokenizer, rows["completion"], config.max_target_length_tokens, "text_target")
    texts = [
        str(tokenizer.decode(ids, skip_special_tokens=True)) if num_lost else text
        for ids, text, num_lost in zip(labels, rows["completion"], num_lost_of_targets, strict=True)
    ]
    targets, held = zip(*(read_target(tokenizer, text) for text in rows["completion"]), strict=True)
    odd = [map(compile_inner_ends(tokenizer).search, pair) for pair in zip(prompts, rows["completion"], strict=True)]
    return {
        "row_id": rows["row_id"],
        "target": list(targets),
        "held": list(map("\0".join, held)),
        "odd": [INNER_END * any(found) for found in odd],
        "lead_text": rows["lead_text"],
        "input_ids": sources,
        "labels": labels,
        "num_tokens": [len(source) + len(target) for source, target in zip(sources, labels, strict=True)],
        "num_label_tokens": [len(ids) for ids in labels],
        "target_bytes": [len(text.encode()) for text in texts],
        "num_lost_source_tokens": num_lost_of_sources,
        "num_lost_target_tokens": num_lost_of_targets,
        "num_unknown_source_tokens": [ids.count(tokenizer.unk_token_id) for ids in sources],
        "num_unknown_target_tokens": [ids.count(tokenizer.unk_token_id) for ids in labels],
    }


def report(counts: dict[str, np.ndarray], config: DataConfig, name: str, origins: list[tuple[str, int]]) -> list[str]:
    """Sentences about cuts and unknown tokens."""
    num_of_targets = counts.get("num_answer_tokens", counts["num_label_tokens"])  # the former of pairs
    num_kept = {"source": counts["num_tokens"] - num_of_targets, "target": num_of_targets}
    sentences: list[str] = []
    for side, limit in (("source", config.max_source_length_tokens), ("target", config.max_target_length_tokens)):
        num_lost = counts[f"num_lost_{side}_tokens"]
        sentences += describe_cut(
            num_kept[side] + num_lost, num_lost, len(num_lost), name, f"data.max_{side}_length_tokens = {limit}", side
        )
        sentences += describe_unknown(num_kept[side], counts[f"num_unknown_{side}_tokens"], name, side)
    return sentences


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int | None, argument: str
) -> tuple[list[list[int]], list[int]]:
    """Token ids of texts, and how many tokens each has lost. A text of over `max_length` tokens, if that is given, is encoded
    again, cut by the tokenizer; `argument` is the tokenizer's, `text` or `text_target`."""
    all_ids = tokenizer(**{argument: texts}, verbose=False)["input_ids"]
    num_lost = [0] * len(texts)
    for i, text in enumerate(texts):
        if (num_given := len(all_ids[i])) > (max_length or num_given):
            all_ids[i] = tokenizer(**{argument: text}, truncation=True, max_length=max_length)["input_ids"]
            num_lost[i] = num_given - len(all_ids[i])
    return all_ids, num_lost
