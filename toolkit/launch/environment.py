"""The environment that `accelerate launch` makes from an accelerate YAML and its flags: read, completed and checked.

`srun python recipes/t5.py`, torchrun or a shell give a process its RANK and WORLD_SIZE but do not read the YAML. If
`TOOLKIT_ACCELERATE_YAML` names one, accelerate's own functions put its values into the environment, as its launcher does.
"""

import glob
import importlib.util
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from toolkit import variables
from toolkit.distributed.device import cpu_has_bf16
from toolkit.errors import UserError
from toolkit.launch.accelerate_yaml import check_accelerate_yaml, check_mapping, find_accelerate_yaml
from toolkit.private import private
from toolkit.variables import local_world_size, num_launched

FLOAT8_CAPABILITY = (8, 9)
"""Lowest CUDA compute capability of GPUs that multiply float8: Ada, Hopper and newer."""
WHEELS = {"13.0": 580, "12.9": 525}
"""CUDA of torch's wheels (PYTORCH_RELEASES_CODE_CC in torch/cuda/__init__.py), and the oldest driver for all of its major version
(docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""


def read_launch() -> dict[str, Any]:
    """Check the accelerate YAML that launched this process, and complete and check the environment that the launcher made of it;
    returns the YAML's content, empty without one. An unknown or useless key in it is a `UserError`, and so is what a flag of the
    launcher asks for and is not supported."""
    mapping: dict[str, Any] = {}
    if path := find_accelerate_yaml():
        mapping = check_accelerate_yaml(path)
        if not is_launched():
            if mapping.get("mixed_precision") == "fp8":
                check_torchao()
            join_launch(path, mapping)
        if mapping.get("use_cpu"):
            # The launcher passes `use_cpu` to a single process only; several would use the GPUs of a machine that has them.
            os.environ["ACCELERATE_USE_CPU"] = "true"
    # DDP on the device that the model is on: accelerate would give it the local rank (accelerator.py:1895), which does not exist
    # where each process sees one GPU only, as SLURM can bind them.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    _check_flags()
    return mapping


def check_torchao() -> None:
    """Raise a UserError if torchao is not installed, which float8 needs."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError("mixed_precision is fp8, but torchao is not installed: run pip install 'torchao>=0.18', or write bf16")


def asked_for_cpu() -> bool:
    """Whether the launch is for the CPU, also where there are GPUs; call it after `read_launch`."""
    return _is_true("ACCELERATE_USE_CPU")


def asked_for_fsdp() -> bool:
    """Whether the launch is for FSDP; call it after `read_launch`."""
    return _is_true("ACCELERATE_USE_FSDP")


def checkpoints_activations() -> bool:
    """Whether the launch asks for activation checkpointing. accelerate's plugin forgets it once blocks checkpoint theirs."""
    return _is_true("FSDP_ACTIVATION_CHECKPOINTING")


def environment_kept() -> AbstractContextManager[Any]:
    """Context that puts the environment of this process back at its end."""
    return mock.patch.dict(os.environ)


def is_launched() -> bool:
    """Whether `accelerate launch` has set the environment of this process, or `join_launch` has."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def sets_allocator() -> bool:
    """Whether the user has settings for torch's allocator, which win over ours (c10/cuda/CUDAAllocatorConfig.h)."""
    return any(f"PYTORCH_{name}ALLOC_CONF" in os.environ for name in ("", "CUDA_", "HIP_"))


def launched_precision() -> str:
    """The mixed precision of the launch: no, bf16, fp8, or one that is refused."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def num_openmp_threads() -> int:
    """The user's or the launcher's number of threads on the host; 0 if neither has set one."""
    return int(os.environ.get("OMP_NUM_THREADS", "0"))


def set_unless_given(name: str, value: str) -> None:
    """Set a variable that a library reads, unless the user has."""
    os.environ.setdefault(name, value)


def launched_with(prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables of the environment that begin with one of `prefixes`, by name."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def _is_true(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def join_launch(path: Path, mapping: dict[str, Any]) -> None:
    """Set up this process as one that `accelerate launch --config_file` would start from this YAML; `mapping` is its content.

    Another number of started processes than the file's is a `UserError`.
    """
    # The number of processes must fit the file and the machines.
    given = variables.given("WORLD_SIZE") or "1"
    num_processes = mapping.get("num_processes", 1 if mapping["distributed_type"] == "NO" else given)
    if str(num_processes) != given:
        how = f"WORLD_SIZE is {given}" if variables.given("WORLD_SIZE") else "no launcher has set WORLD_SIZE and RANK"
        raise UserError(
            f"{path}: num_processes is {num_processes}, but {how}: start so many, each with its RANK, or use accelerate launch"
        )
    num_machines = mapping.get("num_machines", 1)
    if not given.isdecimal() or not int(given) or int(given) % num_machines:
        raise UserError(
            f"WORLD_SIZE is {given}, but the num_machines of {path} is {num_machines}: start equally many on each, at least one"
        )

    # Accelerate's variables, and the ranks that no launcher has set.
    num_local = int(given) // num_machines
    rank = variables.given("RANK") or "0"
    os.environ.update(launched_environment(path, int(given)))
    if mapping["distributed_type"] != "NO":
        os.environ.setdefault("RANK", rank)
        os.environ.setdefault("WORLD_SIZE", given)
        # Ranks are numbered machine by machine, as all launchers do by default.
        os.environ.setdefault("LOCAL_RANK", str(int(rank) % num_local) if rank.isdecimal() else "0")
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(num_local))
        if given == "1":  # torch needs an address even for one process
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(private("get_free_port")()))


def launched_environment(path: Path, num_processes: int) -> dict[str, str]:
    """This environment plus what `accelerate launch --config_file` sets for every process, without ranks and addresses."""
    from accelerate.utils import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    words = ["--config_file", str(path), "--num_processes", str(num_processes), "script.py"]
    args = private("_validate_launch_command")(private("launch_command_parser")().parse_args(words))[0]
    if not (args.use_fsdp or args.multi_gpu):
        return prepare_simple_launcher_cmd_env(args)[1]
    args.main_process_port = 0  # no launcher listens; another port would be checked for being free
    return prepare_multi_gpu_env(args)


def _check_flags() -> None:
    """Check what flags of `accelerate launch` have set, by the rules of the YAML, whose check cannot see them."""
    precision = launched_precision()
    mapping: dict[str, Any] = {
        "distributed_type": "FSDP" if asked_for_fsdp() else "MULTI_GPU",
        "mixed_precision": precision,
        "num_processes": num_launched(),
        "use_cpu": asked_for_cpu(),
    }
    if (steps := os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")) != "1":
        mapping["gradient_accumulation_steps"] = int(steps)
    if asked_for_fsdp():
        mapping["fsdp_config"] = {
            "fsdp_version": int(os.environ.get("FSDP_VERSION", "1")),
            "fsdp_auto_wrap_policy": os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP"),
            "fsdp_cpu_ram_efficient_loading": _is_true("FSDP_CPU_RAM_EFFICIENT_LOADING"),
            "fsdp_offload_params": _is_true("FSDP_OFFLOAD_PARAMS"),
        }
        if os.environ.get("FSDP_VERSION", "1") == "1":
            mapping["fsdp_config"]["fsdp_sync_module_states"] = _is_true("FSDP_SYNC_MODULE_STATES")
    if precision == "fp8":
        # accelerate accepts its own choice `ao` only in capitals
        backend = os.environ["ACCELERATE_FP8_BACKEND"] = os.environ.get("ACCELERATE_FP8_BACKEND", "NO").upper()
        mapping["fp8_config"] = {"fp8_backend": backend} if backend != "NO" else {}
    if _is_true("ACCELERATE_USE_PARALLELISM_CONFIG"):
        sizes = {name: value for name, value in launched_with(("PARALLELISM_CONFIG_",)).items() if name.endswith("_SIZE")}
        mapping["parallelism_config"] = {name.lower(): int(value) for name, value in sizes.items()}
    mapping["dynamo_config"] = {
        "dynamo_backend": os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO"),
        "dynamo_use_regional_compilation": _is_true("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"),
    }
    check_mapping(mapping, "accelerate launch")
    if precision == "fp8":
        check_torchao()


def check_hardware() -> None:
    """Refuse bf16, fp8 and GPU presets on hardware that lacks them; call it after `read_launch`."""
    if asked_for_cpu():
        return
    if why := why_no_gpu():
        raise UserError(f"{why}; or set use_cpu: true in the accelerate config")
    if (precision := launched_precision()) == "fp8":
        check_capability()
    wants_many = asked_for_fsdp() or num_launched() > 1
    if wants_many and not torch.accelerator.is_available():
        raise UserError(
            "this accelerate config wants GPUs, but torch sees none here: take a CPU one (accelerate_configs/fsdp2_cpu.yaml, "
            "ddp_cpu.yaml), or set use_cpu: true in it"
        )
    if not torch.cuda.is_available():
        return
    strategy, seen = os.environ.get("FSDP_SHARDING_STRATEGY", ""), torch.cuda.device_count()
    if "HYBRID" in strategy and seen != local_world_size():
        # FSDP1 shards over as many ranks as a process sees GPUs (fsdp/_init_utils.py:162): where each sees its own, over one.
        raise UserError(
            f"fsdp_sharding_strategy is {strategy}, which needs a process for each GPU of a machine that a process sees, but it "
            f"sees {seen}, and {local_world_size()} run here: let each see all, or take accelerate_configs/fsdp2_hsdp.yaml"
        )
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"mixed_precision is bf16, but {torch.cuda.get_device_name()} has no bf16: set mixed_precision: 'no' in the "
            "accelerate config, or take a GPU of compute capability 8.0 or newer"
        )


def slow_bf16(mapping: Mapping[str, Any]) -> str:
    """A sentence if an accelerate YAML asks for bf16 on a CPU here that has to emulate it; else empty.

    On two AVX2 cores, a T5 of 1.2 M parameters trained on 530 tokens/s in bf16 and on 10,600 in fp32.
    """
    on_cpu = mapping.get("use_cpu") or (mapping.get("distributed_type") == "NO" and not torch.accelerator.is_available())
    if mapping.get("mixed_precision") != "bf16" or not on_cpu or cpu_has_bf16():
        return ""
    return "mixed_precision is bf16, which this CPU emulates: up to 20 times slower than fp32, which --mixed_precision no takes"


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
        label = f"cu{wheel.replace('.', '')}"  # named, or pip would be content with the wheel that is installed
        what = f"torch=={torch.__version__.split('+')[0]}+{label} --index-url https://download.pytorch.org/whl/{label}"
        helps = f"take its wheel for CUDA {wheel} (pip install {what})"
    elif wheel or driver == "unknown":
        helps = "run nvidia-smi and python -c 'import torch; torch.cuda.init()', which say why"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    return f"torch {torch.__version__} for {built} cannot use the {len(gpus)} NVIDIA GPUs here, whose driver is {driver}: {helps}"
