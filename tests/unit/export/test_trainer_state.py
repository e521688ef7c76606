"""`trainer_state.json`: what transformers reads of it."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainerState

from toolkit.export.trainer_state import save_trainer_state

LINES = [
    {"kind": "eval", "step": 0, "loss": 3.0, "rouge_tokenizer": "words", "rows_per_s": 9.0},
    {"kind": "train", "step": 1, "epoch": 0.5, "loss": 2.5, "learning_rate": 0.1, "grad_norm": 4.0, "num_tokens": 100},
    {"kind": "checkpoint", "step": 1, "num_bytes": 7},
    {
        "kind": "train",
        "step": 2,
        "epoch": 1.0,
        "loss": None,
        "loss_is": "nan",
        "learning_rate": 0.05,
        "grad_norm": 2.0,
        "num_tokens": 60,
    },
    {"kind": "eval", "step": 2, "loss": 2.0, "rougeL": 50.0},
    {"kind": "train", "step": 3, "epoch": 1.5, "loss": 1.0, "learning_rate": 0.0, "grad_norm": 1.0, "num_tokens": 1},
]


def test_transformers_reads_the_figures_up_to_the_exported_step(tmp_path: Path) -> None:
    save_trainer_state(tmp_path, LINES, step=2)
    state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (state.global_step, state.epoch, state.num_input_tokens_seen) == (2, 1.0, 160)
    assert state.log_history == [
        {"eval_loss": 3.0, "epoch": 0.0, "step": 0, "num_input_tokens_seen": 0},
        {"loss": 2.5, "grad_norm": 4.0, "learning_rate": 0.1, "epoch": 0.5, "step": 1, "num_input_tokens_seen": 100},
        {"loss": None, "grad_norm": 2.0, "learning_rate": 0.05, "epoch": 1.0, "step": 2, "num_input_tokens_seen": 160},
        {"eval_loss": 2.0, "eval_rougeL": 50.0, "epoch": 1.0, "step": 2, "num_input_tokens_seen": 160},
    ]
