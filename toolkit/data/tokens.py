"""Text rows → tokenized rows on disk, cached under a name that says everything they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import DataConfig, ModelConfig
from toolkit.data.sources import cache_folder, load_text_rows
from toolkit.data.tokenizer import has_tokenizer, hash_tokenizer, load_tokenizer, train_tokenizer
from toolkit.distributed import gather_objects, local_rank, local_world_size, raise_together
from toolkit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 1
"""Goes into the cache's name: raise it when the columns or their meaning change."""


@dataclass(frozen=True)
class TokenizedRows:
    """Rows of a run as token ids.

    `train` and `evaluation` have the columns `row_id`, `input_ids`, `labels`, `source_length`, `target_length` (tokens),
    `target_bytes` (utf-8 bytes of the text that the labels stand for), `target` and `lead_text`.
    """

    train: Dataset
    evaluation: Dataset
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    """sha256 of source contents, settings and tokenizer: what a resume compares."""
    remarks: list[str]


def prepare_rows(config: DataConfig, model: ModelConfig, vocab_size: int) -> TokenizedRows:
    """Read, tokenize and cache the rows on each node's first process; the others load the cache. Collective.

    Raises:
        UserError: whatever is wrong with the source or the tokenizer, or nodes that read different data; on every rank.
    """
    from datasets import load_from_disk
    from transformers import AutoTokenizer

    name, error = None, None
    if local_rank() == 0:
        try:
            name = _build_cache(config, model, vocab_size)
        except UserError as e:
            error = e
    raise_together(error)
    names = {name for name in gather_objects(name) if name is not None}
    if len(names) > 1:
        raise UserError(f"the nodes read different data or tokenizers (fingerprints {', '.join(n[:12] for n in sorted(names))})")
    folder = cache_folder(config) / names.pop()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    # The tokenizers library trains another unigram model each time, even on the same rows: what came out counts.
    fingerprint = hashlib.sha256(f"{folder.name} {hash_tokenizer(tokenizer)}".encode()).hexdigest()
    if len(set(gather_objects(fingerprint))) > 1:
        raise UserError(
            "the nodes have trained different tokenizers on the same rows: put data.cache_dir on a file system that all "
            "share, or a trained tokenizer into the model folder"
        )
    return TokenizedRows(
        train=load_from_disk(str(folder / "train")),
        evaluation=load_from_disk(str(folder / "evaluation")),
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        remarks=json.loads((folder / "about.json").read_text())["remarks"],
    )


def _build_cache(config: DataConfig, model: ModelConfig, vocab_size: int) -> str:
    """Make sure the tokenized rows lie in the cache; returns their folder's name. On one process of a node."""
    tokenizer = load_tokenizer(model, vocab_size) if has_tokenizer(model) else None
    rows = load_text_rows(config)
    identity = {
        "format": FORMAT_VERSION,
        "rows": rows.fingerprint,
        "tokenizer": hash_tokenizer(tokenizer) if tokenizer else f"unigram trained on the rows, {vocab_size} tokens",
        "prefix": config.prefix,
        "max_source_length_tokens": config.max_source_length_tokens,
        "max_target_length_tokens": config.max_target_length_tokens,
    }
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = cache_folder(config) / fingerprint
    if (folder / "about.json").is_file():
        return fingerprint
    if tokenizer is None:
        tokenizer = train_tokenizer(rows.train, vocab_size)
    # Written beside and renamed: a second run, or a crash, never finds half a cache.
    unfinished = folder.with_name(f"{fingerprint}.{os.getpid()}.tmp")
    unfinished.mkdir(parents=True)
    try:
        remarks = list(rows.remarks)
        for name, dataset in (("train", rows.train), ("evaluation", rows.evaluation)):
            tokenized = _tokenize(dataset, tokenizer, config, name, unfinished / f"{name}.arrow")
            remarks += _tell_truncation(tokenized, config, name)
            tokenized.remove_columns(["source_was_cut", "target_was_cut"]).save_to_disk(
                # One shard for no rows: the library would write none, and not read that back.
                str(unfinished / name),
                num_shards=None if len(tokenized) else 1,
            )
        for scratch_file in unfinished.glob("*.arrow"):
            scratch_file.unlink()
        tokenizer.save_pretrained(unfinished / "tokenizer")
        (unfinished / "about.json").write_text(json.dumps({"remarks": remarks, **identity}, indent=1))
        with contextlib.suppress(OSError):  # another run was faster: its cache holds the same
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return fingerprint


def _tokenize(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig, name: str, scratch_file: Path) -> Dataset:
    """Add the token columns, with several processes and progress where there is much to do."""
    import datasets

    if not sys.stderr.isatty():  # bars are for terminals
        datasets.disable_progress_bars()
        print(f"tokenizing {len(dataset):,} {name} rows", flush=True)
    if is_empty := len(dataset) == 0:
        # `map` would leave out the new columns: they are taken from a row that goes again.
        row = {"row_id": [0], "source": [""], "target": [""], "lead_text": [""]}
        dataset = datasets.Dataset.from_dict(row, features=dataset.features)
    num_workers = config.num_tokenizer_workers or min(8, (os.cpu_count() or 1) // local_world_size())
    tokenized = dataset.map(
        _tokenize_rows,
        batched=True,
        num_proc=num_workers if num_workers > 1 and len(dataset) > 10_000 else None,
        remove_columns=["source"],
        fn_kwargs={
            "tokenizer": tokenizer,
            "prefix": config.prefix,
            "max_source_length_tokens": config.max_source_length_tokens,
            "max_target_length_tokens": config.max_target_length_tokens,
        },
        # Ours is the cache; datasets' own hash of a tokenizer changes from process to process.
        new_fingerprint=hashlib.sha256(f"{dataset._fingerprint} {hash_tokenizer(tokenizer)} {config}".encode()).hexdigest()[:16],
        load_from_cache_file=False,
        cache_file_name=str(scratch_file),
        desc=f"tokenizing {name} rows",
    )
    return tokenized.select([]) if is_empty else tokenized


def _tokenize_rows(
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
        "source_length": [len(ids) for ids in sources],
        "target_length": [len(ids) for ids in labels],
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
