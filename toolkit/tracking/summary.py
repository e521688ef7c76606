"""The summary at the end of a run: a table of figures before and after training beside the baselines, and samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.distributed.comm import rank
from toolkit.errors import UserError, align, escape_controls, one_line
from toolkit.evaluation.generate import BASELINE, SHOWN_FIGURES
from toolkit.evaluation.metrics import own_figures
from toolkit.evaluation.rouge import mean_scores, rouge_scores
from toolkit.evaluation.rows import EvaluationRows
from toolkit.files.json_lines import load_json_lines
from toolkit.tracking.metrics_log import MetricsLog

if TYPE_CHECKING:
    from datasets import Dataset

NUM_SAMPLES = 3


def measure_baselines(
    metrics: MetricsLog, step: int, train_rows: Dataset, evaluation: EvaluationRows, measured_on: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Figures of texts that need no model, by name: as an earlier end of the run has written them to `metrics`, else measured and
    written there. Empty on other ranks than 0, and without evaluations of texts.

    Raises:
        UserError: `metrics` cannot be written.
    """
    lines = [line for line in metrics.load() if line.get("measured_on") == measured_on] if rank() == 0 else []
    if not any("rougeL" in line for line in lines if line["kind"] == "eval"):
        return {}
    if not (named := {line["name"]: line for line in lines if line["kind"] == BASELINE}):
        named = _baselines(train_rows, evaluation.rows.select(evaluation.prompted))
        for name, figures in named.items():
            metrics.write(BASELINE, step, name=name, **figures, measured_on=measured_on)
        if metrics.error is not None:
            raise metrics.error
    return named


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
    evaluations = [line for line in everything if line.get("measured_on") == measured_on]
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
    table = {**baselines, **dict(sorted(named.items()))}
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


def _baselines(train_rows: Dataset, eval_rows: Dataset) -> dict[str, dict[str, float]]:
    """ROUGE of the lead sentence and of the best constant summary."""
    from toolkit.evaluation.baselines import best_constant, lead_sentence

    references = eval_rows["target"][:]
    constant = best_constant(train_rows["target"][:], references)
    predictions = {
        "lead sentence": [lead_sentence(text) for text in eval_rows["lead_text"][:]],
        f"constant {json.dumps(constant, ensure_ascii=False)}"[:48]: [constant] * len(references),
    }
    return {
        name: mean_scores(rouge_scores(texts, references)) | {"percent_distinct": 100 * len(set(texts)) / len(texts)}
        for name, texts in predictions.items()
    }


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
