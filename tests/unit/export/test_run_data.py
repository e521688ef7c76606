"""`trainer_state.json`: what transformers reads of it."""

import pytest
from transformers import TrainerState
from transformers.modelcard import parse_log_history

from toolkit.export.run_data import save_trainer_state


def train(step: int, loss: float | None, **figures) -> dict:
    line = {"kind": "train", "step": step, "epoch": 0, "loss": loss, "learning_rate": 0.1 / step, "grad_norm": 4.0, "num_rows": 5}
    return line | {"num_tokens": 100, "step_time_s": 0.5} | figures


LINES = [
    {"kind": "eval", "step": 0, "loss": 3.0, "rouge_tokenizer": "words", "rows_per_s": 9.0, "num_rows": 3},
    train(1, 2.5),
    {"kind": "checkpoint", "step": 1, "num_bytes": 7},
    train(2, None, loss_is="nan", num_rows=3, num_input_tokens_seen=160),
    {"kind": "eval", "step": 2, "loss": 2.0, "rougeL": 50.0, "rows_per_s": 6.0, "num_rows": 3},
    train(3, 1.0),
]


@pytest.fixture
def state(tmp_path) -> TrainerState:
    save_trainer_state(tmp_path, LINES, step=2, num_training_rows=10)
    return TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))


def test_transformers_reads_the_figures_up_to_the_exported_step(state):
    assert (state.global_step, state.epoch, state.num_input_tokens_seen) == (2, 0.8, 160)
    first, second = {"epoch": 0.5, "num_input_tokens_seen": 100}, {"epoch": 0.8, "num_input_tokens_seen": 160}
    evaluated = {"eval_num_rows": 3, "eval_samples_per_second": 6.0, "eval_runtime": 0.5, "eval_loss": 2.0, "eval_rougeL": 50.0}
    assert state.log_history[1:4] == [
        {"loss": 2.5, "grad_norm": 4.0, "learning_rate": 0.1, "step": 1, **first},
        {"loss": None, "grad_norm": 4.0, "learning_rate": 0.05, "step": 2, **second},
        {**evaluated, "step": 2, **second},
    ]
    assert state.log_history[0]["epoch"] == 0 and len(state.log_history) == 5


def test_its_model_card_finds_the_training_and_the_evaluations(state):
    summary, lines, figures = parse_log_history(state.log_history)
    assert summary["train_runtime"] == 1.0 and summary["train_loss"] == 2.5 and summary["train_samples_per_second"] == 8
    assert [(line["Step"], line["Epoch"], line["Validation Loss"]) for line in lines] == [(0, 0, 3.0), (2, 0.8, 2.0)]
    assert lines[0]["Training Loss"] == "No log" and figures["Rougel"] == 50.0


@pytest.mark.parametrize(
    ("lines", "num_rows", "epoch", "num_tokens"),
    [
        ([train(1, 2.0), train(2, 1.0, epoch=1)], None, 1, 200),  # of an older version, which kept no facts of its rows
        ([train(21, 2.0, epoch=2), train(22, 1.0, epoch=2)], 10, 2, 200),  # the first lines are lost
    ],
)
def test_where_rows_cannot_be_counted_an_epoch_is_that_of_the_line(tmp_path, lines, num_rows, epoch, num_tokens):
    save_trainer_state(tmp_path, lines, step=22, num_training_rows=num_rows)
    state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (state.epoch, state.num_input_tokens_seen) == (epoch, num_tokens)
