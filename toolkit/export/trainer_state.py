"""`trainer_state.json` beside an export: the run's figures in the names of transformers' Trainer, which other tools read."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

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
