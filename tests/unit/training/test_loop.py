"""The order of what the loop does: train, evaluate, save, stop. The updates themselves are those of `tests/distributed/`."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.checkpoint.state import TrainState
from toolkit.config.data import DataConfig
from toolkit.config.schema import CheckpointConfig, EvalConfig, OptimConfig, ProfileConfig
from toolkit.errors import Stopped
from toolkit.training import loop
from toolkit.training.user_functions import UserHooks

EVALUATION, SIGNAL = {"loss": 0.4}, "SIGTERM"


def train(state: TrainState, num_steps: int, monkeypatch: pytest.MonkeyPatch, signals: dict[int, str] | None = None) -> list:
    """What the loop calls, in order; `signals` reach the ranks after these steps."""
    calls = []

    def evaluate(run) -> None:
        calls.append(("evaluate", run.state.step))
        run.state.metrics, run.state.evaluation_due = EVALUATION, False

    def stop(run, signal_name: str) -> None:
        calls.append(("stop", signal_name))
        raise Stopped

    monkeypatch.setattr(loop, "train_step", lambda run, step, *_: calls.append(("train", run.state.step + 1)))
    monkeypatch.setattr(loop, "agree", lambda run: (signals or {}).get(run.state.step))
    monkeypatch.setattr(loop, "evaluate_and_log", evaluate)
    monkeypatch.setattr(loop, "save", lambda run, wait: calls.append(("save", run.state.step, run.state.metrics, wait)))
    monkeypatch.setattr(loop, "stop", stop)
    monkeypatch.setattr(loop, "finish_training", lambda run: calls.append("finish"))
    monkeypatch.setattr(loop, "_load_micro_batches", lambda *_: iter(()))
    monkeypatch.setattr(loop, "build_log", MagicMock())
    monkeypatch.setattr(loop, "build_writer", lambda run: nullcontext())
    sections = {"eval": EvalConfig(every_steps=None), "checkpoint": CheckpointConfig(every_steps=None, keep_best=0)}
    config = SimpleNamespace(**sections, optim=OptimConfig(), profile=ProfileConfig(), log_every_steps=1)
    run = MagicMock(config=config, state=state, num_steps=num_steps, hooks=UserHooks())
    run.sharded.model = nn.Linear(2, 2)
    try:
        loop.train(run)
    except Stopped:
        calls.append("stopped")
    return calls


@pytest.mark.parametrize(("device", "setting", "expected"), [("cuda", None, 1), ("cpu", None, 0), ("cuda", 0, 0), ("cpu", 3, 3)])
def test_a_gpu_gets_one_loader_worker_unless_the_config_says_otherwise(device, setting, expected, monkeypatch):
    run, seen = MagicMock(), MagicMock(return_value=iter(()))
    run.config.data, run.sharded.accelerator.device = DataConfig(num_loader_workers=setting), torch.device(device)
    run.config.optim = OptimConfig()
    monkeypatch.setattr(loop, "load_micro_batches", seen)
    assert list(loop._load_micro_batches(run, 1)) == []
    assert seen.call_args.kwargs == {"num_workers": expected, "pin_memory": device == "cuda"}


@pytest.mark.parametrize("kind", [DistributedDataParallel, nn.Linear])
def test_gradients_of_ddp_stay_the_views_of_its_buckets(kind, monkeypatch):
    """New ones beside the buckets would hold the gradients twice."""
    run, loss_sum = MagicMock(), torch.ones((), requires_grad=True)
    run.config.log_row_ids, run.config.train.seed, run.config.optim = False, 0, OptimConfig()
    run.sharded.model = MagicMock(spec=kind)
    run.guard.should_skip.return_value = torch.tensor(1.0), torch.tensor(0.0)
    monkeypatch.setattr(loop, "accumulating", lambda sharded, is_last: nullcontext())
    run.hooks.loss, run.objective.loss.return_value, run.objective.logs_metrics = None, (loss_sum, 0), False
    monkeypatch.setattr(loop, "clip_gradients", lambda model, *rest: torch.tensor(1.0))
    step = SimpleNamespace(step=1, num_label_tokens=1)
    micro_batch = SimpleNamespace(step=1, index=0, is_last=True, packs=[[0]])
    loop.train_step(run, step, iter([(micro_batch, {})]), lr=0.1, watch=None)
    assert run.optimizer.zero_grad.call_args.kwargs == {"set_to_none": kind is nn.Linear}
    names = [name for name, _, _ in run.mock_calls]
    assert names.index("guard.should_skip") < names.index("writer.copier.make_device_wait") < names.index("optimizer.step")


@pytest.mark.parametrize("is_due", [True, False])
def test_a_checkpoint_gets_the_figures_of_an_interrupted_evaluation(is_due, monkeypatch):
    """Without them it could not be the best: `export.weights best` took a worse one of those that stood."""
    first = [("evaluate", 4), ("save", 4, EVALUATION, False)] if is_due else []
    rest = [("train", 5), ("train", 6), ("evaluate", 6), ("save", 6, EVALUATION, True), "finish"]
    assert train(TrainState(4, evaluation_due=is_due), 6, monkeypatch) == first + rest


def test_a_complete_run_whose_last_evaluation_a_signal_ended_trains_no_more(monkeypatch):
    expected = [("evaluate", 6), ("save", 6, EVALUATION, True), "finish"]
    assert train(TrainState(6, evaluation_due=True), 6, monkeypatch) == expected


def test_a_signal_comes_before_an_evaluation_that_is_due(monkeypatch):
    state = TrainState(5)
    calls = train(state, 6, monkeypatch, signals={6: SIGNAL})
    assert calls == [("train", 6), ("save", 6, {}, True), ("stop", SIGNAL), "stopped"]
    assert state.evaluation_due  # so that the checkpoint says so


@pytest.mark.parametrize("num_frozen", [0, 5])
def test_what_a_caller_froze_stays_frozen(num_frozen, monkeypatch):
    """With a stand-in for Python's collector, which can only unfreeze all that this process has frozen."""
    collector = MagicMock(**{"get_freeze_count.return_value": num_frozen, "isenabled.return_value": True})
    monkeypatch.setattr(loop, "gc", collector)
    with loop._garbage_kept():
        assert collector.disable.called and not collector.enable.called
    assert collector.freeze.called == collector.unfreeze.called == (num_frozen == 0) and collector.enable.called
