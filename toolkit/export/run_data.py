"""What an export needs of a run's rows, kept in the run folder: `data.json`, and `tokenizer/` beside it. With it, any checkpoint
can be exported when data files and caches are gone, or before they are read again.

Beside an export, `trainer_state.json` has the run's metrics under the names of transformers' Trainer, which other tools read.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.tokens.prepare import TokenizedRows
from toolkit.data.tokens.tokenizer import open_tokenizer
from toolkit.errors import UserError, first_line, refusal_named
from toolkit.evaluation.rows import EvaluationRows
from toolkit.files.durable import describe_files, fsync_tree, list_files, refuse_pointers, save_json

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
    has_chats: bool = True
    """Whether any row is a chat. Runs that did not record it count as such, if their tokenizer has a chat template."""
    kept_tokens: dict[str, list[str]] = field(default_factory=dict)
    """As `TokenizedRows.kept_tokens`."""
    tokenizer_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size and hash of each file in `tokenizer/`; empty before they are written."""


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
        kept_tokens=rows.kept_tokens,
        has_chats=rows.texts is None or bool(rows.texts.message_keys),
    )


def save_run_data(run_folder: Path, data: RunData, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write tokenizer and facts, unless they are there, whole; a `UserError` if they cannot be written. For rank 0 only."""
    folder = run_folder / TOKENIZER
    with suppress(OSError, ValueError, TypeError):
        kept = _read(run_folder)
        if dataclasses.replace(kept, tokenizer_files={}) == data:
            return
    with refusal_named(f"{folder} cannot be written", "fix that first"):  # a tokenizer raises nothing more exact
        (run_folder / DATA_FILE).unlink(missing_ok=True)  # until the tokenizer beside it is complete
        shutil.rmtree(folder, ignore_errors=True)
        tokenizer.save_pretrained(folder)
        data = dataclasses.replace(data, tokenizer_files=_describe(folder))
        fsync_tree(folder)
        save_json(run_folder / DATA_FILE, dataclasses.asdict(data))


def load_run_data(run_folder: Path, fingerprint: str) -> tuple[RunData, PreTrainedTokenizerBase]:
    """The facts about the rows of this fingerprint, and their tokenizer; a `UserError` if the run has not kept them, or not
    whole."""
    try:
        data, reason = _read(run_folder), "they are of other rows"
        if data.fingerprint == fingerprint:
            return data, open_tokenizer(run_folder / TOKENIZER)
    except Exception as error:  # a damaged tokenizer may raise anything
        reason = first_line(error)
    what = f"{DATA_FILE} and {TOKENIZER}/ of {run_folder} cannot be used ({reason})"
    raise UserError(f"{what}: start the run once more, which writes them again")


def _read(run_folder: Path) -> RunData:
    """The facts, after a check that the tokenizer's files are those that they name; else an `OSError`, `ValueError` or
    `TypeError`."""
    refuse_pointers([run_folder / DATA_FILE, *(run_folder / TOKENIZER).glob("*")])
    data = RunData(**json.loads((run_folder / DATA_FILE).read_text(encoding="utf-8")))
    if _describe(run_folder / TOKENIZER) != data.tokenizer_files:
        raise ValueError(f"the files in {run_folder / TOKENIZER} are not those that the run wrote")
    return data


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    return describe_files(folder, [name for name in list_files(folder) if not name.startswith(".")])  # file browsers leave some


FROM_TRAINING = ("loss", "grad_norm", "learning_rate")
NOT_OF_THE_MODEL = ("step", "rows_per_s")


def save_trainer_state(folder: Path, lines: list[dict[str, Any]], step: int, num_training_rows: int | None) -> None:
    """Write what `lines` of `metrics.jsonl` have up to `step`; at the end a summary. `epoch` is the epochs done, by rows."""
    from transformers import TrainerState
    from transformers.trainer import TRAINER_STATE_NAME

    state, num_rows = TrainerState(global_step=step, log_history=[]), 0
    trained = [line for line in lines if line["kind"] == "train" and line["step"] <= step]
    if [line["step"] for line in trained] != list(range(1, len(trained) + 1)):
        num_training_rows = 0  # the first lines are lost: their rows are not known
    for line in lines:
        if line["step"] > step or line["kind"] not in ("train", "eval"):
            continue
        if line["kind"] == "train":
            num_rows += line["num_rows"]
            state.num_input_tokens_seen = line.get("num_input_tokens_seen", state.num_input_tokens_seen + line["num_tokens"])
            state.epoch = num_rows / num_training_rows if num_training_rows else line["epoch"]
            figures = {name: line[name] for name in FROM_TRAINING}
        else:
            names = [name for name, value in line.items() if isinstance(value, int | float) and name not in NOT_OF_THE_MODEL]
            figures = {f"eval_{name}": line[name] for name in names}
            if rows_per_s := line.get("rows_per_s"):
                figures |= {"eval_runtime": line["num_rows"] / rows_per_s, "eval_samples_per_second": rows_per_s}
        of_state = {"epoch": state.epoch, "num_input_tokens_seen": state.num_input_tokens_seen}
        state.log_history.append({**figures, **of_state, "step": line["step"]})
    if losses := [line["loss"] for line in trained if line["loss"] is not None]:
        seconds = sum(line["step_time_s"] for line in trained)
        figures = {"train_runtime": seconds, "train_samples_per_second": num_rows / seconds}
        figures |= {"train_steps_per_second": len(trained) / seconds, "train_loss": statistics.fmean(losses), "total_flos": 0.0}
        state.log_history.append({**figures, "epoch": state.epoch, "step": step})
    state.save_to_json(str(folder / TRAINER_STATE_NAME))
