"""Refuses what the accelerate YAML, or flags of `accelerate launch`, ask for and this code or this machine cannot do."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

import torch

from toolkit.distributed.comm import local_world_size
from toolkit.errors import UserError
from toolkit.launch.accelerate_rules import check_mesh
from toolkit.launch.environment import asked_for_cpu, check_torchao

FLOAT8_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability of GPUs that multiply float8: Ada, Hopper and newer."""
WHEELS = {"13.0": 580, "12.9": 525}
"""CUDA of torch's wheels (PYTORCH_RELEASES_CODE_CC, torch/cuda/__init__.py): oldest driver (NVIDIA, CUDA Compatibility)."""


def check_environment() -> None:
    """Check the values that were given as flags of `accelerate launch`, which the check of the YAML cannot see."""
    accumulation = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation != "1":
        raise UserError(
            f"gradient_accumulation_steps is {accumulation} in the launch: accumulation follows from "
            "train.global_batch_size_rows and train.micro_batch_size_rows, so leave it out"
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16", "fp8"):
        raise UserError(f"mixed_precision {precision} is not supported: use bf16, or no for fp32")
    if precision == "fp8":
        _check_float8_environment()
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if backend.upper() != "NO" and os.environ.get("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "False") != "True":
        raise UserError(
            f"dynamo_backend is {backend} in the launch, without dynamo_use_regional_compilation: set that too, blocks are "
            "compiled one by one"
        )
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false") == "true":
        names = [f"{dimension}_size" for dimension in ("dp_replicate", "dp_shard", "tp", "cp", "sp")]
        sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in names}
        check_mesh(sizes, int(os.environ.get("WORLD_SIZE", "1")))
    if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":
        _check_fsdp_environment()


def _check_float8_environment() -> None:
    """Check float8 that was asked for by flags, by the same rules as in the YAML."""
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "NO").upper()
    on_fsdp2 = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" and os.environ.get("FSDP_VERSION") == "2"
    if backend != "AO" or not on_fsdp2:
        raise UserError(
            f"mixed_precision is fp8 in the launch with fp8_backend {backend.lower()}: it works by torchao (ao) under FSDP2 "
            "only, launch with accelerate_configs/fsdp2_fp8.yaml, or take bf16"
        )
    check_torchao()
    os.environ["ACCELERATE_FP8_BACKEND"] = backend  # accelerate accepts its own choice `ao` only in capitals


def _check_fsdp_environment() -> None:
    """Refuse defaults of `accelerate launch --use_fsdp` that would go wrong."""
    if os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() in ("true", "1", "yes"):
        # transformers would load weights on rank 0 only, and the other ranks would shard placeholders.
        raise UserError(
            "fsdp_cpu_ram_efficient_loading is true in the launch, which is accelerate's default: launch with a YAML of "
            "accelerate_configs/, or add --fsdp_cpu_ram_efficient_loading false"
        )
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP").upper() == "NO_WRAP":
        raise UserError(
            "fsdp_auto_wrap_policy is NO_WRAP in the launch, which is accelerate's default: launch with a YAML of "
            "accelerate_configs/, or add --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
        )


def check_hardware() -> None:
    """Refuse bf16, fp8 and GPU presets on hardware that lacks them."""
    if not asked_for_cpu() and (why := why_no_gpu()):
        raise UserError(f"{why}; or set use_cpu: true in the accelerate config")
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "fp8":
        check_capability()
    wants_many = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" or int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not asked_for_cpu() and wants_many and not torch.accelerator.is_available():
        raise UserError(
            "this accelerate config wants GPUs, but torch sees none here: take a CPU one (accelerate_configs/fsdp2_cpu.yaml, "
            "ddp_cpu.yaml), or set use_cpu: true in it"
        )
    wants_bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "bf16"
    on_cuda = not asked_for_cpu() and torch.cuda.is_available()
    strategy, seen = os.environ.get("FSDP_SHARDING_STRATEGY", ""), torch.cuda.device_count()
    if on_cuda and "HYBRID" in strategy and seen != local_world_size():
        # FSDP1 shards over as many ranks as a process sees GPUs (fsdp/_init_utils.py:162): where each sees its own, over one.
        raise UserError(
            f"fsdp_sharding_strategy is {strategy}, which needs a process for each GPU of a machine that a process sees, but it "
            f"sees {seen}, and {local_world_size()} run here: let each see all, or take accelerate_configs/fsdp2_hsdp.yaml"
        )
    if wants_bf16 and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"mixed_precision is bf16, but {torch.cuda.get_device_name()} has no bf16: set mixed_precision: no in the "
            "accelerate config, or take a GPU of compute capability 8.0 or newer"
        )


def check_capability() -> None:
    """Raise a UserError if this process has no GPU that multiplies float8."""
    is_here, wanted = torch.cuda.is_available(), ".".join(map(str, FLOAT8_CAPABILITY))
    if is_here and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY:
        return
    has = f"{torch.cuda.get_device_name()} has {'.'.join(map(str, torch.cuda.get_device_capability()))}" if is_here else ""
    raise UserError(
        f"mixed_precision is fp8, which needs a CUDA GPU of compute capability {wanted} (Ada, Hopper) or newer; "
        f"{has or 'torch sees none'}: write bf16, or take such a machine"
    )


def why_no_gpu(devices: str = "/dev/nvidia[0-9]*", driver_file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Why torch cannot use the NVIDIA GPUs here, and what helps; empty if it can, there are none, or the user hides them."""
    gpus = glob.glob(devices)
    if not gpus or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or torch.cuda.is_available():
        return ""
    driver = next(iter(re.findall(r"\b\d{3,}[.\d]*", driver_file.read_text() if driver_file.is_file() else "")), "unknown")
    wheel = next((cuda for cuda, oldest in WHEELS.items() if driver != "unknown" and int(driver[:3]) >= oldest), None)
    helps = f"update the driver to {min(WHEELS.values())} or newer"
    if wheel and int(float(torch.version.cuda or 99)) > int(float(wheel)):
        label = f"cu{wheel.replace('.', '')}"  # without it, pip is content with the wheel that is installed
        what = f"torch=={torch.__version__.split('+')[0]}+{label} --index-url https://download.pytorch.org/whl/{label}"
        helps = f"take its wheel for CUDA {wheel} (pip install {what})"
    elif wheel or driver == "unknown":
        helps = "run nvidia-smi and python -c 'import torch; torch.cuda.init()', which say why"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    return f"torch {torch.__version__} for {built} cannot use the {len(gpus)} NVIDIA GPUs here, whose driver is {driver}: {helps}"
