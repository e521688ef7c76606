"""What an export needs of a run's rows, kept in the run folder: `data.json`, and `tokenizer/` beside it.

With it, any checkpoint can be exported when data files and caches are gone, or before they are read again.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.errors import UserError, refused
from toolkit.evaluation.rows import EvaluationRows
from toolkit.files.durable import save_json, written_beside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA_FILE, TOKENIZER = "data.json", "tokenizer"

NUM_CHECK_ROWS = 4
NUM_CHECK_TOKENS = 12
"""Tokens of each row, and of its target, whose logits are compared."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Facts about a run's rows. `data.json` holds these fields."""

    fingerprint: str
    """As in `TokenizedRows`."""
    num_training_rows: int
    num_held_out_rows: int
    num_evaluated_rows: int
    stop_token_ids: list[int]
    check_rows: list[dict[str, list[int]]]
    """From `cut_check_rows`."""


def cut_check_rows(data: EvaluationRows) -> list[dict[str, list[int]]]:
    """The first tokens of the first evaluation rows, whose logits an export compares."""
    rows = [data.rows[place] for place in range(min(NUM_CHECK_ROWS, len(data.rows)))]
    return [{name: list(map(int, row[name][:NUM_CHECK_TOKENS])) for name in ("input_ids", "labels")} for row in rows]


def describe_data(rows: TokenizedRows, evaluation: EvaluationRows) -> RunData:
    """The facts about these rows."""
    return RunData(
        fingerprint=rows.fingerprint,
        num_training_rows=len(rows.train),
        num_held_out_rows=len(rows.evaluation),
        num_evaluated_rows=len(evaluation.rows),
        stop_token_ids=list(rows.stop_token_ids),
        check_rows=cut_check_rows(evaluation),
    )


def save_run_data(run_folder: Path, data: RunData, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write tokenizer and facts, unless they are there. For rank 0 only.

    Raises:
        UserError: they cannot be written.
    """
    if (run_folder / TOKENIZER).is_dir() and _read(run_folder) == data:
        return
    try:
        (run_folder / DATA_FILE).unlink(missing_ok=True)  # until the tokenizer beside it is complete
        tokenizer.save_pretrained(run_folder / TOKENIZER)
        with written_beside(run_folder / DATA_FILE) as beside:
            save_json(beside, dataclasses.asdict(data))
    except Exception as error:  # a tokenizer raises nothing more exact
        found = refused(error) or error
        if not isinstance(found, OSError):
            raise
        raise UserError(f"{run_folder / TOKENIZER} cannot be written ({found.strerror}): fix that first") from None


def load_run_data(run_folder: Path, fingerprint: str) -> tuple[RunData, PreTrainedTokenizerBase] | None:
    """The facts about the rows of this fingerprint, and their tokenizer; None where a run has not kept them."""
    from transformers import AutoTokenizer

    data = _read(run_folder)
    if data is None or data.fingerprint != fingerprint:
        return None
    try:
        return data, AutoTokenizer.from_pretrained(run_folder / TOKENIZER)
    except (OSError, ValueError):
        return None


def _read(run_folder: Path) -> RunData | None:
    try:
        return RunData(**json.loads((run_folder / DATA_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
