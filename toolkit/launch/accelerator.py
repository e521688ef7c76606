"""Builds the `Accelerator` from the accelerate YAML alone, and chooses by the kind of device: precision, threads, caches.

CPU runs get real FSDP. accelerate enables it only for accelerators and silently falls back to DDP elsewhere, so this module reads
the environment that `accelerate launch` made from the YAML, and presents the CPU as an accelerator.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.distributed.comm import control_group, gather_objects, limit_groups, on_all_ranks, rank, world_size
from toolkit.distributed.device import available_cores, check_own_gpu, synchronize
from toolkit.distributed.rendezvous import connecting, rendezvous_arguments
from toolkit.distributed.watchdog import enter_phase, start
from toolkit.errors import UserError
from toolkit.launch.environment import (
    asked_for_cpu,
    asked_for_fsdp,
    check_hardware,
    launched_precision,
    num_openmp_threads,
    read_launch,
    set_unless_given,
    sets_allocator,
    slow_bf16,
)
from toolkit.launch.rank_consistency import compare_ranks, describe_launch
from toolkit.private import private
from toolkit.variables import local_world_size

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("toolkit")

PRIMITIVES_PER_SHAPE = 30
"""Primitives that oneDNN creates per padded micro-batch shape, whatever the number of blocks: 17 in a Llama, 20 in a T5. This
leaves room to spare, because an LRU cache that is one entry too small for a cycle of shapes misses every time."""
MOST_PRIMITIVES, FEWEST_PRIMITIVES = 1024, 128
"""oneDNN's own limit, about half a GiB; and enough for the current shapes, because blocks share theirs."""


def build_accelerator(
    timeout_s: float = 1800,
    num_threads: int | None = None,
    mixed_precision: str | None = None,
    *,
    started_with: Mapping[str, Any] | None = None,
) -> Accelerator:
    """Check the accelerate YAML that launched this process, and build the `Accelerator` it asks for. Collective.

    An unknown or useless key in the YAML, bf16 or fp8 on hardware without it, a GPU preset without a GPU or with too few, ranks
    that do not find each other, or that were started differently, are a `UserError`. From their meeting on, the watchdog watches
    the ranks.

    Args:
        timeout_s: time for all ranks to meet, and time without progress after which `watchdog.Watchdog` names a hung rank.
            Torch's own timeout is longer, as it names none.
        num_threads: of torch in this process; None as `_num_threads` says.
        mixed_precision: for a process that no YAML launched.
        started_with: what else all ranks must have been started with, for `rank_consistency.compare_ranks`.
    """
    # Check the YAML, the launch environment and the hardware.
    of_yaml = read_launch()
    check_hardware()

    from accelerate import Accelerator, PartialState
    from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs

    on_cpu = asked_for_cpu()
    precision = mixed_precision or launched_precision()
    if slow := slow_bf16({"mixed_precision": precision, "use_cpu": on_cpu or not torch.accelerator.is_available()}):
        logger.warning(slow)
    if not on_cpu and torch.cuda.is_available() and not sets_allocator():
        # Rows differ in length from step to step: memory of fixed segments would fragment. This comes before any allocation.
        private("_accelerator_setAllocatorSettings")("expandable_segments:True")
    # Connect the ranks: `PartialState` chooses the backend, and the `Accelerator` then reuses it.
    meeting = rendezvous_arguments(timeout_s)
    timeout = datetime.timedelta(seconds=2 * timeout_s)
    limit_groups(timeout)
    with connecting():
        PartialState(cpu=on_cpu, timeout=timeout, **meeting)
        control_group()  # always gloo; nccl does not connect yet
    start(timeout_s)
    enter_phase("comparing what the ranks were started with")
    compare_ranks({**(started_with or {}), **on_all_ranks(lambda: describe_launch(of_yaml))})
    enter_phase("building the accelerator", counts_cpu=True)
    check_own_gpu(PartialState().device)

    # Build the `Accelerator`, with FSDP on a CPU too.
    _put_cpu_in_an_accelerators_place()
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],  # one copy of the gradients, not two
    )
    accelerator.native_amp = False  # no autocast: weights are gathered, or copied, in the compute dtype
    _disable_tf32()
    if fsdp_version(accelerator):
        _set_fsdp_precision(accelerator, on_cpu)
    torch.set_num_threads(num_threads or _num_threads(accelerator.device))
    return accelerator


def connect_devices(accelerator: Accelerator) -> None:
    """Connect the devices over which the ranks will communicate; the watchdog names a rank that does not come. Collective.

    nccl connects a group at its first collective, which was in DDP's constructor, FSDP1's sync or the check of the model. The
    mesh of `fsdp_mesh` has groups of its own, and needs none over all ranks. Devices that cannot reach each other are a
    `UserError`.
    """
    if world_size() == 1:
        return
    enter_phase("connecting the devices")
    mesh = fsdp_mesh(accelerator)
    with connecting():
        for group in [dist.group.WORLD] if mesh is None else mesh.get_all_groups():
            dist.all_reduce(torch.zeros((), device=accelerator.device), group=group)
            synchronize(accelerator.device)  # nccl's calls return before the ranks have met


def fsdp_mesh(accelerator: Accelerator) -> DeviceMesh | None:
    """The mesh of replicas and shards that FSDP2 shards over; None without `parallelism_config`.

    Its shard dimension is one that accelerate flattens, whose group is another than the full mesh's of the same ranks
    (accelerate/parallelism_config.py:240, torch/distributed/device_mesh.py).
    """
    mesh = accelerator.torch_device_mesh
    return None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]


def forget_accelerator() -> None:
    """Drop accelerate's state of this process: the next run may be another one, and its process groups are new."""
    from accelerate.state import AcceleratorState, GradientState

    private("_reset_state", AcceleratorState)(reset_partial_state=True)
    private("_reset_state", GradientState)()


def fsdp_version(accelerator: Accelerator) -> int | None:
    """1 or 2; None without FSDP."""
    return accelerator.state.fsdp_plugin.fsdp_version if accelerator.distributed_type.value == "FSDP" else None


def bound_primitive_cache(num_shapes: int) -> None:
    """Size oneDNN's primitive cache for the shapes of a run. Call it before the first matrix product: oneDNN reads the size once.

    If the primitives of all shapes fit, all are kept. With more shapes, an LRU cache would hold half a GiB and rarely hit, so
    only the current shapes are kept. A value set by the user stays. On a GPU nothing reads it.
    """
    wanted = num_shapes * PRIMITIVES_PER_SHAPE
    capacity = max(wanted, FEWEST_PRIMITIVES) if wanted <= MOST_PRIMITIVES else FEWEST_PRIMITIVES
    set_unless_given("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(capacity))


def pads_lengths(accelerator: Accelerator, setting: bool | None) -> bool:
    """Whether lengths are padded up to a grid, from `data.pad_lengths`. A CPU prepares little per shape."""
    return accelerator.device.type != "cpu" if setting is None else setting


@contextlib.contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Context in which sdpa may take cuDNN's kernel, or may not. Torch asks it first on compute capability 9 and 10 (Hopper,
    Blackwell) from cuDNN 9.15.1 on, so with wheels for CUDA 13 (`check_prefer_cudnn_attention` in torch's sdp_utils.cpp). It
    plans each new shape for 23 to 70 ms a direction (sglang-omni, flashinfer#5245), in a cache without bounds (pytorch#190388).
    """
    with contextlib.ExitStack() as undo:
        undo.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        yield


def compute_dtype(accelerator: Accelerator) -> torch.dtype:
    """Dtype of forward and backward; with fp8, the dtype of everything except the products inside converted Linears."""
    return torch.bfloat16 if accelerator.mixed_precision in ("bf16", "fp8") else torch.float32


def frozen_dtype(accelerator: Accelerator, setting: str, *, has_adapter: bool, base_dtype: str | None = None) -> torch.dtype:
    """Storage dtype of frozen parameters, from `model.frozen_dtype`. bfloat16 or codes (`base_dtype`) under FSDP1, which cannot
    flatten them with trainable fp32, and bfloat16 where nothing casts it to compute, are a `UserError`."""
    other = {"adapter.base_dtype": base_dtype, "model.frozen_dtype": setting if setting == "bfloat16" else None}
    for key, value in other.items():
        if value is not None and fsdp_version(accelerator) == 1:
            what = f"{key} is {value}, but FSDP1 keeps frozen and trainable parameters in one tensor of one dtype"
            raise UserError(f"{what}: leave it out, or set fsdp_version: 2")
    if setting == "auto":
        return compute_dtype(accelerator) if has_adapter and fsdp_version(accelerator) != 1 else torch.float32
    if setting == "bfloat16" and compute_dtype(accelerator) == torch.float32 and not fsdp_version(accelerator):
        raise UserError(
            "model.frozen_dtype is bfloat16, but mixed_precision is 'no': leave it out, or write mixed_precision: bf16"
        )
    return getattr(torch, setting)


def check_trained_dtype(accelerator: Accelerator, setting: str) -> None:
    """Raise a UserError if `model.trained_dtype` is bf16 where gradients would be reduced in it, no position is known, or nothing
    casts it to compute."""
    version, kind = fsdp_version(accelerator), accelerator.distributed_type.value
    why_not = {
        "FSDP1 flattens weights": version == 1,
        "DDP would reduce gradients in bf16": version is None and kind != "NO",
        "mixed_precision is fp8": accelerator.mixed_precision == "fp8",
        "mixed_precision is 'no'": version is None and accelerator.mixed_precision == "no",
    }
    if setting != "float32" and (reasons := [reason for reason, applies in why_not.items() if applies]):
        remedy = "take one process with mixed_precision: bf16, or FSDP2, or leave it out"
        raise UserError(f"model.trained_dtype is {setting}, but {reasons[0]}: {remedy}")


def _num_threads(device: torch.device) -> int:
    """Threads of this process for work on the host. Collective.

    With a GPU, its share of the cores: `accelerate launch` asks for one thread there too (commands/launch.py:1365), which would
    clip, hash and update offloaded weights on one core. Ranks that are bound to cores of their own share with nobody.
    On a CPU, the launcher's number, which torch has not read if a parent process imported torch.
    """
    if device.type == "cpu":
        return num_openmp_threads() or torch.get_num_threads()
    node = rank() // local_world_size()
    bound_to = gather_objects((node, os.sched_getaffinity(0)))
    return max(1, available_cores() // bound_to.count((node, os.sched_getaffinity(0))))


def _put_cpu_in_an_accelerators_place() -> None:
    """Make accelerate choose FSDP on the CPU.

    `PartialState` demotes any distributed type on a CPU to MULTI_CPU, and the `Accelerator` enables FSDP only for accelerators.
    Resetting the type between the two makes accelerate read the YAML's FSDP section as on a GPU. This is needed as long as
    accelerate/state.py lists device types for FSDP without the CPU.
    """
    if not (asked_for_cpu() and asked_for_fsdp()):
        return
    from accelerate.utils import DistributedType

    private("_shared_state").update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))


def _disable_tf32() -> None:
    """Compute products of fp32 tensors in fp32 (ieee precision) on GPUs too, after whatever has allowed TF32.

    `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1` of NVIDIA's images is only what torch starts with (ATen/Context.h:496); accelerate allows
    TF32 in compiled fp32 runs (accelerate/state.py:1030), and torch in convolutions.
    """
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        logger.info("products of fp32 tensors stay in fp32: TF32 is off, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE or code had allowed it")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def _set_fsdp_precision(accelerator: Accelerator, on_cpu: bool) -> None:
    """Compute in bf16 and reduce gradients in fp32. accelerate alone would reduce, and so accumulate, in bf16."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

    plugin = accelerator.state.fsdp_plugin
    dtype = compute_dtype(accelerator)
    if plugin.fsdp_version == 2:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if on_cpu and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator's driver
    else:
        plugin.mixed_precision_policy = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
