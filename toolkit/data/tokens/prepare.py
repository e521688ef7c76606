"""From text rows to tokenized rows: built once per node under a hash of all that they depend on, and loaded by every rank.

All recipes pass here; what differs, the objective knows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from toolkit.config.data import DataConfig, LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.cache_folders import ABOUT, cache_folder, find_or_build, name_folder
from toolkit.data.rows.load import TextRows, load_rows
from toolkit.data.sources.row import count_rows_at_once
from toolkit.data.tokens.causal import locate
from toolkit.data.tokens.cuts import ROW_IDS_OF_A_PIECE, SIDES
from toolkit.data.tokens.fingerprint import hash_contents
from toolkit.data.tokens.read_tokenizer import open_tokenizer, trains_tokenizer
from toolkit.data.tokens.special_tokens import learn_spaces
from toolkit.data.tokens.tokenizer import hash_tokenizer, keep_trained_tokenizer, load_tokenizer
from toolkit.distributed.comm import gather_objects, on_all_ranks, rank
from toolkit.distributed.progress import Phase
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError
from toolkit.private import WORKER_KILLED, private
from toolkit.variables import local_rank, local_world_size

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from toolkit.objectives.objective import Objective

logger = logging.getLogger("toolkit")

FORMAT_VERSION = 8
"""Part of the cache's name. Raise it when the columns or their meaning change."""

_ROWS_WORTH_SEVERAL_PROCESSES = 10_000
_LONGEST_FOLDER, _OTHER_FOLDERS = 107 - len("/pymp-12345678/listener-12345678"), ("/tmp", "/var/tmp", "/dev/shm")
"""The longest path of a folder with sockets of `multiprocess` in it, and where else they can be."""
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

    `end_token_ids` are the tokens at which the model ends a text.

    Raises:
        UserError: anything wrong with the source, the tokenizer or the chat template; after the cut, no training row has a label,
            over all or in one entry of `data.mix`; the nodes have read different data. On every rank.
    """
    from datasets import load_from_disk

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
            train=load_from_disk(str(folder / "train")),
            evaluation=load_from_disk(str(folder / "evaluation")),
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
    """Read the rows, and tokenize them unless their tokens are in the cache. For one process per node.

    Returns:
        The name of the tokens' folder in the cache, a sha256 of everything that decides them; that of their contents, see
        `TokenizedRows.fingerprint`; the rows.
    """
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
    """Write `train/`, `evaluation/` and `tokenizer/` into `folder`. Returns what is stored beside them."""
    remarks = rows.remarks + objective.describe(tokenizer, rows)
    stop_token_ids, held, targets = set[int](), set[str](), list[str]()
    tokenize = partial(objective.tokenize, tokenizer=tokenizer, config=config, origins=rows.origins)
    for name, dataset in (("train", rows.train), ("evaluation", rows.evaluation)):
        # `map` over no rows would not add the new columns; there are training rows, so theirs are taken.
        if len(dataset):
            tokenized = tokenize_rows(dataset, tokenize, name, folder, num_workers=config.num_tokenizer_workers)
        else:
            tokenized = tokenized.select([])
        for odd in filter(None, tokenized.unique("odd")):
            pairs = zip(tokenized["row_id"][:], tokenized["odd"][:], strict=True)
            of_odd = [number % ROW_IDS_OF_A_PIECE for number, what in pairs if what == odd]
            where = f"{len({*of_odd})} of {len(dataset)} {SIDES[name]} rows (first: {locate(of_odd[0], rows.origins)})"
            remarks.append(odd.format(where))
        held |= {token for tokens in tokenized.unique("held") for token in tokens.split("\0") if token}
        kept, sentences, stops = objective.report(tokenized, config, name, rows.origins)
        kept = kept.remove_columns(["odd", "held"])
        remarks += sentences
        stop_token_ids |= stops
        targets += kept["target"][:_NUM_TARGETS_READ]
        # One shard even for no rows: without any, the library cannot read the folder back.
        kept.save_to_disk(str(folder / name), num_shards=None if len(kept) else 1)
        for scratch_file in folder.glob(f"{name}*.arrow"):
            scratch_file.unlink()
    tokenizer.save_pretrained(folder / "tokenizer")
    kept_tokens = learn_spaces(tokenizer, sorted(held.difference(tokenizer.convert_ids_to_tokens([*stop_token_ids]))), targets)
    about = {"remarks": remarks, "stop_token_ids": sorted(stop_token_ids), "kept_tokens": kept_tokens}
    return about | {"contents": hash_contents(folder)}


def tokenize_rows(dataset: Dataset, tokenize: Tokenize, name: str, folder: Path, *, num_workers: int | None) -> Dataset:
    """Replace the text columns by the columns from `tokenize`; many rows are tokenized by several processes. A process that is
    killed is a `UserError`; so are those of `tokenize`.

    Args:
        tokenize: returns one or several rows for each.
        name: `train` or `evaluation`, for messages and files.
        folder: gets a file that backs the result; remove it after use.
        num_workers: processes; None: the machine's cores divided by its ranks, at most 8.
    """
    import datasets

    datasets.disable_progress_bars()  # ours is on rank 0 only, and becomes lines where there is no terminal
    num_workers = num_workers or min(8, (os.cpu_count() or 1) // local_world_size())
    has_workers = num_workers > 1 and len(dataset) > _ROWS_WORTH_SEVERAL_PROCESSES
    if has_workers:
        _shorten_sockets()
    num_processes, phase = num_workers if has_workers else 1, Phase(f"tokenizing {name} rows", len(dataset), "rows")
    try:
        return dataset.map(
            partial(_tokenize_shown, tokenize=tokenize, phase=phase, num_processes=num_processes),
            batched=True,
            with_rank=True,
            # A batch is in memory as text and as tokens at once, so long rows need smaller batches.
            batch_size=count_rows_at_once(len(dataset), dataset.data.nbytes),
            num_proc=num_workers if has_workers else None,
            remove_columns=dataset.column_names,
            # A fingerprint of our own, because that of `datasets` hashes the tokenizer, which differs between processes. It is
            # never used for a look-up: the token cache is ours.
            new_fingerprint=hashlib.sha256(f"{private('_fingerprint', dataset)} {folder} {name}".encode()).hexdigest()[:16],
            load_from_cache_file=False,
            cache_file_name=str(folder / f"{name}.arrow"),
        )
    except RuntimeError as error:
        if WORKER_KILLED not in str(error):
            raise
        raise UserError(
            f"one of the {num_workers} processes that tokenize the {name} rows was killed, as the system does where memory runs "
            "out: set data.num_tokenizer_workers to fewer, and run the same command again"
        ) from None


def _shorten_sockets() -> None:
    """Let the sockets of the processes that tokenize have paths that the system takes, of at most 107 bytes. `multiprocess` puts
    them into a folder that it makes in TMPDIR at the first use, and keeps until this process exits."""
    import multiprocess.util

    places = (place for place in (tempfile.gettempdir(), *_OTHER_FOLDERS) if len(os.fsencode(place)) <= _LONGEST_FOLDER)
    with mock.patch.object(tempfile, "tempdir", next((place for place in places if os.access(place, os.W_OK | os.X_OK)), None)):
        multiprocess.util.get_temp_dir()


def _tokenize_shown(
    rows: dict[str, list], process: int | None, *, tokenize: Tokenize, phase: Phase, num_processes: int
) -> dict[str, list] | pa.Table:
    """What `tokenize` returns. Of several processes the first shows its own progress, which stands for all."""
    tokenized = tokenize(rows)
    if not process:
        phase.add(len(next(iter(rows.values()))) * num_processes)
    if hasattr(next(iter(tokenized.get("labels", ())), None), "dtype"):  # `datasets` reads numpy arrays 20 times as slowly
        import pyarrow as pa

        return pa.table(tokenized)
    return tokenized
