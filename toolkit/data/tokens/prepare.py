"""From text rows to tokenized rows: built once per node under a hash of all that they depend on, and loaded by every rank.

All recipes pass here; what differs, the objective knows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.cache_folders import ABOUT, cache_folder, find_or_build, name_folder
from toolkit.data.rows.load import TextRows, load_rows
from toolkit.data.sources.row import count_rows_at_once
from toolkit.data.tokens.causal import locate
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE, SIDES
from toolkit.data.tokens.special_tokens import learn_spaces
from toolkit.data.tokens.tokenizer import hash_tokenizer, keep_trained_tokenizer, load_tokenizer, open_tokenizer, trains_tokenizer
from toolkit.data.workers import load_ahead
from toolkit.distributed.comm import gather_objects, on_all_ranks, rank
from toolkit.distributed.progress import Phase
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import LOADER_WORKER, UserError
from toolkit.variables import local_rank, local_world_size

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from toolkit.objectives.objective import Objective

logger = logging.getLogger("toolkit")

FORMAT_VERSION = 9
"""Part of the cache's name. Raise it when the columns, their meaning or the files change."""

_ROWS_WORTH_SEVERAL_PROCESSES = 10_000
_NUM_TARGETS_READ = 10_000  # for the spaces around special tokens

Tokenize = Callable[[dict[str, list]], dict[str, list]]
"""Called with a batch of rows as columns."""


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
    kept_tokens: dict[str, list[str]] = field(default_factory=dict)
    """The special tokens that targets hold, as `special_tokens.Kept`."""
    sets: tuple[tuple[int, str], ...] = ()
    """Of each input: how many rows were read from it, and the set of its evaluation rows, if that has a name."""
    texts: TextRows | None = None
    """What they were made of, on each node's first process; None on the others."""


def prepare_rows(
    objective: Objective,
    config: DataConfig | LLMDataConfig,
    model: ModelConfig,
    vocab_size: int,
    end_token_ids: tuple[int, ...] = (),
) -> TokenizedRows:
    """Read, tokenize and cache the rows on the first process of each node; the others load the cache. Collective.

    `end_token_ids` are the tokens at which the model ends a text. Anything wrong with the source, the tokenizer or the chat
    template is a `UserError` on every rank; so are nodes that have read different data, and no training row with a label after
    the cut, over all or in one entry of `data.mix`.
    """
    from datasets import Dataset

    # Build, or verify, on the first process of each node.
    enter_phase("tokenizing", counts_cpu=True)
    built = on_all_ranks(
        lambda: _find_or_build(objective, config, model, vocab_size, end_token_ids) if local_rank() == 0 else None
    )
    name, fingerprint, texts = built or (None, None, None)
    sets = texts and tuple((number, item.set_name) for (_, number), item in zip(texts.origins, texts.inputs, strict=True))
    # All nodes must have the same rows.
    written = gather_objects((name, fingerprint, sets))
    names, contents, all_sets = (sorted({value for value in values if value}) for values in zip(*written, strict=True))
    if len(names) > 1:
        raise UserError(f"the nodes read different data or tokenizers (fingerprints {', '.join(name[:12] for name in names)})")
    if len(contents) > 1:
        # The tokenizers library trains a different model each time, even on the same rows.
        raise UserError(
            "the nodes have made different tokens or tokenizers from the same rows: put data.cache_dir on a file system that all "
            "nodes share, or, if the tokenizer is trained on the rows, put a trained one into the model folder"
        )
    enter_phase("opening the tokenized rows", counts_cpu=True)
    folder = cache_folder(config.cache_dir) / names[0]

    def load() -> TokenizedRows:
        if not (folder / ABOUT).is_file():
            found_by = "which the first rank of its machine can: give both the same data.cache_dir or HF_HOME"
            raise UserError(f"rank {rank()} cannot read the tokens in {folder}, {found_by}")
        about = json.loads((folder / ABOUT).read_text())
        return TokenizedRows(
            train=Dataset.from_file(str(folder / "train.arrow")),
            evaluation=Dataset.from_file(str(folder / "evaluation.arrow")),
            tokenizer=open_tokenizer(folder / "tokenizer"),
            fingerprint=contents[0],
            remarks=about["remarks"],
            stop_token_ids=tuple(about["stop_token_ids"]),
            kept_tokens=about["kept_tokens"],
            sets=all_sets[0],
            texts=texts,
        )

    return on_all_ranks(load)


def _find_or_build(
    objective: Objective, config: Any, model: ModelConfig, vocab_size: int, ends: tuple[int, ...]
) -> tuple[str, str, TextRows]:
    """Read the rows, and tokenize them unless their tokens are in the cache. For one process per node. Returns the name of the
    tokens' folder in the cache, a sha256 of everything that decides them; that of their contents, see
    `TokenizedRows.fingerprint`; the rows."""
    tokenizer = None if trains_tokenizer(model) else load_tokenizer(model, vocab_size)
    if tokenizer is not None:
        objective.set_up(tokenizer, config, model)
    settings = objective.list_settings(config, tokenizer)
    has_chat_template = "chat_template" in settings and bool(tokenizer.chat_template if tokenizer else config.chat_template)
    rows = load_rows(objective, config, has_chat_template=has_chat_template)
    for line in rows.readings:
        logger.info(line)
    identity = {
        "format": FORMAT_VERSION,
        "rows": rows.fingerprint,
        "tokenizer": hash_tokenizer(tokenizer) if tokenizer else f"{objective.trained} on the rows, {vocab_size} tokens",
        "end_token_ids": ends,
        **settings,
    }
    cache = cache_folder(config.cache_dir)

    def write(folder: Path) -> dict[str, Any]:
        used = tokenizer
        if used is None:
            prefix = identity.get("prefix")
            trained_on = f"{rows.fingerprint} {identity['tokenizer']}" + (f", prefix {prefix!r}" if prefix else "")
            used = keep_trained_tokenizer(cache, trained_on, partial(objective.train, rows.train, vocab_size, config))
            objective.set_up(used, config, model)
        used.end_token_ids = ends  # type: ignore[attr-defined]
        return _write_tokens(objective, config, rows, used, folder) | identity

    folder = cache / name_folder(identity)
    return folder.name, find_or_build("the token cache", folder, write)["contents"], rows


def _write_tokens(
    objective: Objective, config: Any, rows: TextRows, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, Any]:
    """Write `train.arrow`, `evaluation.arrow` and `tokenizer/` into `folder`. Returns what is stored beside them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    remarks = rows.remarks + objective.describe(tokenizer, rows)
    stop_token_ids, held, targets, hashed = set[int](), set[str](), list[str](), b""
    tokenize = partial(objective.tokenize, tokenizer=tokenizer, config=config, origins=rows.origins)
    table: Any = None
    for name, dataset in (("train", rows.train), ("evaluation", rows.evaluation)):
        tables, blocks = tokenize_rows(dataset, tokenize, name, config.num_tokenizer_workers), list[pa.Table]()
        if not len(dataset):  # there are training rows, whose columns are taken
            tables = iter([table.slice(0, 0)])
        with closing(TokenFile(folder / f"{name}.arrow")) as file:
            for table in tables:
                of_counts = [field.name for field in table.schema if pa.types.is_integer(field.type)]
                blocks.append(table.select(dict.fromkeys((*of_counts, *objective.reported_columns))))
                tokens = table.filter(pc.greater(table["num_label_tokens"], 0)) if objective.drops_unlabelled else table
                targets += tokens["target"][: max(0, _NUM_TARGETS_READ - file.num_rows)].to_pylist()
                if "stop_token_ids" in tokens.column_names:
                    stop_token_ids.update(pc.list_flatten(tokens["stop_token_ids"]).unique().to_pylist())
                file.add(tokens.drop_columns(list(objective.reported_columns)))
        hashed += file.hash_values(name)
        counts = pa.concat_tables(blocks)
        for odd in filter(None, counts["odd"].unique().to_pylist()):
            numbers = counts["row_id"].filter(pc.equal(counts["odd"], odd)).to_pylist()
            of_odd = list(dict.fromkeys(number % ROW_IDS_OF_A_PIECE for number in numbers))
            where = f"{len(of_odd)} of {len(dataset)} {SIDES[name]} rows (first: {locate(of_odd[0], rows.origins)})"
            remarks.append(odd.format(where))
        held |= {token for tokens in counts["held"].unique().to_pylist() for token in tokens.split("\0") if token}
        of_report = {column: counts[column].to_numpy() for column in counts.column_names if column != "stop_token_ids"}
        remarks += objective.report(of_report, config, name, rows.origins)
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:  # one process keeps the cut of its last text
        backend.no_truncation()
        backend.no_padding()
    tokenizer.save_pretrained(folder / "tokenizer")
    contents = hashlib.sha256(hash_tokenizer(open_tokenizer(folder / "tokenizer")).encode() + hashed).hexdigest()
    kept_tokens = learn_spaces(tokenizer, sorted(held.difference(tokenizer.convert_ids_to_tokens([*stop_token_ids]))), targets)
    about = {"remarks": remarks, "stop_token_ids": sorted(stop_token_ids), "kept_tokens": kept_tokens}
    return about | {"contents": contents}


def tokenize_rows(dataset: Dataset, tokenize: Tokenize, name: str, num_workers: int | None) -> Iterator[pa.Table]:
    """Yield the columns from `tokenize`, which returns one or several rows for each, in the order of the rows. Many rows are
    tokenized by `num_workers` processes; None: as many as the machine's cores divided by its ranks, at most 8. A process that is
    killed is a `UserError` with `name`, `train` or `evaluation`; so are those of `tokenize`."""
    num_rows, num_workers = len(dataset), num_workers or min(8, (os.cpu_count() or 1) // local_world_size())
    # A block is in memory as text and as tokens at once, so long rows need smaller blocks.
    size = count_rows_at_once(num_rows, dataset.data.nbytes)
    blocks = [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    has_workers = num_workers > 1 and num_rows > _ROWS_WORTH_SEVERAL_PROCESSES
    load, phase = partial(_tokenize_block, dataset, tokenize), Phase(f"tokenizing {name} rows", num_rows, "rows")
    try:
        for block, table in load_ahead(load, blocks, num_workers=num_workers if has_workers else 0):
            phase.add(block.stop - block.start)
            yield table
    except RuntimeError as error:
        if not LOADER_WORKER.search(str(error)):
            raise
        raise UserError(
            f"one of the {num_workers} processes that tokenize the {name} rows was killed, as the system does where memory runs "
            "out: set data.num_tokenizer_workers to fewer, and run the same command again"
        ) from None


def _tokenize_block(dataset: Dataset, tokenize: Tokenize, block: slice) -> pa.Table:
    """The columns of some rows, with the types that `datasets` gives them: `input_ids` from Python's integers are int32."""
    import pyarrow as pa
    from datasets import Dataset

    tokenized = tokenize(dataset[block])
    if hasattr(next(iter(tokenized.get("labels", ())), None), "dtype"):  # `datasets` reads numpy arrays 20 times as slowly
        return pa.table(tokenized)
    return Dataset.from_dict(tokenized).data.table


class TokenFile:
    """The file of a split's tokens, an Arrow stream. Its values are hashed as they are written, by column, so that the sizes of
    blocks do not matter; the hash says whether two runs train on the same tokens."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._stream: Any = None
        self._digests: dict[str, list[Any]] = {}
        self.num_rows = 0

    def add(self, table: pa.Table) -> None:
        """Write rows; the first ones decide the types of the columns."""
        import pyarrow as pa

        if self._stream is None:
            self._schema = table.schema.remove_metadata()
            self._stream = pa.ipc.new_stream(self._file, self._schema)
            self._digests = {name: [] for name in sorted(table.column_names)}
        table = table.cast(self._schema)
        self.num_rows += len(table)
        self._stream.write_table(table)
        for name, digests in self._digests.items():
            for chunk in filter(len, table[name].chunks):
                values = _list_values(chunk)
                digests += [hashlib.sha256() for _ in values[len(digests) :]]
                for digest, array in zip(digests, values, strict=True):
                    digest.update(np.ascontiguousarray(array).data)

    def close(self) -> None:
        """End the file."""
        if self._stream is not None:
            self._stream.close()
        self._file.close()

    def hash_values(self, part: str) -> bytes:
        """What the fingerprint of tokens takes of the columns of `part`."""
        hashed = b""
        for name, digests in self._digests.items():
            hashed += f"{part} {name} {self._schema.field(name).type} {self.num_rows}".encode()
            hashed += b"".join(digest.digest() for digest in digests or [hashlib.sha256()])
        return hashed


def _list_values(chunk: pa.Array) -> list[np.ndarray]:
    """The values of a part of a column; of texts and lists the lengths first."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
        return [array.to_numpy(zero_copy_only=False) for array in (pc.list_value_length(chunk), chunk.flatten())]
    if pa.types.is_string(chunk.type) or pa.types.is_large_string(chunk.type):
        lengths = pc.binary_length(chunk).to_numpy(zero_copy_only=False)
        return [lengths, np.frombuffer("".join(chunk.to_pylist()).encode(), dtype=np.uint8)]
    return [chunk.to_numpy(zero_copy_only=False)]
