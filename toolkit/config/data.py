"""The `data` section of the run YAMLs, one dataclass per recipe."""

from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.config.facts import stated


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """One source of rows."""

    source: str | None = stated(path="named")
    """Source of the rows: a kind of file (`csv`, `tsv`, `json`, `jsonl`, `parquet`, `arrow`, `txt`), a Python file and a function
    in it (`my_rows.py:load_rows`), the id of a hub dataset, or a folder with one. If unset, `files` are read by their endings."""
    files: list[str] | str | None = stated(None, path="pattern", resume=True)
    """File or list of files of a file source, text also gzipped, or for the function of a Python file."""
    hub_subset: str | None = None
    """Configuration name of a hub dataset or folder."""
    hub_split: str = "train"
    """Split of a hub dataset or folder."""
    hub_eval_split: str | None = stated(None, resume=True)
    """Its split to evaluate on, as in `validation`. No source then has rows held out by `eval_fraction`."""


@dataclass(frozen=True, kw_only=True)
class _Data(_Rows):
    """What the recipes' sections share."""

    objective = ""  # name of the built-in one that takes such rows; without an annotation it is not a field
    num_rows: PositiveInt | None = None  # type: ignore[valid-type]
    """Use only the first N rows of each source."""
    eval_fraction: ClosedUnitInterval = 0.05  # type: ignore[valid-type]
    """Fraction of the rows to hold out for evaluation, chosen by a hash of each row's group or prompt (of a chat, all before its
    first answer), so that the splits share none."""
    eval_files: dict[str, list[str] | str] | list[str] | str | None = stated(None, path="pattern", resume=True)
    """Files with the evaluation split; training rows that equal one of theirs are left out. Under names, as in `{news: [a.csv,
    b.csv], mail: c.csv}`, each is a set with figures of its own. If unset, `eval_fraction` of the rows are held out."""
    csv_delimiter: str | None = stated(None, resume=True)
    """Character between the cells of `csv` files. If unset, a comma."""
    field: str | None = stated(None, resume=True)
    """Key under which JSON objects have the rows, as in `data` or `x.data`. If unset, in a file that is one object, the only one
    with a list of objects."""
    encoding: str | None = stated(None, resume=True)
    """Encoding of text files, as Python names it (`cp1252`, `utf-16`). If unset, UTF-8."""
    num_tokenizer_workers: PositiveInt | None = stated(None, resume=True, per_rank=True, in_card=False)  # type: ignore[valid-type]
    """Number of processes that tokenize. If unset, the machine's cores divided by its ranks, at most 8."""
    num_loader_workers: NonNegativeInt | None = stated(None, resume=True, per_rank=True, in_card=False)  # type: ignore[valid-type]
    """Number of processes per rank that collate batches ahead. 0 collates in the training process. If unset, 1 with a GPU, else
    0."""
    pad_lengths: bool | None = None
    """Pad the lengths of a micro-batch up to a grid, so that shapes come again: kernels, compiled blocks and memory are prepared
    per shape. The loss stays the same. The grid adds at most 3 % of padding to the first 100 steps. If unset, on GPUs only."""
    cache_dir: str | None = stated(None, resume=True, per_rank=True, in_card=False)
    """Folder for tokenized rows and trained tokenizers. If unset, `toolkit/` in the Hugging Face cache."""


@dataclass(frozen=True, kw_only=True)
class OneSource(_Data):
    """What the rows of a section without these fields of `LLMDataConfig` have in their place."""

    mix, format, packing, bucket_by_length = (), "auto", False, None


@dataclass(frozen=True, kw_only=True)
class _Seq2SeqData(OneSource):
    """What the sections of encoder-decoders share. Of a pair of answers the prompt is the source, and each answer a target."""

    source: str = stated("", path="named")
    prefix: str = ""
    """Text to put before every source, as in `summarize: `."""
    source_language: str | None = None
    """Source language, as the tokenizer of a translation model names it (`eng_Latn`). If unset, the tokenizer's own."""
    target_language: str | None = None
    """Target language. Generated texts begin with its token."""
    max_source_length_tokens: PositiveInt = 512  # type: ignore[valid-type]
    """Maximum tokens per source. Longer sources are truncated, and the number is printed."""
    max_target_length_tokens: PositiveInt = 150  # type: ignore[valid-type]
    """Maximum tokens per target. Longer targets are truncated, and the number is printed."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Seq2SeqData):
    """Which rows to read, and how to tokenize them."""

    objective = "seq2seq"
    source_column: str | None = None
    """Column with the text to summarize. If unset, the source's own column, else `source`."""
    target_column: str | None = None
    """Column with the summary. If unset, the source's own column, else `target`."""


@dataclass(frozen=True, kw_only=True)
class MixEntry(_Rows):
    """One of several sources. Fields are as in `data`."""

    source: str = stated("", path="named")
    name: str | None = stated(None, resume=True)
    """Name of its evaluation rows, a set with figures of its own. If unset, its source, or `mix[i]` if that is not one name."""
    weight: PositiveFloat = 1.0  # type: ignore[valid-type]
    """Share of an epoch's rows, relative to the other weights."""


@dataclass(frozen=True, kw_only=True)
class _CausalData(_Data):
    """What the sections of causal models share."""

    source: str | None = stated(None, path="named")
    mix: list[MixEntry] = stated(default_factory=list, path="entries")
    """List of weighted sources, instead of `source` and `files`."""
    chat_template: str | None = stated(None, path="path")
    """Jinja chat template, or a file with one. If unset, the tokenizer's own."""
    max_length_tokens: PositiveInt = 1024  # type: ignore[valid-type]
    """Maximum tokens per row, and length of packed rows; of a pair, of the prompt with one answer, and packed rows have twice as
    many. Longer plain text is split into several rows and loses no token; longer chats, completions and answers are truncated at
    their end, and the share of tokens lost is printed."""
    packing: bool | Literal["auto"] = "auto"
    """Pack several rows of a step into one row of the tensors. They do not attend to each other, so the result is the same
    as without packing. `auto` packs unless the model's masks cannot keep packed rows apart (GPT-1, DeepSeek V4)."""
    bucket_by_length: bool | None = None
    """Group rows of similar length into steps instead of drawing them at random. If unset, true without packing."""


@dataclass(frozen=True, kw_only=True)
class LLMDataConfig(_CausalData):
    """Which rows to read (chats, prompts with completions, or plain text), and how to tokenize them."""

    objective = "causal"
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = stated("auto", resume=True)
    """How rows are read: `messages` (a chat), `sharegpt` (`conversations` of `from` and `value`), `alpaca` (`instruction`,
    `input`, `output`, `system`, `history`), `prompt_completion` or `text`. `auto` goes by the names of the columns; if two
    readings fit, the run is refused."""
    messages_column: str | None = None
    """Column with a chat, a list of `{role, content}`; with `data.format sharegpt`, with its turns. If unset, `messages`, or
    `conversations`."""
    prompt_column: str | None = None
    """Column with the prompt. If unset, `prompt` if there is one."""
    completion_column: str | None = None
    """Column with the completion. If unset, `completion` if there is one."""
    text_column: str | None = None
    """Column with plain text. If unset, `text` if there is one."""
    loss_on: Literal["completions", "all"] = "completions"
    """Tokens that the loss counts: completions only (every assistant turn without `"weight": 0` or `"train": false`), or all.
    Every token of plain text counts."""


@dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(_CausalData):
    """Which pairs of answers to read, and how to tokenize them."""

    objective = "preference"
    format, loss_on, messages_column, completion_column, text_column = "auto", "completions", None, None, None
    prompt_column: str | None = None
    """Column with the prompt, a text or a list of messages. If unset, `prompt` if there is one; else what both answers begin with
    is the prompt."""
    chosen_column: str | None = None
    """Column with the better answer, a text or a list of messages. If unset, `chosen`."""
    rejected_column: str | None = None
    """Column with the worse answer. If unset, `rejected`."""


@dataclass(frozen=True, kw_only=True)
class Seq2SeqPreferenceDataConfig(_Seq2SeqData):
    """Which pairs of answers to read, and how to tokenize them for an encoder-decoder."""

    objective = "preference_seq2seq"
    prompt_column: str | None = None
    """Column with the text that is encoded. If unset, `prompt` if there is one; else what both answers begin with is it."""
    chosen_column: str | None = None
    """Column with the better target. If unset, `chosen`."""
    rejected_column: str | None = None
    """Column with the worse target. If unset, `rejected`."""
