"""The end of a run in the terminal: figures before and after training beside the baselines, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.distributed.comm import rank
from toolkit.errors import UserError, align, escape_controls, one_line
from toolkit.evaluation.generate import SHOWN_FIGURES
from toolkit.evaluation.metrics import own_figures
from toolkit.evaluation.rows import EvaluationRows
from toolkit.evaluation.sets import list_by_set, of_all_rows
from toolkit.files.json_lines import load_json_lines
from toolkit.tracking.metrics_log import MetricsLog

if TYPE_CHECKING:
    from datasets import Dataset

NUM_SAMPLES = 3


def show_results(
    metrics: MetricsLog, baselines: dict[str, dict[str, Any]], evaluation: EvaluationRows, measured_on: dict[str, Any]
) -> None:
    """Print the before/after table and sample texts. Only on rank 0 and with evaluation rows.

    The figures come from `metrics`, which has them even if the file was removed.

    Args:
        baselines: from `measure_baselines`.
        measured_on: as in the run's `Goal`; evaluations on other rows or with other generation settings are not in the table.
    """
    if rank() != 0 or len(evaluation.rows) == 0:
        return
    run_folder = metrics.path.parent
    # Only evaluations on the same rows and settings are comparable.
    everything = [line for line in metrics.load() if line["kind"] == "eval"]
    evaluations = [line for line in everything if of_all_rows(line) == of_all_rows({"measured_on": measured_on})]
    if num_others := len(everything) - len(evaluations):
        why = "measured on other rows or with other settings"
        print(f"\n{num_others} evaluations of {one_line(str(run_folder))} are not shown: {why}", flush=True)
    if not evaluations:
        print(
            f"\nno table: {one_line(str(run_folder))} has no evaluation of these {len(evaluation.rows)} held-out rows", flush=True
        )
        return
    # The first and the last evaluation, beside the baselines.
    named = {f"step {line['step']}": line for line in (evaluations[0], evaluations[-1])}
    if evaluations[0]["step"] == 0:
        named["before training"] = named.pop("step 0")
    prompted = evaluation.rows.select(evaluation.prompted)
    table = list_by_set({**baselines, **dict(sorted(named.items()))}, measured_on.get("sets", {}))
    own = own_figures(evaluation.metrics, evaluations[-1])
    words = f"; ROUGE counts {evaluation.rouge_tokenizer.description}" if baselines else ""
    print(f"\n{len(evaluation.rows)} held-out rows{words}\n{format_table(table, (*SHOWN_FIGURES, *own))}\n", flush=True)
    if "rougeL" in evaluations[-1]:
        _print_samples(run_folder / f"predictions-{evaluations[-1]['step']}.jsonl", prompted)


def format_table(rows: dict[str, dict[str, float]], choice: Sequence[str] = SHOWN_FIGURES) -> str:
    """Format figures, by row name, as aligned text. A column that no row has is left out."""
    columns = [column for column in choice if any(column in row for row in rows.values())]
    table = [["", *(column.replace("percent_", "% ") for column in columns)]]
    table += [[name, *("–" if row.get(c) is None else f"{row[c]:.2f}" for c in columns)] for name, row in rows.items()]
    return "\n".join(align([list(map(one_line, line)) for line in table]))


def _print_samples(predictions_path: Path, eval_rows: Dataset) -> None:
    """Print a few evenly spaced rows of the evaluation split, so that they are not cherry-picked."""
    lines: list[dict[str, Any]] = []
    with suppress(OSError, UserError):
        lines = load_json_lines(predictions_path)
    if len(lines) != len(eval_rows):
        print(f"no samples: {one_line(str(predictions_path))} is missing, or is not what the evaluation wrote\n", flush=True)
        return
    for place in range(NUM_SAMPLES):
        index = (2 * place + 1) * len(lines) // (2 * NUM_SAMPLES)
        body = " ".join(eval_rows[index]["lead_text"].split())
        sample = f"  text:      {body[:160]}{'…' if len(body) > 160 else ''}\n"
        sample += f"  reference: {lines[index]['reference']}\n  generated: {lines[index]['prediction']}\n"
        print(escape_controls(sample), flush=True)
