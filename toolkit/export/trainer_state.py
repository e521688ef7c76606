"""`trainer_state.json` beside an export: the run's figures in the names of transformers' Trainer, which other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FROM_TRAINING = ("loss", "grad_norm", "learning_rate", "epoch")
NOT_OF_THE_MODEL = ("step", "rows_per_s")


def save_trainer_state(folder: Path, lines: list[dict[str, Any]], step: int) -> None:
    """Write what `lines` of `metrics.jsonl` have up to `step`. `num_input_tokens_seen` adds up `num_tokens`."""
    from transformers import TrainerState
    from transformers.trainer import TRAINER_STATE_NAME

    state = TrainerState(global_step=step, log_history=[])
    for line in lines:
        if line["step"] > step:
            continue
        if line["kind"] == "train":
            state.num_input_tokens_seen += line["num_tokens"]
            state.epoch = line["epoch"]
            figures = {name: line[name] for name in FROM_TRAINING}
        elif line["kind"] == "eval":
            names = [name for name, value in line.items() if isinstance(value, int | float) and name not in NOT_OF_THE_MODEL]
            figures = {**{f"eval_{name}": line[name] for name in names}, "epoch": state.epoch or 0.0}
        else:
            continue
        state.log_history.append({**figures, "step": line["step"], "num_input_tokens_seen": state.num_input_tokens_seen})
    state.save_to_json(str(folder / TRAINER_STATE_NAME))
