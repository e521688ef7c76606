"""The order of what the loop does: train, evaluate, save, stop; the updates themselves are those of `tests/distributed/`. What
a run says of its start and does at its end, and what is due after a step."""

import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.checkpoint_files import LOSS
from toolkit.checkpoint.state import TrainState
from toolkit.config.data import DataConfig
from toolkit.config.schema import CheckpointConfig, EvalConfig, OptimConfig, ProfileConfig, TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.distributed import device
from toolkit.errors import Stopped
from toolkit.training import loop, model
from toolkit.training import run as runs
from toolkit.training.after_step import is_due, say_without_gain
from toolkit.training.finetune import FULL_MEMORY, _released_on_error
from toolkit.training.model import _note_needless_shards
from toolkit.training.run import _describe_data
from toolkit.training.user_functions import UserHooks

EVALUATION = {"loss": 0.4}
AT_THE_END = [("evaluate", 6), ("save", 6, EVALUATION, True), "finish"]


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
    with suppress(Stopped):
        loop.train(run)
    return calls


@pytest.mark.parametrize("num_frozen", [0, 5])
def test_garbage_is_collected_after_steps_that_all_ranks_share_and_in_none(num_frozen, monkeypatch):
    """What a caller froze stays frozen: Python's collector, here a stand-in, can only unfreeze all of this process."""
    collector = MagicMock(**{"get_freeze_count.return_value": num_frozen, "isenabled.return_value": True})
    monkeypatch.setattr(loop, "gc", collector)
    monkeypatch.setattr(loop, "COLLECT_EVERY_STEPS", 2)
    train(TrainState(1), 3, monkeypatch)
    called = [name for name, _, _ in collector.mock_calls if name not in ("isenabled", "get_freeze_count")]
    of_freezing = [] if num_frozen else ["freeze", "unfreeze"]
    assert called == ["collect", *of_freezing[:1], "disable", "collect", *of_freezing[1:], "enable"], "at the start, after step 2"


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


@pytest.mark.parametrize(
    ("step", "is_due", "signals", "expected"),
    [
        # Without the figures of an interrupted evaluation a checkpoint could not be the best.
        (4, True, {}, [("evaluate", 4), ("save", 4, EVALUATION, False), ("train", 5), ("train", 6), *AT_THE_END]),
        (4, False, {}, [("train", 5), ("train", 6), *AT_THE_END]),
        (6, True, {}, AT_THE_END),  # a complete run trains no more
        (5, False, {6: "SIGTERM"}, [("train", 6), ("save", 6, {}, True), ("stop", "SIGTERM")]),
    ],
)
def test_an_evaluation_comes_before_the_checkpoint_of_its_step_and_after_a_signal(step, is_due, signals, expected, monkeypatch):
    state = TrainState(step, evaluation_due=is_due)
    assert train(state, 6, monkeypatch, signals) == expected
    assert state.evaluation_due == bool(signals), "a checkpoint says that its evaluation is still due"


HOLDS = 4 * 16 * 80 * 2**20


@pytest.mark.parametrize(
    ("gpu_bytes", "version", "precision", "world_size", "preset"),
    [
        *((HOLDS, 2, "bf16", 8, "ddp.yaml"), (HOLDS, 1, "bf16", 1, "single.yaml"), (HOLDS - 1, 2, "bf16", 8, "")),
        *((HOLDS, None, "bf16", 8, ""), (HOLDS, 2, "fp8", 8, ""), (None, 2, "bf16", 8, "")),
    ],
)
def test_shards_that_one_gpu_does_not_need_are_a_line(gpu_bytes, version, precision, world_size, preset, monkeypatch, capsys):
    """8 frozen parameters of 2 bytes take as much as one trainable of 16: together 80 x 2**20 x 16 bytes."""
    frozen, trained = torch.nn.Linear(2**20, 8, bias=False, device="meta"), torch.nn.Linear(2**20, 79, bias=False, device="meta")
    skeleton = torch.nn.Sequential(frozen.requires_grad_(False), trained)
    accelerator = SimpleNamespace(device=torch.device("cuda"), mixed_precision=precision)
    monkeypatch.setattr(model, "fsdp_version", lambda _: version)
    monkeypatch.setattr(model, "smallest_gpu_bytes", lambda _: gpu_bytes)
    monkeypatch.setattr(model, "world_size", lambda: world_size)
    _note_needless_shards(accelerator, skeleton, torch.bfloat16, "adamw")
    line = "the preset shards a model that one GPU holds with room to spare: weights, gradients and moments take 1.2 of 5 GiB; "
    assert capsys.readouterr().out.strip() == (preset and f"{line}{preset} gathers nothing")


def test_an_evaluation_file_is_not_named_as_training_data():
    a, b, held_out = (SimpleNamespace(label=f"of/{n}.csv", is_eval_file=n == "held_out") for n in ("a", "b", "held_out"))
    plan = SimpleNamespace(pack_length_tokens=None, num_tokens=np.array([1234]))
    for inputs, named in (([a, b, held_out], "a.csv and 1 more"), ([a, held_out], "a.csv"), ([b], "b.csv")):
        rows = SimpleNamespace(train=range(2), texts=SimpleNamespace(inputs=inputs))
        assert _describe_data(SimpleNamespace(rows=rows, plan=plan)) == f"{named}: 2 training rows of 1,234 tokens"


@pytest.mark.parametrize(
    ("state", "at_best"),
    [
        ({"start_value": 2.0, "best_value": 2.5}, "2.5"),
        ({"start_value": 2.0, "best_value": 2.0}, "2"),
        ({"start_value": 2.0, "num_evaluations_without_gain": 3}, "nan"),  # every figure was a NaN
        ({"start_value": 2.0, "best_value": 1.9}, None),
        ({"start_value": 2.0}, None),
        ({"best_value": 2.5}, None),
    ],
)
def test_it_is_said_where_no_step_gained_on_the_start(state, at_best, capsys):
    say_without_gain(SimpleNamespace(state=TrainState(9, **state), best_metric=LOSS))
    sentence = f"no evaluated step is better than the start: loss 2 before the first step, at best {at_best} after it\n"
    assert capsys.readouterr().out == (sentence if at_best else "")


@pytest.mark.parametrize(
    ("section", "due"),
    [({}, []), ({"every_steps": 3}, [3, 6, 9]), ({"every_epochs": 0.5}, [3, 5, 8, 10]), ({"every_epochs": 2.0}, [10])],
)
def test_what_repeats_is_due_by_steps_or_by_epochs(section, due):
    ones = np.ones(10, dtype=np.int64)
    plan = BatchPlan(ones, ones, TrainConfig(global_batch_size_rows=2), world_size=1)
    for config in (EvalConfig(**section), CheckpointConfig(**section)):
        assert [step for step in range(1, 11) if is_due(step, config, plan)] == due


def test_an_export_beside_a_gpu_takes_all_cores(monkeypatch):
    num_threads, seen = torch.get_num_threads(), []
    monkeypatch.setattr(device, "available_cores", lambda: num_threads + 3)
    monkeypatch.setattr(runs, "export_model", lambda *_: seen.append(torch.get_num_threads()))
    for name in ("_tool", "measure_baselines", "list_commands", "leave", "enter_phase"):
        monkeypatch.setattr(runs, name, MagicMock())
    run = MagicMock(num_steps=1, folder=Path("run"))
    run.config.has_own_objective = False
    for kind in ("cuda", "cpu"):
        run.sharded.accelerator.device = torch.device(kind)
        assert runs.finish(run) == Path("run/export")
    assert seen == [num_threads + 3, num_threads] and torch.get_num_threads() == num_threads


def test_below_an_out_of_memory_error_stands_what_to_do():
    with pytest.raises(torch.OutOfMemoryError) as raised, _released_on_error():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    printed = "".join(traceback.format_exception(raised.value))
    assert printed.endswith(f"OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n{FULL_MEMORY}\n")
