"""A recipe that takes turns: `ours.py CONFIG.json` under `accelerate launch`, in one process.

The config has `recipe`, its dotted `flags`, `task` (`train` or `evaluate`) and, to train, `steps_per_turn`. To evaluate, each
turn is a whole evaluation; the step between two of them moves no weight, by the caller's learning rate.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measuring import summarize_steps
from benchmarks.turns import Turns
from toolkit import finetune, load_config
from toolkit.files.json_lines import load_json_lines
from toolkit.training.user_functions import StepInfo


def main() -> None:
    side = json.loads(Path(sys.argv[1]).read_text())
    config = load_config(side["recipe"], overrides=side["flags"])
    metrics_file = Path(config.run.output_dir) / config.run.name / "metrics.jsonl"
    turns = Turns()
    turns.begin()  # the first turn, which warms up, has the start in it

    def end_training_turn(info: StepInfo) -> None:
        if info.step % side["steps_per_turn"] == 0:
            lines = [line for line in load_json_lines(metrics_file, skip_torn_end=True) if line["kind"] == "train"]
            turns.end(**summarize_steps(lines[-side["steps_per_turn"] :]))
            turns.begin()

    def end_evaluation_turn(figures: dict[str, Any]) -> None:
        turns.end(rows=figures["num_rows"], loss=figures["loss"], rougeL=figures["rougeL"])
        turns.begin()

    if side["task"] == "train":
        finetune(config, after_step=end_training_turn)
    else:
        finetune(config, after_step=lambda _: turns.restart_clock(), after_evaluation=end_evaluation_turn)


if __name__ == "__main__":
    main()
