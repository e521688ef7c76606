"""A run in the terminal: its end, with figures beside the baselines and samples; and `report --text`, its summary and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.paths import find_path
from toolkit.distributed.comm import rank
from toolkit.errors import UserError, align, escape_controls, one_line
from toolkit.evaluation.rouge import mean_scores, rouge_scores
from toolkit.evaluation.rows import EvaluationRows
from toolkit.files.durable import save_json
from toolkit.files.json_lines import load_json_lines
from toolkit.tools.report.facts import NOT_AS_WRITTEN, PLAN_FILE, PLANNED_FOR, RunFacts, lines_of_steps, read_runs
from toolkit.tools.report.sections import Histogram, Lines, Table, describe_memory, describe_summary, missing, show
from toolkit.tracking.metrics_log import ACCELERATE_FILE, MetricsLog

if TYPE_CHECKING:
    from datasets import Dataset

NUM_SAMPLES = 3


def show_results(metrics: MetricsLog, evaluation: EvaluationRows) -> None:
    """Print the summary of a run that ends, as `report --text` does, and sample texts. On rank 0 only, with evaluation rows."""
    if rank() != 0 or len(evaluation.rows) == 0:
        return
    [run] = read_runs([metrics.path.parent])
    run.lines = lines_of_steps(metrics.load())  # without those that others wrote, which no report reads
    print(f"\n{show(describe_summary, [run], _as_text)}\n", flush=True)
    for last in run.ends[-1:]:
        if "rougeL" in last:
            _print_samples(run.folder / f"predictions-{last['step']}.jsonl", evaluation.rows.select(evaluation.prompted))


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


def show_runs(run_folders: Sequence[Path]) -> None:
    """Print where the runs stand, their first and last evaluations, and their memory beside its plan, which is made if needed. A
    folder that is not a run's is a `UserError`."""
    runs = read_runs(run_folders)
    print(show(_describe_evaluations, runs, _as_text), flush=True)
    for run in runs:
        _plan_memory(run)
    print(f"\n{show(describe_memory, runs, _as_text)}")


def _describe_evaluations(runs: Sequence[RunFacts]) -> Iterator[Any]:
    """The summary, with `rougeL_line1`: ROUGE-L in percent of each text's first line alone.

    It separates a model that writes the right first line, but has not learned to stop there, from one that writes a wrong one.
    """
    yield from missing(runs, "lines")
    for run in runs:
        for line in run.ends:
            path = run.folder / f"predictions-{line['step']}.jsonl"
            if rows := load_json_lines(path, skip_torn_end=True) if path.exists() else []:
                first_lines = [row["prediction"].strip().partition("\n")[0] for row in rows]
                scores = mean_scores(rouge_scores(first_lines, [row["reference"] for row in rows]))
                line["rougeL_line1"] = scores["rougeL"]
    yield from describe_summary(runs)


def _as_text(parts: list[Any]) -> str:
    lines: list[str] = []
    for part in parts:
        match part:
            case Lines(sentences):
                lines += [one_line(sentence) for sentence in sentences if sentence]
            case Table(rows, left) if len(rows) > 1:
                lines += ["", *align([list(map(one_line, row)) for row in rows], left)]
            case Histogram(bins, form):
                lines += align([[label, format(number, form)] for label, number in bins])
    return "\n".join(lines)


def _plan_memory(run: RunFacts) -> None:
    """Plan the memory of a run on GPUs that has none, and keep it in the run folder for the report; or note why there is none."""
    if run.memory.get("device", "cpu") == "cpu" or run.planned_bytes is not None:
        return
    try:
        run.planned_bytes = _predict(run)
    except (*NOT_AS_WRITTEN, OSError) as error:
        run.missing["planned_bytes"] = f"There is no memory plan: {error}"
        return
    plan = {**{key: run.memory[key] for key in PLANNED_FOR}, "device_bytes_total": run.planned_bytes}
    with suppress(OSError):  # a folder of somebody else: planned again
        save_json(run.folder / PLAN_FILE, plan)


def _predict(run: RunFacts) -> int:
    """Predicted bytes of one rank for this run's own config, accelerate YAML and largest micro-batch of any rank."""
    from toolkit.tools.plan.plan import build_plan  # a page needs none of it

    preset, config_file, measured = run.folder / ACCELERATE_FILE, run.folder / "config.yaml", run.memory
    if not preset.is_file():
        raise UserError("the run was launched without an accelerate YAML")
    if not measured["row_tokens"]:
        raise UserError("the run's rows are not tokens")
    lengths = {"row": "max_length_tokens", "source": "max_source_length_tokens", "target": "max_target_length_tokens"}
    flags = [f"--data.{lengths[name]}={length}" for name, length in measured["row_tokens"].items()]
    flags.append(f"--train.micro_batch_size_rows={measured['micro_batch_size_rows']}")
    model = find_path(run.config["model.name_or_path"], config_file, f"{config_file}: model.name_or_path")
    gpu_gib = measured.get("gpu_gib") or 80.0  # its chunks of logits are planned; whether it fits is known
    arguments = [f"--config={config_file}", *flags]
    return build_plan(model, preset, measured["num_processes"], arguments, None, gpu_gib, searches=False).total
