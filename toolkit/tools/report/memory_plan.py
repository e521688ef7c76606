"""The memory plan of a run that has trained, beside what its ranks took."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.config.paths import find_path
from toolkit.distributed.device import GIB
from toolkit.errors import UserError
from toolkit.files.durable import save_json, written_beside
from toolkit.tracking.memory import ACCELERATE_FILE, MEMORY_FILE

PLAN_FILE = "memory_plan.json"
PLANNED_FOR = ("num_processes", "micro_batch_size_rows", "row_tokens")


def compare_with_plan(run_folder: Path) -> str:
    """A sentence with the predicted memory and that measured on each rank, or with the reason why there is none.

    The prediction is for the largest micro-batch of any rank. It is made once, and kept in the run folder for the report.
    """
    path = run_folder / MEMORY_FILE
    if not path.is_file():
        return f"no {MEMORY_FILE}: the run has finished no training step"
    try:
        memory = json.loads(path.read_text(encoding="utf-8"))
        predicted = load_plan(run_folder, memory)
        if predicted is None:
            predicted = _predict(run_folder, memory)
            plan = {**{key: memory[key] for key in PLANNED_FOR}, "device_bytes_total": predicted}
            with suppress(OSError), written_beside(run_folder / PLAN_FILE) as beside:  # a folder of somebody else: planned again
                save_json(beside, plan)
        return describe_memory(memory, predicted)
    except UserError as error:
        return f"not planned: {error}"
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        return f"not compared: {path} cannot be read ({error})"


def load_plan(run_folder: Path, memory: dict[str, Any]) -> int | None:
    """Predicted bytes of one rank, if they were predicted for the same processes and micro-batch."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        plan = json.loads((run_folder / PLAN_FILE).read_text(encoding="utf-8"))
        if all(plan[key] == memory[key] for key in PLANNED_FOR):
            return int(plan["device_bytes_total"])
    return None


def describe_memory(memory: dict[str, Any], predicted_bytes: int) -> str:
    """Predicted and measured memory in a sentence.

    On a CPU, resident memory is measured, minus what was resident before the model loaded; it includes what gloo and the C
    library hold.
    """
    above = above_start(memory)
    ranks = ", ".join(f"{gib:.2f}" for gib in above[:8]) + (", …" if len(above) > 8 else "")
    predicted_gib = predicted_bytes / GIB
    error_percent = 100 * (predicted_gib / max(above) - 1)
    return f"predicted {predicted_gib:.2f} GiB; measured {ranks} GiB by rank ({how_measured(memory)}); {error_percent:+.0f} %"


def above_start(memory: dict[str, Any]) -> list[float]:
    """GiB of each rank's training steps: allocated on the GPU, or resident above what was resident before the model loaded."""
    before = memory["before_model_gib"] if memory["device"] == "cpu" else [0.0] * len(memory["peak_gib"])
    return [peak - start for peak, start in zip(memory["peak_gib"], before, strict=True)]


def how_measured(memory: dict[str, Any]) -> str:
    """What `above_start` counts, in words."""
    if memory["device"] != "cpu":
        return "allocated on the GPU"
    before = memory["before_model_gib"]
    at_first = f"{min(before):.2f} to {max(before):.2f} GiB before the model loaded"
    return f"resident above the {at_first}, with what gloo and malloc hold"


def _predict(run_folder: Path, measured: dict[str, Any]) -> int:
    """Predicted bytes of one rank for this run's own config, accelerate YAML and largest micro-batch.

    Raises:
        UserError: the run cannot be planned.
    """
    import yaml

    from toolkit.tools.plan.plan import build_plan  # the end of a training run needs none of it

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
