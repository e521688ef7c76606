"""`python -m toolkit report --text`: metrics of several runs in one table, and planned beside measured memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, one_line
from toolkit.evaluation.rouge import mean_scores, rouge_scores
from toolkit.evaluation.text import ROUGE_SCORE_WORDS
from toolkit.files.json_lines import load_json_lines
from toolkit.tools.report.facts import NOT_AS_WRITTEN, RunFacts, describe_unlike, group_alike, is_number, read_runs
from toolkit.tools.report.memory_plan import compare_with_plan
from toolkit.tracking.memory import MEMORY_FILE
from toolkit.tracking.summary import format_table

_COLUMNS = ("loss", "bits_per_byte", "token_accuracy", "accuracy", "rouge1", "rougeL", "rougeL_line1", "percent_distinct")


def show_runs(run_folders: Sequence[Path]) -> None:
    """Print the first and last evaluations of each run, in the given order, and planned beside measured memory.

    Runs that were evaluated on other rows have a table of their own.

    `rougeL_line1` is ROUGE-L on each text's first line alone. It separates a model that writes the right first line, but has not
    learned to stop there, from one that writes a wrong one.

    Raises:
        UserError: a folder holds no evaluation, or one that no run writes so.
    """
    runs = read_runs(run_folders)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for facts in runs:
        try:
            rows[facts.name] = _rows(facts)
        except UserError:
            raise
        except NOT_AS_WRITTEN as error:
            why = f"{type(error).__name__}: {error}"
            raise UserError(f"{facts.folder} has evaluations or predictions that no run writes ({why}): leave it out") from None
    tables = [{label: line for run in group for label, line in rows[run.name].items()} for group in group_alike(runs, "loss")]
    print("\n\n".join(format_table(table, _COLUMNS) for table in tables))
    if unlike := describe_unlike(runs):
        print(f"\n{one_line(unlike)}")
    if any((folder / MEMORY_FILE).is_file() for folder in run_folders):
        print("\nmemory of a rank in training steps, predicted by `plan` against measured")
        for facts in runs:
            print(one_line(f"{facts.name}: {compare_with_plan(facts.folder)}"), flush=True)


def _rows(facts: RunFacts) -> dict[str, dict[str, Any]]:
    """The lines of a run's first and last evaluation, by what the table calls them."""
    rows, evaluations = {}, _evaluations(facts)
    for line in {line["step"]: line for line in (evaluations[0], evaluations[-1])}.values():
        when = f"after step {line['step']:,}" if line["step"] else "as loaded"
        words = "" if line.get("rouge_tokenizer") in (None, ROUGE_SCORE_WORDS.name) else f", {line['rouge_tokenizer']} words"
        are_other = line.get("measured_on", {}).get("rows") != evaluations[-1].get("measured_on", {}).get("rows")
        name = f"{facts.name}, {when} ({line['num_rows']}{' other' * are_other} rows{words})"
        figures = {key: value for key, value in line.items() if is_number(value)}
        rows[name] = figures | _score_first_lines(facts.folder / f"predictions-{line['step']}.jsonl")
    return rows


def _evaluations(facts: RunFacts) -> list[dict]:
    if facts.evaluations:
        return facts.evaluations
    path = facts.folder / "metrics.jsonl"
    if not path.is_file() and facts.checkpoints:
        raise UserError(
            f"{facts.folder} has no metrics.jsonl: the run's command writes one again, from its last checkpoint's evaluation on"
        )
    if "curves" in facts.missing:
        raise UserError(f"{facts.folder}: {facts.missing['curves']}")
    raise UserError(f"{path} holds no evaluation: let the run evaluate first; without held-out rows it never does")


def _score_first_lines(predictions_path: Path) -> dict[str, float]:
    """`rougeL_line1` in percent; empty if no texts were generated."""
    if not predictions_path.exists():
        return {}
    if not (lines := load_json_lines(predictions_path)):
        return {}
    first_lines = [line["prediction"].strip().partition("\n")[0] for line in lines]
    scores = mean_scores(rouge_scores(first_lines, [line["reference"] for line in lines]))
    return {"rougeL_line1": scores["rougeL"]}
