"""The data section of a run YAML, of each recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows, and how they become tokens."""

    source: str
    """`docstrings`, `wikihow`, `csv`, `jsonl`, `parquet`, the id of a hub dataset, or a folder with one. Kinds of files that
    only `datasets` knows (`text`, `json`, …) are refused."""
    files: list[str] | str | None = None
    """Files of a file source, one or a list."""
    eval_files: list[str] | str | None = None
    """Files with the held-out rows; unset holds out `eval_fraction` of the rows."""
    hub_subset: str | None = None
    """Configuration name of a hub dataset."""
    hub_split: str = "train"
    """Split of a hub dataset."""
    source_column: str | None = None
    """Column with the text to summarize; unset: `source`, or what the source prescribes."""
    target_column: str | None = None
    """Column with the summary; unset: `target`, or what the source prescribes."""
    prefix: str = ""
    """Text put before every source, as in `summarize: `."""
    source_language: str | None = None
    """Language of the sources, as the tokenizer of a translation model names it (`eng_Latn`); unset: the one saved with it."""
    target_language: str | None = None
    """Language of the targets; generated texts begin with it."""
    max_source_length_tokens: PositiveInt = 512  # type: ignore[valid-type]
    """Longer sources are cut (counted and told)."""
    max_target_length_tokens: PositiveInt = 150  # type: ignore[valid-type]
    """Longer targets are cut (counted and told)."""
    num_rows: PositiveInt | None = None  # type: ignore[valid-type]
    """Use only the first so many rows of the source."""
    eval_fraction: ClosedUnitInterval = 0.05  # type: ignore[valid-type]
    """Share of the rows held out, chosen by a hash of each row's group, so that no group is on both sides."""
    num_tokenizer_workers: PositiveInt | None = None  # type: ignore[valid-type]
    """Processes that tokenize; unset: the machine's cores over its ranks, at most 8."""
    num_loader_workers: NonNegativeInt = 0  # type: ignore[valid-type]
    """Processes per rank that collate batches ahead; 0 collates in the training process."""
    cache_dir: str | None = None
    """Tokenized rows and trained tokenizers; unset: `toolkit/` in the Hugging Face cache."""


@dataclass(frozen=True, kw_only=True)
class MixEntry:
    """One of several sources: fields as in `data`."""

    source: str
    """`docstrings`, `stdlib`, `csv`, `jsonl`, `parquet`, the id of a hub dataset, or a folder with one. Kinds of files that
    only `datasets` knows (`text`, `json`, …) are refused."""
    weight: PositiveFloat = 1.0  # type: ignore[valid-type]
    """Its share of an epoch's rows, relative to the other weights."""
    files: list[str] | str | None = None
    """Files of a file source, one or a list."""
    hub_subset: str | None = None
    """Configuration name of a hub dataset."""
    hub_split: str = "train"
    """Split of a hub dataset."""


@dataclass(frozen=True, kw_only=True)
class LLMDataConfig:
    """Which rows (chats, prompts with completions, or plain text), and how they become tokens."""

    source: str | None = None
    """`docstrings`, `stdlib`, `csv`, `jsonl`, `parquet`, the id of a hub dataset, or a folder with one. Kinds of files that
    only `datasets` knows (`text`, `json`, …) are refused."""
    mix: list[MixEntry] = field(default_factory=list)
    """Several sources with weights, instead of `source` and `files`."""
    files: list[str] | str | None = None
    """Files of a file source, one or a list."""
    eval_files: list[str] | str | None = None
    """Files with the held-out rows; unset holds out `eval_fraction` of the rows."""
    hub_subset: str | None = None
    """Configuration name of a hub dataset."""
    hub_split: str = "train"
    """Split of a hub dataset."""
    messages_column: str | None = None
    """Column with a chat, a list of `{role, content}`; unset: `messages` where there is one."""
    prompt_column: str | None = None
    """Column with the prompt; unset: `prompt` where there is one."""
    completion_column: str | None = None
    """Column with the completion; unset: `completion` where there is one."""
    text_column: str | None = None
    """Column with plain text; unset: `text` where there is one."""
    chat_template: str | None = None
    """Jinja chat template, or a file that holds one; unset: the tokenizer's."""
    loss_on: Literal["completions", "all"] = "completions"
    """Train on completions only (every assistant turn, but one with `"weight": 0`), or on all tokens. Plain text always counts
    whole."""
    max_length_tokens: PositiveInt = 1024  # type: ignore[valid-type]
    """Longer plain text is split into rows that together hold every token; longer chats and completions are cut at their end, and
    the share of tokens lost is printed. Packed rows are filled up to it."""
    packing: bool = True
    """Put several rows of a step into one row of the tensors. They do not see each other: for the same rows the result is
    the same."""
    bucket_by_length: bool | None = None
    """Make steps of rows of about equal length, instead of drawing them at random; unset: where rows are not packed."""
    num_rows: PositiveInt | None = None  # type: ignore[valid-type]
    """Use only the first so many rows of each source."""
    eval_fraction: ClosedUnitInterval = 0.05  # type: ignore[valid-type]
    """Share of the rows held out, chosen by a hash of each row's prompt, so that no prompt is on both sides."""
    num_tokenizer_workers: PositiveInt | None = None  # type: ignore[valid-type]
    """Processes that tokenize; unset: the machine's cores over its ranks, at most 8."""
    num_loader_workers: NonNegativeInt = 0  # type: ignore[valid-type]
    """Processes per rank that collate batches ahead; 0 collates in the training process."""
    cache_dir: str | None = None
    """Tokenized rows and trained tokenizers; unset: `toolkit/` in the Hugging Face cache."""
