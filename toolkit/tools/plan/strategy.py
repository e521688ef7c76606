"""The strategy that an accelerate YAML asks for, read without a launcher, ranks or a device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch

from toolkit.config.schema import Checkpointing
from toolkit.errors import UserError
from toolkit.launch.accelerate_yaml import check_accelerate_yaml
from toolkit.launch.accelerator import check_trained_dtype, frozen_dtype
from toolkit.parallel.blocks import choose_checkpointing

LAUNCHER_MIN_NUM_PARAMETERS = 10**8
"""`accelerate launch`'s default of `fsdp_min_num_params`."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a model is distributed, and in which precision."""

    kind: Literal["single", "ddp", "fsdp1", "fsdp2"]
    num_shards: int
    """Ranks that share one copy of the model."""
    num_replicas: int
    num_machines: int
    compute_dtype: torch.dtype
    wrap_classes: tuple[str, ...] = ()
    """Empty: the model's repeated blocks."""
    min_num_parameters: int | None = None
    """For size-based wrap; None: wrap by class."""
    reshard_after_forward: bool = True
    activation_checkpointing: Checkpointing = "none"
    offload: bool = False
    is_compiled: bool = False
    is_one_graph: bool = False
    """Compiled blocks may hold nothing that runs uncompiled."""
    is_float8: bool = False
    is_cpu: bool = False
    """CPU processes: memory is the host's."""
    gpu_bytes: int | None = None
    """Memory of the GPU to plan for; None: not known, or CPU processes."""

    @property
    def num_processes(self) -> int:
        """All ranks."""
        return self.num_shards * self.num_replicas

    @property
    def is_fsdp(self) -> bool:
        """Whether parameters are sharded."""
        return self.kind in ("fsdp1", "fsdp2")


def load_strategy(
    path: Path, num_processes: int, gpu_memory_gib: float | None = None, mixed_precision: str | None = None
) -> Strategy:
    """Read an accelerate YAML for `num_processes` on GPUs of this memory; `mixed_precision` replaces the file's. A file that is
    not valid, or whose mesh has another number of ranks, is a `UserError`."""
    mapping = check_accelerate_yaml(path, mixed_precision)
    num_machines = mapping.get("num_machines", 1)
    if num_processes % num_machines:
        raise UserError(
            f"--num-processes is {num_processes}, which {path} cannot spread evenly over its num_machines {num_machines}: give a "
            f"multiple of {num_machines}"
        )
    # What does not depend on the kind of sharding.
    dynamo = {str(key).removeprefix("dynamo_"): value for key, value in (mapping.get("dynamo_config") or {}).items()}
    common: dict[str, Any] = {
        "num_machines": num_machines,
        "compute_dtype": torch.bfloat16 if mapping.get("mixed_precision") in ("bf16", "fp8") else torch.float32,
        "is_float8": mapping.get("mixed_precision") == "fp8",
        "is_compiled": str(dynamo.get("backend", "NO")).upper() != "NO",
        "is_one_graph": bool(dynamo.get("use_fullgraph")),
        "is_cpu": bool(mapping.get("use_cpu")),
        "gpu_bytes": None if mapping.get("use_cpu") or gpu_memory_gib is None else int(gpu_memory_gib * 2**30),
    }
    # Single process, DDP.
    if mapping["distributed_type"] == "NO":
        if num_processes > 1:
            raise UserError(f"--num-processes is {num_processes}, but {path} has distributed_type NO, which starts 1: give 1")
        return Strategy(kind="single", num_shards=1, num_replicas=1, **common)
    if mapping["distributed_type"] == "MULTI_GPU":
        return Strategy(kind="ddp", num_shards=1, num_replicas=num_processes, **common)
    # FSDP. The launcher takes keys of this section with and without their prefix.
    fsdp = {str(key).removeprefix("fsdp_"): value for key, value in mapping["fsdp_config"].items()}
    strategy_name = str(fsdp.get("sharding_strategy", "FULL_SHARD")).upper()
    is_fsdp1 = fsdp.get("version", 1) == 1
    if is_fsdp1 and strategy_name == "NO_SHARD":
        return Strategy(kind="ddp", num_shards=1, num_replicas=num_processes, **common)
    num_replicas = _num_replicas(path, mapping, num_processes, is_hybrid=is_fsdp1 and strategy_name.startswith("HYBRID"))
    classes = str(fsdp.get("transformer_layer_cls_to_wrap") or "").split(",")
    is_size_based = str(fsdp.get("auto_wrap_policy")).upper() == "SIZE_BASED_WRAP"
    reshard = strategy_name in ("FULL_SHARD", "HYBRID_SHARD") if is_fsdp1 else bool(fsdp.get("reshard_after_forward", True))
    return Strategy(
        kind="fsdp1" if is_fsdp1 else "fsdp2",
        num_shards=num_processes // num_replicas,
        num_replicas=num_replicas,
        wrap_classes=tuple(name.strip() for name in classes if name.strip()),
        min_num_parameters=int(fsdp.get("min_num_params") or LAUNCHER_MIN_NUM_PARAMETERS) if is_size_based else None,
        reshard_after_forward=reshard,
        activation_checkpointing="full" if fsdp.get("activation_checkpointing") else "none",
        offload=bool(fsdp.get("offload_params")),
        **common,
    )


def _num_replicas(path: Path, mapping: dict[str, Any], num_processes: int, *, is_hybrid: bool) -> int:
    """Number of replicas: from the YAML's mesh under FSDP2; one per machine under FSDP1's hybrid sharding."""
    if is_hybrid:
        return mapping.get("num_machines", 1)
    prefix = "parallelism_config_"
    sizes = {str(key).removeprefix(prefix): size for key, size in (mapping.get("parallelism_config") or {}).items()}
    if not sizes:
        return 1
    replicate, shard = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    if replicate * shard != num_processes:
        raise UserError(
            f"--num-processes is {num_processes}, but the mesh of {path} has dp_replicate_size {replicate} x dp_shard_size "
            f"{shard} = {replicate * shard} ranks: give that number, or change the mesh"
        )
    return replicate


def planned_accelerator(strategy: Strategy) -> Any:
    """The attributes of an `Accelerator` that `wrap.shard_model` reads, with a mesh of fake ranks; not in a `FakeTensorMode`.

    FSDP1 is wrapped as FSDP2, in the same units, because fake tensors cannot follow its flattened parameters. Offloaded shards
    are not moved; the tracer does not count them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    sizes = {"dp_replicate": strategy.num_replicas, "dp_shard": strategy.num_shards}
    if strategy.num_replicas == 1:
        del sizes["dp_replicate"]
    names = tuple(sizes)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names) if strategy.is_fsdp else None
    is_by_class = strategy.min_num_parameters is None
    plugin = SimpleNamespace(
        fsdp_version=2,
        auto_wrap_policy=transformer_auto_wrap_policy if is_by_class else size_based_auto_wrap_policy,
        transformer_cls_names_to_wrap=list(strategy.wrap_classes),
        min_num_params=strategy.min_num_parameters,
        activation_checkpointing=False,  # the strategy has it, from both YAMLs
        reshard_after_forward=strategy.reshard_after_forward,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=strategy.compute_dtype, reduce_dtype=torch.float32),
        cpu_offload=OffloadPolicy(),
    )
    return SimpleNamespace(
        **_launched(strategy, plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=names),
        device=torch.device("cpu"),
        prepare_model=lambda model: model,
    )


def with_checkpointing(strategy: Strategy, setting: Checkpointing) -> Strategy:
    """The strategy with a run's `train.activation_checkpointing`. Errors are those of `blocks.choose_checkpointing`."""
    in_yaml = strategy.activation_checkpointing != "none"
    chosen = choose_checkpointing(setting, in_accelerate_yaml=in_yaml, is_compiled=strategy.is_compiled)
    return dataclasses.replace(strategy, activation_checkpointing=chosen)


def planned_frozen_dtype(strategy: Strategy, setting: str, **of_adapter: Any) -> torch.dtype:
    """Storage dtype of frozen parameters in a run with this `model.frozen_dtype`; `of_adapter` as in `accelerator.frozen_dtype`.
    Errors are those of `accelerator.frozen_dtype`."""
    launched: Any = _launched(strategy, SimpleNamespace(fsdp_version=1 if strategy.kind == "fsdp1" else 2))
    return frozen_dtype(SimpleNamespace(**launched), setting, **of_adapter)


def check_planned_dtype(strategy: Strategy, setting: str) -> None:
    """Errors are those of `accelerator.check_trained_dtype`."""
    launched = _launched(strategy, SimpleNamespace(fsdp_version=1 if strategy.kind == "fsdp1" else 2))
    launched["mixed_precision"] = "fp8" if strategy.is_float8 else launched["mixed_precision"]
    check_trained_dtype(cast(Any, SimpleNamespace(**launched)), setting)


def _launched(strategy: Strategy, plugin: SimpleNamespace) -> dict[str, Any]:
    """The attributes of an `Accelerator` that an accelerate YAML sets."""
    from accelerate.utils import DynamoBackend

    return {
        "state": SimpleNamespace(fsdp_plugin=plugin, dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO)),
        "distributed_type": SimpleNamespace(value={"single": "NO", "ddp": "MULTI_GPU"}.get(strategy.kind, "FSDP")),
        "mixed_precision": "bf16" if strategy.compute_dtype == torch.bfloat16 else "no",
    }
