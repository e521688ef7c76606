"""An optimizer's weights and state are the same on any number of ranks, and a checkpoint goes on exactly on another number."""

import functools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.launch import run_on_ranks
from tests.support.optimizer_model import NUM_EXPERTS, SHAPES, WeightsOf, give_gradients
from toolkit.checkpoint import load
from toolkit.checkpoint.dcp import save_tensors
from toolkit.checkpoint.state import state_tensors
from toolkit.config.schema import OptimConfig
from toolkit.distributed.comm import world_size
from toolkit.launch.accelerator import build_accelerator
from toolkit.optimizers import OPTIMIZERS
from toolkit.parallel.float8 import is_sharded_with_cast
from toolkit.parallel.wrap import place_experts
from toolkit.training.optim import build_optimizer

NUM_STEPS, SAVED_STEP, SKIPPED_STEP = 8, 5, 3
TOLERANCE = {"adafactor": 1e-6, "adamw": 1e-6}
"""Adafactor rounds sums over rows in another order, torch's kernel the last elements of a shard; others are equal bit for bit."""
IN_BF16 = "bf16-"
"""Before a strategy: weights in bf16, rounded alike on any number of ranks, so equal bit for bit."""
SAVES, RESUMES = " saves", " resumes"
"""Behind a strategy: it writes a checkpoint after `SAVED_STEP`, or begins with that of two ranks."""
LAUNCHES: list[tuple[int, list[str]]] = [
    (1, ["single", "bf16-single"]),
    (2, ["fsdp2 saves", "bf16-fsdp2 saves", "ddp", "offload", "float8"]),
    (3, ["fsdp2", "fsdp2 resumes", "bf16-fsdp2 resumes"]),
    (4, ["hsdp", "bf16-hsdp"]),
    (1, ["single resumes", "bf16-single resumes"]),
]
"""Number of ranks, and what they do one after another."""
RUNS = [f"{run} on {num_ranks}" for num_ranks, runs in LAUNCHES for run in runs]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, dict[str, Tensors]]:
    """By run and optimizer, what all ranks have come to."""
    folder, found = tmp_path_factory.mktemp("optimizers"), {}
    for num_ranks, runs in LAUNCHES:
        where = {"preset": "ddp_cpu", "overrides": {"num_processes": num_ranks, "mixed_precision": "no"}}
        first, *others = run_on_ranks(train_each, args=(runs, folder), **where)
        for run, of_run in first.items():
            for other in others:
                assert_same(other[run], of_run)
            found[f"{run} on {num_ranks}"] = of_run
    return found


def assert_same(found: dict[str, Tensors], expected: dict[str, Tensors], *, exactly: bool = True) -> None:
    for name, tensors in expected.items():
        assert found[name].keys() == tensors.keys()
        for key, tensor in tensors.items():
            close = 0.0 if exactly else TOLERANCE.get(name, 0.0)
            message = f"{name}: {key}"
            torch.testing.assert_close(found[name][key], tensor, rtol=close, atol=close * float(tensor.max()), msg=message)


@pytest.mark.parametrize("run", RUNS)
def test_any_number_of_ranks_and_any_strategy_is_one_process(trained, run):
    """Were a checkpoint's state read otherwise than it was written, moments would be requantized or counts begin again."""
    prefix = IN_BF16 if run.startswith(IN_BF16) else ""
    expected = f"{prefix}fsdp2 saves on 2" if RESUMES in run else f"{prefix}single on 1"
    assert_same(trained[run], trained[expected], exactly=bool(prefix))


def train_each(runs: list[str], folder: Path) -> dict[str, dict[str, Tensors]]:
    build_accelerator()  # with the process group
    return {run: train(run, folder) for run in runs}


def train(run: str, folder: Path) -> dict[str, Tensors]:
    """On every rank, by optimizer: the unsharded weights and state after the last step. Checkpoints are in `folder`."""
    found, in_bf16, resumes = {}, run.startswith(IN_BF16), RESUMES in run
    folder /= "bf16" if in_bf16 else "fp32"
    for name in [name for name in OPTIMIZERS if not (in_bf16 and name == "adamw")]:
        weights = WeightsOf(SHAPES).to(torch.bfloat16 if in_bf16 else torch.float32)
        model = sharded_by(run.removeprefix(IN_BF16).split()[0], weights)
        for parameter in model.parameters():
            parameter.grad_dtype = None
        optimizer = build_optimizer(OptimConfig(name=name, lr=1e-2, weight_decay=0.1), model)
        sharded = SimpleNamespace(model=model, unwrapped=getattr(model, "module", model))
        if resumes:
            saved = SimpleNamespace(folder=folder / name, manifest={"world_size": 2})
            with patch.object(load, "check_identity"), patch.object(load, "load_random_state"):
                load.load_checkpoint(saved, sharded, optimizer, None)
        for step in range(SAVED_STEP if resumes else 0, NUM_STEPS):
            give_gradients(model, step)
            skips = step == SKIPPED_STEP
            for parameter in model.parameters():
                parameter.grad.mul_(torch.nan if skips else 1.0)
                if in_bf16 and step % 2:  # of a step with one micro-batch
                    parameter.grad = parameter.grad.bfloat16()
            optimizer.number = step + 1
            optimizer.found_inf = torch.tensor(float(skips))
            optimizer.step()
            optimizer.zero_grad()
            if SAVES in run and step + 1 == SAVED_STEP:
                (folder / name).mkdir(parents=True, exist_ok=True)
                save_tensors(state_tensors(sharded, optimizer), folder / name / "state")
        tensors = state_tensors(sharded, optimizer)
        whole = {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in tensors.items()}
        found[name] = {key: t.detach().clone() for key, t in whole.items()}
    return found


def sharded_by(strategy: str, model):
    if strategy == "single":
        return model
    if strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    shape, names = ((2, 2), ("replicas", "shards")) if strategy == "hsdp" else ((world_size(),), ("shards",))
    if strategy == "float8":
        wrap_for_float8(model)
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if strategy == "offload" else {}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    place = functools.partial(place_experts, {NUM_EXPERTS}, mesh.size(-1))
    sharded = fully_shard(model, mesh=mesh, shard_placement_fn=place, **offload)
    assert is_sharded_with_cast(sharded) == (strategy == "float8")
    return sharded


def wrap_for_float8(model: torch.nn.Module) -> None:
    """Wrap the matrices whose rows two ranks share, as a float8 all-gather needs them; in place."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    for name, parameter in list(model.named_parameters()):
        if parameter.ndim == 2 and parameter.shape[0] % 2 == 0:
            linear = torch.nn.Linear(1, 1, bias=False)
            linear.weight = parameter
            model.register_parameter(name, Float8Linear.from_float(linear, config).weight)
