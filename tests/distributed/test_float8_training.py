"""Float8 training on 2 and 4 CPU processes: torchao emulates the products, all else is what GPUs run.

A CPU multiplies no float8 and the preset is refused there, so these tests switch the refusals off by name and ask torchao for
its emulation, which rounds to float8 and multiplies in fp32. What GPUs add is `tests/gpu/test_on_gpus.py`.
"""

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.distributed.test_invariants import CHECKPOINTING
from tests.recipes.test_resume import load_whole, on_one_process
from tests.support import small_run
from tests.support.launch import run_on_ranks
from tests.support.model_folders import CAUSAL_FAMILIES
from tests.support.small_run import NUM_STEPS, figures, run_recipes, train_and_record_gradients, whole_gradients
from toolkit.config.schema import OptimConfig
from toolkit.data.collate import CausalCollator
from toolkit.distributed.comm import rank
from toolkit.launch.accelerator import build_accelerator
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.parallel import float8 as conversion
from toolkit.parallel.wrap import shard_model
from toolkit.training.optim import build_optimizer

PRESET = "fsdp2_fp8"
ON_CPU = {"use_cpu": True, "num_processes": 2, "dynamo_config": {"dynamo_backend": "NO"}}
ON_ONE = ON_CPU | {
    "distributed_type": "NO",
    "num_processes": 1,
    "fsdp_config": None,
    "fp8_config": {"enable_fsdp_float8_all_gather": False},
}
BF16 = {"mixed_precision": "bf16", "fp8_config": None}
FOUR = {"num_processes": 4, "parallelism_config": {f"parallelism_config_dp_{name}_size": 2 for name in ("replicate", "shard")}}
SAVED_STEP = 3
FLOAT8_TOLERANCE = 0.4
"""Relative distance of a gradient from that in bf16: e4m3 keeps 3 bits behind the leading one, the gradient of an output 2."""


def emulated(function: Callable, *args):
    """On every rank: `function`, with the products emulated and nothing refused for the missing GPU."""
    convert = conversion.convert

    def convert_emulated(model, linears, config) -> None:
        convert(model, linears, dataclasses.replace(config, emulate=True))

    with (
        patch("toolkit.launch.environment.check_capability", lambda: None),
        patch("toolkit.launch.accelerate_rules._check_float8", lambda *_: None),
        patch.object(conversion, "convert", convert_emulated),
    ):
        return function(*args)


def take_step() -> dict:
    """On every rank: a step of a tiny Llama, the dtypes of weights while they are gathered, what each rank holds."""
    accelerator = build_accelerator()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **CAUSAL_FAMILIES["llama"][1]))
    names = list(dict(model.named_parameters()))
    sharded = shard_model(accelerator, model)
    optimizer = build_optimizer(OptimConfig(lr=1e-2), sharded.model)
    gathered: dict[str, str] = {}
    for name, module in sharded.unwrapped.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, _, name=name: gathered.update({name: type(module.weight).__name__}))
    ids = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(rank() % 2)).tolist()
    rows = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in ids]
    before = {name: p.full_tensor() for name, p in sharded.unwrapped.named_parameters()}
    batch = {name: tensor.to(accelerator.device) for name, tensor in CausalCollator(0).collate([[row] for row in rows]).items()}
    summed_loss(sharded.model, batch)[0].backward()
    gradients = whole_gradients(sharded.model)
    optimizer.step()
    parameters = dict(sharded.unwrapped.named_parameters())
    return {
        "names": [names, list(parameters)],
        "gathered": gathered,
        "gradients": gradients,
        "dtypes": sorted({str(p.dtype) for p in parameters.values()}),
        "moved": [name for name, p in parameters.items() if not torch.equal(p.full_tensor(), before[name])],
        "scaled": [name for name, p in parameters.items() if getattr(p._local_tensor, "_precomputed_scale", None) is not None],
        "are_shards": all(isinstance(p, DTensor) for p in parameters.values()),
    }


def test_linears_of_blocks_compute_in_float8_and_masters_stay_fp32():
    where = {**ON_CPU, **FOUR, **CHECKPOINTING}
    float8 = run_on_ranks(partial(emulated, take_step), preset=PRESET, overrides=where)[0]
    bf16 = run_on_ranks(take_step, preset=PRESET, overrides={**where, **BF16})[0]
    check_step(float8, bf16)


def check_step(float8: dict, bf16: dict) -> None:
    """What `take_step` reported with float8 and without."""
    assert float8["names"][0] == float8["names"][1] and float8["are_shards"] and float8["dtypes"] == ["torch.float32"]
    assert "Float8TrainingTensor" not in bf16["gathered"].values()
    in_float8 = {name for name, kind in float8["gathered"].items() if kind == "Float8TrainingTensor"}
    left = set(float8["gathered"]) - in_float8
    assert len(in_float8) > 10 and len(left) == 2 and "lm_head" in left, left  # the first one and the head
    assert {name.removesuffix(".weight") for name in float8["scaled"]} == in_float8, "scales of the next step"
    assert sorted(float8["moved"]) == sorted(float8["names"][0])
    distances = {
        name: float(np.linalg.norm(float8["gradients"][name] - gradient) / np.linalg.norm(gradient))
        for name, gradient in bf16["gradients"].items()
    }
    assert max(distances.values()) < FLOAT8_TOLERANCE, distances
    assert sum(distance > 1e-3 for distance in distances.values()) > 10


@pytest.mark.parametrize("where", [ON_CPU, ON_ONE], ids=["fsdp2", "one-process"])
def test_a_run_learns_as_in_bf16_resumes_exactly_and_exports_plain_weights(tmp_path, where):
    check_run(tmp_path, partial(emulated, train_and_record_gradients), where, resume_tolerance=0)


def check_run(folder: Path, train: Callable[..., dict[str, np.ndarray]], where: dict, resume_tolerance: float) -> None:
    """A recipe in bf16, in float8, and in float8 from the checkpoint in the middle; `where` are overrides of the preset."""
    small_run.write_inputs(folder, small_run.T5_CONFIG | {"feed_forward_proj": "relu"})
    flags = [
        *("--model.name_or_path", str(folder / "model"), "--model.from_scratch", "true", "--model.dropout", "0.1"),
        *("--train.micro_batch_size_rows", "4", "--checkpoint.every_steps", str(SAVED_STEP), "--eval.generate", "false"),
    ]
    in_bf16 = {"preset": PRESET, "overrides": {**where, **BF16}, "flags": flags}
    how = in_bf16 | {"overrides": {**where, "mixed_precision": "fp8"}, "function": train}
    of_bf16, whole = (lines for lines, _ in run_recipes(folder, {"bf16": in_bf16, "whole": how}).values())
    runs = folder / "runs"
    later = shutil.ignore_patterns(f"step-{NUM_STEPS:08d}", "export")
    shutil.copytree(runs / "whole", runs / "resumed", ignore=later)
    # As a pretrained model its weights are read shard by shard, into memory that the wrapper has already.
    flags = [*flags, "--model.name_or_path", str(runs / "resumed" / "export"), "--model.from_scratch", "false"]
    resumes = {"resumed": how, "again": how | {"flags": [*flags, "--train.max_steps", "1"]}}
    resumed, again = (lines for lines, _ in run_recipes(folder, resumes).values())

    curves = [figures(lines, "train") for lines in (of_bf16, whole, resumed)]
    assert curves[1]["loss"][-1] < curves[1]["loss"][0] - 0.5
    np.testing.assert_allclose(curves[1]["loss"], curves[0]["loss"], rtol=0.01)
    assert (curves[1]["loss"] != curves[0]["loss"]).all()
    for figure in ("loss", "grad_norm"):
        np.testing.assert_allclose(curves[2][figure], curves[1][figure], rtol=resume_tolerance, err_msg=figure)
    assert (curves[2]["step_time_s"][SAVED_STEP:] != curves[1]["step_time_s"][SAVED_STEP:]).all(), "not resumed"
    evaluations = [figures(lines, "eval")["loss"] for lines in (resumed, again)]
    assert evaluations[1][0] == pytest.approx(evaluations[0][-1], rel=1e-3)
    last = runs / "resumed" / "checkpoints" / f"step-{NUM_STEPS:08d}" / "state"
    assert on_one_process(compare_export, runs / "resumed" / "export", last) == {"unequal": [], "dtypes": ["torch.float32"]}


def compare_export(exported: Path, last: Path) -> dict:
    """On one process, without torchao: the exported model against the last checkpoint."""
    ours = load_file(exported / "model.safetensors")
    theirs = {name.removeprefix("model."): t for name, t in load_whole(last).items() if name.startswith("model.")}
    unequal = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    return {"unequal": unequal, "dtypes": sorted({str(tensor.dtype) for tensor in theirs.values()})}
