"""What a run shows at its end: before and after beside the baselines, samples, and the curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.distributed import rank
from toolkit.evaluation import ROUGE_METRICS, EvaluationRows
from toolkit.tracking import load_metrics

if TYPE_CHECKING:
    from datasets import Dataset

NUM_SAMPLES = 3
_COLUMNS = ("loss", "bits_per_byte", "token_accuracy", *ROUGE_METRICS, "exact_match", "percent_distinct")


def show_results(run_folder: Path, train_rows: Dataset, evaluation: EvaluationRows) -> None:
    """Print the before/after table and sample texts, draw `curves.png`. On rank 0; does nothing without evaluations."""
    if rank() != 0 or len(evaluation.rows) == 0:
        return
    from toolkit.curves import draw_curves

    evaluations = [line for line in load_metrics(run_folder / "metrics.jsonl") if line["kind"] == "eval"]
    named = {f"step {line['step']}": line for line in (evaluations[0], evaluations[-1])}
    if evaluations[0]["step"] == 0:
        named["before training"] = named.pop("step 0")
    prompted = evaluation.rows.select(evaluation.prompted)
    baselines = _baselines(train_rows, prompted) if any("rougeL" in line for line in evaluations) else {}
    table = {**baselines, **dict(sorted(named.items()))}
    print(f"\n{len(evaluation.rows)} held-out rows\n{format_table(table)}\n", flush=True)
    _print_samples(run_folder / f"predictions-{evaluations[-1]['step']}.jsonl", prompted)
    draw_curves(run_folder / "metrics.jsonl", run_folder / "curves.png")


def format_table(rows: dict[str, dict[str, float]]) -> str:
    """Figures by row name as aligned text; a column that no row has is left out."""
    columns = [c for c in _COLUMNS if any(c in row for row in rows.values())]
    width = max(len(name) for name in rows)
    lines = [" " * width + "".join(f"{column.replace('percent_', '% '):>15}" for column in columns)]
    for name, row in rows.items():
        cells = (f"{row[c]:>15.2f}" if row.get(c) is not None else f"{'–':>15}" for c in columns)
        lines.append(f"{name:<{width}}" + "".join(cells))
    return "\n".join(lines)


def _baselines(train_rows: Dataset, eval_rows: Dataset) -> dict[str, dict[str, float]]:
    """ROUGE of the lead sentence and of the best constant summary."""
    from toolkit.metrics.baselines import best_constant, lead_sentence
    from toolkit.metrics.rouge import Rouge

    references = eval_rows["target"][:]
    constant = best_constant(train_rows["target"][:], references)
    predictions = {
        "lead sentence": [lead_sentence(text) for text in eval_rows["lead_text"][:]],
        f"constant {json.dumps(constant, ensure_ascii=False)}"[:48]: [constant] * len(references),
    }
    return {
        name: Rouge().compute(predictions=texts, references=references) | {"percent_distinct": 100 * len(set(texts)) / len(texts)}
        for name, texts in predictions.items()
    }


def _print_samples(predictions_path: Path, eval_rows: Dataset) -> None:
    """A few rows evenly spread over the held-out rows, so that they are not chosen for their looks."""
    if not predictions_path.exists():
        return
    lines = [json.loads(line) for line in predictions_path.read_text(encoding="utf-8").splitlines()]
    for place in range(NUM_SAMPLES):
        index = (2 * place + 1) * len(lines) // (2 * NUM_SAMPLES)
        body = " ".join(eval_rows[index]["lead_text"].split())
        print(f"  text:      {body[:160]}{'…' if len(body) > 160 else ''}")
        print(f"  reference: {lines[index]['reference']}\n  generated: {lines[index]['prediction']}\n", flush=True)
