"""Under bf16, what trains is stored in fp32, and gradients are reduced over the ranks in fp32; or weights are bf16 and rounded
stochastically: such a run learns as fp32 does, and resumes bit for bit.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.absolute_runs import run_ranks
from tests.support.launch import GPU_PRESET_OVERRIDES_ON_CPU
from tests.support.small_run import NUM_STEPS, before_clipping, figures, run_in_this_process, run_recipes, write_inputs
from toolkit.parallel.units import local_tensor

LARGEST_SHARE = 0.6
"""Of values that bf16 can hold. Half of the sums of two ranks' gradients need more bits, and nearly all weights do."""


@pytest.mark.parametrize(("kind", "preset"), [("t5", "fsdp2_cpu"), ("lora", "fsdp2_cpu"), ("t5", "fsdp1_full_shard")])
def test_in_bf16_what_trains_and_sums_of_gradients_are_fp32(tmp_path, kind, preset):
    """By their values: a tensor of fp32 may hold what was rounded before."""
    flags = ["--train.micro_batch_size_rows=8", "--train.max_steps=2", "--optim.warmup_steps=1"]
    flags += ["--eval.generate=false", "--eval.at_start=false"]
    overrides = GPU_PRESET_OVERRIDES_ON_CPU.get(preset, {}) | {"mixed_precision": "bf16"}
    for shares in run_ranks(kind, preset, tmp_path, overrides, flags, train_and_measure):
        assert shares["weights"] < LARGEST_SHARE, "weights are rounded to bf16"
        assert shares["gradients"] < LARGEST_SHARE, "gradients are rounded to bf16"


def train_and_measure(recipe: str, argv: list[str], folder: Path) -> dict[str, float]:
    """On every rank: the share of a step's gradients, and of the weights after an update, that bf16 can hold."""
    shares: dict[str, float] = {}

    def share(tensors: list) -> float:
        values = torch.cat([local_tensor(tensor).detach().float().flatten() for tensor in tensors])
        values = values[values != 0]
        return (values == values.bfloat16()).float().mean().item()

    def look(model) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        shares.update(weights=share(trained), gradients=share([p.grad for p in trained if p.grad is not None]))

    with before_clipping(look):
        run_in_this_process(recipe, argv)
    return shares


# --- `model.trained_dtype: bfloat16_stochastic`, from the recipe to the export.

SAVED_STEP = 3
WEIGHTS = ["--model.trained_dtype", "bfloat16_stochastic", "--optim.name", "adamw_8bit"]


def train_and_note_dtypes(recipe: str, argv: list[str], _: int) -> list[str]:
    """On every rank: the dtypes of weights and of the gradients that are clipped, in any step."""
    noted: set[str] = set()
    with before_clipping(lambda model: noted.update(f"{p.dtype} {p.grad.dtype}" for p in model.parameters())):
        run_in_this_process(recipe, argv)
    return sorted(noted)


@pytest.mark.parametrize("preset", ["single_cpu", "fsdp2_cpu"])
def test_a_run_learns_resumes_and_exports(tmp_path, preset):
    write_inputs(tmp_path)
    flags = [
        *("--model.name_or_path", str(tmp_path / "model"), "--model.from_scratch", "true", "--model.dropout", "0.1"),
        *("--checkpoint.every_steps", str(SAVED_STEP), "--eval.generate", "false", "--optim.lr", "1e-2"),
        *("--train.activation_checkpointing", "selective"),
    ]
    several, one = ["--train.micro_batch_size_rows", "4"], ["--train.micro_batch_size_rows", "16"]
    how = {"preset": preset, "overrides": {"mixed_precision": "bf16"}, "function": train_and_note_dtypes}
    wanted = {
        "fp32": how | {"flags": [*flags, *several, "--optim.name", "adamw_8bit"]},
        "several": how | {"flags": [*flags, *several, *WEIGHTS]},
        "one": how | {"flags": [*flags, *one, *WEIGHTS]},
    }
    of_runs = run_recipes(tmp_path, wanted)
    runs = tmp_path / "runs"
    shutil.copytree(runs / "several", runs / "resumed", ignore=shutil.ignore_patterns(f"step-{NUM_STEPS:08d}", "export"))
    of_runs |= run_recipes(tmp_path, {"resumed": wanted["several"]})

    dtypes = {name: set(noted[0]) for name, (_, noted) in of_runs.items()}
    assert dtypes["fp32"] == {"torch.float32 torch.float32"} and dtypes["one"] == {"torch.bfloat16 torch.bfloat16"}
    assert "torch.bfloat16 torch.float32" in dtypes["several"]  # an epoch ends with a smaller step
    curves = {name: figures(lines, "train") for name, (lines, _) in of_runs.items()}
    for name in ("several", "one"):
        assert curves[name]["loss"][-1] < curves[name]["loss"][0] - 0.5
        np.testing.assert_allclose(curves[name]["loss"], curves["fp32"]["loss"], rtol=0.02)
    for figure in ("loss", "grad_norm"):
        np.testing.assert_array_equal(curves["resumed"][figure], curves["several"][figure])
    assert (curves["resumed"]["step_time_s"][SAVED_STEP:] != curves["several"]["step_time_s"][SAVED_STEP:]).all(), "not resumed"
    exported, resumed = (load_file(runs / name / "export" / "model.safetensors") for name in ("several", "resumed"))
    assert exported.keys() == resumed.keys() and all(torch.equal(exported[name], resumed[name]) for name in exported)
    assert all(torch.equal(weight, weight.bfloat16().to(weight.dtype)) for weight in exported.values())
