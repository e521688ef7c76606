"""`python -m toolkit train RUN.yaml`: chooses a preset by the memory plan, and starts the recipe with it."""

import logging
import os
import shlex
import sys
from pathlib import Path

import torch

from toolkit.config.load import RecipeConfig, load_config
from toolkit.config.python import CONFIGS
from toolkit.distributed.device import GIB
from toolkit.errors import UserError, one_line
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.launch.environment import slow_bf16
from toolkit.tools.plan.plan import build_plan
from toolkit.tools.preset_runs import find_preset
from toolkit.tools.recipes import check_import, find_recipe, find_shipped

logger = logging.getLogger("toolkit")

CHECKPOINTING = "--train.activation_checkpointing"

FOR_ONE_GPU = (
    ("single", "none"), ("single", "selective"), ("single", "full"), ("fsdp2_full_shard", "full"), ("fsdp2_offload", "none"),
)  # fmt: skip
FOR_SEVERAL_GPUS = (
    ("ddp", "none"), ("fsdp2_shard_grad_op", "none"), ("fsdp2_full_shard", "none"), ("fsdp2_full_shard", "selective"),
    ("fsdp2_full_shard", "full"), ("fsdp2_offload", "none"),
)  # fmt: skip
"""Presets, each with a value of `train.activation_checkpointing`, in the order in which they are tried, the fastest first."""


def train(
    run_flags: list[str],
    *,
    config: str,
    preset: str | None,
    recipe: str | None,
    num_processes: int | None,
    mixed_precision: str | None,
    dry_run: bool,
) -> None:
    """Print the line that starts the run, and become it; the arguments are those of the command line. A config that the run would
    refuse, no preset that fits, or one for one process and not `num_processes`, are a `UserError`."""
    # A mistake in the config shows before anything is planned or started.
    arguments = [f"--config={config}", *run_flags]
    recipe = find_recipe(arguments, recipe)
    config_of_run = load_config(CONFIGS[recipe], arguments)
    # Where to run.
    gpus = [torch.cuda.get_device_properties(gpu).total_memory / GIB for gpu in range(torch.cuda.device_count())]
    if preset is not None:
        path = find_preset(preset)
    elif gpus:
        num_gpus = num_processes or len(gpus)
        path, flags = _choose_preset(config_of_run, arguments, recipe, min(gpus), num_gpus, mixed_precision)
        run_flags = [*run_flags, *flags]
    else:
        path = find_preset("single_cpu")
        print("no GPU here: one process on the CPU; --preset fsdp2_cpu rehearses sharding on two", flush=True)
    mapping = check_accelerate_yaml(path, mixed_precision)
    is_one = mapping["distributed_type"] == "NO"
    if is_one and num_processes not in (None, 1):
        remedy = "leave it out, or name another preset by --preset"
        raise UserError(f"--num-processes is {num_processes}, and {path} starts one: {remedy}")
    if not is_one and not mapping.get("use_cpu") and mapping.get("num_machines", 1) == 1:
        num_processes = num_processes or len(gpus) or None
    # The line. Quiet: without a traceback of the launcher's own after one process (accelerate/commands/launch.py:998).
    ranks = [*(["--quiet"] if is_one else []), *(["--num_processes", str(num_processes)] if num_processes else [])]
    program = find_shipped("recipes", f"{recipe}.py")
    check_import(program.parent)
    ranks += ["--mixed_precision", mixed_precision] if mixed_precision else []
    if dry_run and (slow := slow_bf16(mapping)):  # a run says it itself
        logger.warning(slow)
    line = ["--config_file", _shown(path), *ranks, _shown(program), "--config", config, *run_flags]
    print(one_line(f"accelerate launch {shlex.join(line)}"), flush=True)
    if not dry_run:
        os.execv(sys.executable, [sys.executable, "-m", "accelerate.commands.launch", *line])


def _choose_preset(
    config: RecipeConfig, arguments: list[str], recipe: str, gpu_gib: float, num_gpus: int, mixed_precision: str | None
) -> tuple[Path, list[str]]:
    """The first preset whose memory plan fits, and the flag that it takes if it recomputes activations; prints what each needs.
    What the run itself asks for is not changed."""
    model, asked = config.model.name_or_path, config.train.activation_checkpointing
    ways = FOR_ONE_GPU if num_gpus == 1 else FOR_SEVERAL_GPUS
    for name, way in ways if asked == "none" else dict.fromkeys((name, asked) for name, _ in ways):
        flags = [f"{CHECKPOINTING}={way}"] if asked != way else []
        path, planned = find_preset(name), [*arguments, *flags]
        plan = build_plan(model, path, num_gpus, planned, recipe, gpu_gib, searches=False, mixed_precision=mixed_precision)
        needs = f"{plan.total / GIB:.1f} of {plan.usable_bytes / GIB:.1f} usable GiB on each GPU"
        called = " ".join(["preset", name, *flags])
        print(f"{called} {'fits' if plan.fits else 'does not fit'}: {needs}, {num_gpus} of {gpu_gib:.1f} GiB", flush=True)
        if plan.fits:
            return path, flags
    what = f"no preset fits {model} on this machine, {num_gpus} x {gpu_gib:.1f} GiB"
    remedy = "take a smaller train.micro_batch_size_rows, shorter rows or an adapter, or name a preset by --preset"
    raise UserError(f"{what}: {remedy}")


def _shown(path: Path) -> str:
    """The path as it is typed here: relative below the working directory."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
