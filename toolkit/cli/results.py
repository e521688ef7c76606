"""`python -m toolkit results`: metrics of several runs in one table, and planned beside measured memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.checkpoint.folders import list_checkpoints
from toolkit.config.paths import find_path
from toolkit.errors import UserError
from toolkit.evaluation.text import ROUGE_SCORE_WORDS
from toolkit.files.json_lines import load_json_lines
from toolkit.planning.plan import build_plan
from toolkit.tracking.memory import ACCELERATE_FILE, MEMORY_FILE
from toolkit.tracking.metrics_log import load_metrics
from toolkit.tracking.summary import format_table

GIB = 2**30

_COLUMNS_OF_RUNS = ("loss", "bits_per_byte", "token_accuracy", "accuracy", "rouge1", "rougeL", "rougeL_line1", "percent_distinct")


def compare_with_plan(run_folder: Path) -> str:
    """A sentence with the predicted memory and that measured on each rank, or with the reason why there is none.

    The prediction is for the largest micro-batch of any rank. On a CPU, resident memory is measured, minus what was resident
    before the model loaded; it includes what gloo and the C library hold.
    """
    path = run_folder / MEMORY_FILE
    if not path.is_file():
        return f"no {MEMORY_FILE}: the run has finished no training step"
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        predicted_gib = _predict(run_folder, measured) / GIB
        is_cpu = measured["device"] == "cpu"
        before = measured["before_model_gib"] if is_cpu else [0.0] * len(measured["peak_gib"])
        above = [peak - start for peak, start in zip(measured["peak_gib"], before, strict=True)]
    except UserError as error:
        return f"not planned: {error}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"not compared: {path} cannot be read ({error})"
    ranks = ", ".join(f"{gib:.2f}" for gib in above[:8]) + (", …" if len(above) > 8 else "")
    at_first = f"{min(before):.2f} to {max(before):.2f} GiB before the model loaded"
    how = f"resident above the {at_first}, with what gloo and malloc hold" if is_cpu else "allocated on the GPU"
    error_percent = 100 * (predicted_gib / max(above) - 1)
    return f"predicted {predicted_gib:.2f} GiB; measured {ranks} GiB by rank ({how}); {error_percent:+.0f} %"


def show_runs(run_folders: Sequence[Path]) -> None:
    """Print one table of the first and last evaluations of each run, in the given order, and planned beside measured memory.

    `rougeL_line1` is ROUGE-L on each text's first line alone. It separates a model that writes the right first line, but has not
    learned to stop there, from one that writes a wrong one.

    Raises:
        UserError: a folder holds no evaluation.
    """
    table = {}
    for folder in run_folders:
        path = folder / "metrics.jsonl"
        if not path.is_file():
            way_out = "give folders of runs, as in runs/t5_docstrings"
            if list_checkpoints(folder):
                way_out = "the run's command writes one again, from its last checkpoint's evaluation on"
            raise UserError(f"{folder} has no metrics.jsonl: {way_out}")
        evaluations = [line for line in load_metrics(path) if line["kind"] == "eval"]
        if not evaluations:
            raise UserError(f"{path} holds no evaluation yet: let the run evaluate first")
        for line in {line["step"]: line for line in (evaluations[0], evaluations[-1])}.values():
            when = f"after step {line['step']:,}" if line["step"] else "as loaded"
            words = "" if line.get("rouge_tokenizer") in (None, ROUGE_SCORE_WORDS.name) else f", {line['rouge_tokenizer']} words"
            are_other = line.get("measured_on", {}).get("rows") != evaluations[-1].get("measured_on", {}).get("rows")
            name = f"{folder.name}, {when} ({line['num_rows']}{' other' * are_other} rows{words})"
            table[name] = line | _score_first_lines(folder / f"predictions-{line['step']}.jsonl")
    print(format_table(table, _COLUMNS_OF_RUNS))
    if any((folder / MEMORY_FILE).is_file() for folder in run_folders):
        print("\nmemory of a rank in training steps, predicted by `plan` against measured")
        for folder in run_folders:
            print(f"{folder.name}: {compare_with_plan(folder)}", flush=True)


def _predict(run_folder: Path, measured: dict[str, Any]) -> int:
    """Predicted bytes of one rank for this run's own config, accelerate YAML and largest micro-batch.

    Raises:
        UserError: the run cannot be planned.
    """
    import yaml

    if not (run_folder / ACCELERATE_FILE).is_file():
        raise UserError("the run was launched without an accelerate YAML")
    if not measured["row_tokens"]:
        raise UserError("the run's rows are not tokens")
    config_file = run_folder / "config.yaml"
    name = yaml.safe_load(config_file.read_text(encoding="utf-8"))["model"]["name_or_path"]
    lengths = {"row": "max_length_tokens", "source": "max_source_length_tokens", "target": "max_target_length_tokens"}
    flags = [f"--data.{lengths[name]}={length}" for name, length in measured["row_tokens"].items()]
    arguments = [f"--config={config_file}", *flags]
    arguments.append(f"--train.micro_batch_size_rows={measured['micro_batch_size_rows']}")
    model = find_path(name, config_file, f"{config_file}: model.name_or_path")
    gpu_gib = measured.get("gpu_gib") or 80.0  # its chunks of logits are planned; whether it fits is known
    plan = build_plan(model, run_folder / ACCELERATE_FILE, measured["num_processes"], arguments, None, gpu_gib, searches=False)
    return plan.total


def _score_first_lines(predictions_path: Path) -> dict[str, float]:
    """`rougeL_line1` in percent; empty if no texts were generated."""
    if not predictions_path.exists():
        return {}
    from toolkit.evaluation.rouge import Rouge

    if not (lines := load_json_lines(predictions_path)):
        return {}
    first_lines = [line["prediction"].strip().partition("\n")[0] for line in lines]
    scores = Rouge().compute(predictions=first_lines, references=[line["reference"] for line in lines])
    return {"rougeL_line1": scores["rougeL"]}
