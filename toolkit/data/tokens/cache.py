"""The token cache: tokenized rows, built once per node under a hash of all that they depend on, and loaded by every rank."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.data.cache_folders import ABOUT, find_or_build
from toolkit.data.tokens.tokenizer import hash_tokenizer
from toolkit.distributed.comm import gather_objects, local_rank, local_world_size, raise_together
from toolkit.distributed.watchdog import working
from toolkit.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_ROWS_WORTH_SEVERAL_PROCESSES = 10_000
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1000, 2**24


@dataclass(frozen=True)
class TokenizedRows:
    """The rows of a run as token ids.

    `train` and `evaluation` have the columns `row_id` (unique over both), `input_ids`, `labels`, `num_tokens` (without
    padding), `num_label_tokens` (tokens that count in the loss), `target_bytes` (utf-8 bytes of the text of these tokens),
    `target` and `lead_text`.

    For a causal model, `labels` is as long as `input_ids` and not shifted, with -100 where a token does not count, always so at
    the first position. There are two more columns: `prompt_length`, the number of tokens before the generated text (0: no
    generation), and `source_index`, the entry of `data.mix` (0 without a mix and for rows of `data.eval_files`). A text that
    was split into several rows has the ids `row_id`, `row_id` + 10^10, `row_id` + 2 · 10^10, … in order.
    """

    train: Dataset
    evaluation: Dataset
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    """sha256 of all columns and the tokenizer as they are on disk; a resume compares it."""
    remarks: list[str]
    """Sentences to print for the user."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a generated text: the tokenizer's end token, and the special tokens that end the turns of chats. Empty for
    an encoder-decoder, whose generation config has them."""


class Written(NamedTuple):
    """Tokenized rows on disk."""

    name: str
    """The name of their folder in the cache: a sha256 of everything that decides them."""
    contents: str
    """sha256 of their contents, see `TokenizedRows.fingerprint`."""


class About(NamedTuple):
    """The fields of `TokenizedRows` that are stored beside the columns."""

    remarks: list[str]
    stop_token_ids: list[int] | tuple[()] = ()


def build_once_a_node(cache: Path, build: Callable[[], Written]) -> TokenizedRows:
    """Run `build` on the first process of each node, then load its result on every rank. Collective.

    Args:
        build: writes tokenized rows into a folder of `cache` unless they are there, see `write_tokens`.

    Raises:
        UserError: those of `build`; the nodes have read different data. On every rank.
    """
    from datasets import load_from_disk
    from transformers import AutoTokenizer

    # Build, or verify, on the first process of each node.
    working("tokenizing")
    written, error = None, None
    if local_rank() == 0:
        try:
            written = build()
        except UserError as e:
            error = e
    raise_together(error)
    # All nodes must have the same rows.
    all_written = {item for item in gather_objects(written) if item is not None}
    names, contents = (sorted(set(values)) for values in zip(*all_written, strict=True))
    if len(names) > 1:
        raise UserError(f"the nodes read different data or tokenizers (fingerprints {', '.join(name[:12] for name in names)})")
    if len(contents) > 1:
        # The tokenizers library trains a different model each time, even on the same rows.
        raise UserError(
            "the nodes have made different tokens or tokenizers from the same rows: put data.cache_dir on a file system that all "
            "nodes share, or, if the tokenizer is trained on the rows, put a trained one into the model folder"
        )
    working("opening the tokenized rows")
    folder = cache / names[0]
    about = json.loads((folder / ABOUT).read_text())
    return TokenizedRows(
        train=load_from_disk(str(folder / "train")),
        evaluation=load_from_disk(str(folder / "evaluation")),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        fingerprint=contents[0],
        remarks=about["remarks"],
        stop_token_ids=tuple(about["stop_token_ids"]),
    )


def write_tokens(cache: Path, identity: dict[str, Any], write: Callable[[Path], About]) -> Written:
    """Let `write` fill a folder of `cache`, named by the sha256 of `identity`, unless a valid one is there.

    Args:
        identity: everything that decides what `write` writes, as JSON values.
        write: puts `train/`, `evaluation/` and `tokenizer/` into the folder given to it.

    Raises:
        UserError: the cache cannot be written or read; those of `write`.
    """
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def build(folder: Path) -> dict[str, Any]:
        about = write(folder)
        return {**about._asdict(), "contents": hash_contents(folder), **identity}

    return Written(name, find_or_build("the token cache", cache / name, build)["contents"])


def hash_contents(folder: Path) -> str:
    """sha256 of the columns of tokenized rows and of their tokenizer, independent of the files' block sizes.

    It is computed once, when the rows are written, with one block in memory at a time (1.5 s per GB here). Later runs compare
    the files, see `cache_folders`.
    """
    from datasets import load_from_disk
    from transformers import AutoTokenizer

    digest = hashlib.sha256(hash_tokenizer(AutoTokenizer.from_pretrained(folder / "tokenizer")).encode())
    for part in ("train", "evaluation"):
        table = load_from_disk(str(folder / part)).data.table
        for name in sorted(table.column_names):
            column = table.column(name)
            digest.update(f"{part} {name} {column.type} {len(column)}".encode())
            for chunks in _list_values(column.chunks):
                values = hashlib.sha256()
                for chunk in chunks:
                    values.update(np.ascontiguousarray(chunk).data)
                digest.update(values.digest())
    return digest.hexdigest()


def tokenize_rows(
    dataset: Dataset,
    tokenize: Callable[..., dict[str, list]],
    arguments: dict[str, Any],
    name: str,
    folder: Path,
    *,
    num_workers: int | None,
    placeholder: dict[str, str],
) -> Dataset:
    """Replace the text columns by the columns from `tokenize`; many rows are tokenized by several processes.

    Args:
        tokenize: called with a batch of rows as columns, and `arguments`; returns one or several rows for each.
        name: `train` or `evaluation`, for messages and files.
        folder: gets a file that backs the result; remove it after use, see `save_tokens`.
        num_workers: processes; None: the machine's cores divided by its ranks, at most 8.
        placeholder: the text columns of any valid row.

    Raises:
        UserError: one of the processes was killed; those of `tokenize`.
    """
    import datasets

    if not sys.stderr.isatty():  # progress bars are for terminals
        datasets.disable_progress_bars()
        print(f"tokenizing {len(dataset):,} {name} rows", flush=True)
    if is_empty := len(dataset) == 0:
        # `map` over no rows would not add the new columns: tokenize a placeholder row and drop it at the end.
        row: dict[str, list] = {"row_id": [0], **{column: [text] for column, text in placeholder.items()}}
        dataset = datasets.Dataset.from_dict(row, features=dataset.features)
    num_workers = num_workers or min(8, (os.cpu_count() or 1) // local_world_size())
    has_workers = num_workers > 1 and len(dataset) > _ROWS_WORTH_SEVERAL_PROCESSES
    try:
        tokenized = dataset.map(
            tokenize,
            batched=True,
            # A batch is in memory as text and as tokens at once, so long rows need smaller batches.
            batch_size=max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * len(dataset) // dataset.data.nbytes)),
            num_proc=num_workers if has_workers else None,
            remove_columns=["source"],
            fn_kwargs=arguments,
            # A fingerprint of our own, because that of `datasets` hashes the tokenizer, which differs between processes. It is
            # never used for a look-up: the token cache is ours.
            new_fingerprint=hashlib.sha256(f"{dataset._fingerprint} {folder} {name}".encode()).hexdigest()[:16],
            load_from_cache_file=False,
            cache_file_name=str(folder / f"{name}.arrow"),
            desc=f"tokenizing {name} rows",
        )
    except RuntimeError as error:
        if "abruptly died" not in str(error):  # the wording of `datasets`
            raise
        raise UserError(
            f"one of the {num_workers} processes that tokenize the {name} rows was killed, as the system does where memory runs "
            "out: set data.num_tokenizer_workers to fewer, and run the same command again"
        ) from None
    return tokenized.select([]) if is_empty else tokenized


def _list_values(chunks: list[pa.Array]) -> Iterator[Iterator[np.ndarray]]:
    """The values of a column, block by block; for texts and lists the lengths first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = chunks[0].type if chunks else pa.null()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield (pc.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in chunks)
        yield (chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield (pc.binary_length(chunk).to_numpy(zero_copy_only=False) for chunk in chunks)
        yield (np.frombuffer("".join(chunk.to_pylist()).encode(), dtype=np.uint8) for chunk in chunks)
    else:
        yield (chunk.to_numpy(zero_copy_only=False) for chunk in chunks)


def save_tokens(tokenized: Dataset, name: str, folder: Path) -> None:
    """Write the result of `tokenize_rows` to `folder / name`, and remove the file that backed it."""
    # One shard even for no rows: without any, the library cannot read the folder back.
    tokenized.save_to_disk(str(folder / name), num_shards=None if len(tokenized) else 1)
    for scratch_file in folder.glob(f"{name}*.arrow"):
        scratch_file.unlink()
