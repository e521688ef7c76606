"""What flags of `accelerate launch` put into the environment, and no YAML shows; what the kind of device decides."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from tests.support.launch import REPOSITORY
from tests.support.refusals import refusal
from toolkit.config.schema import TrainConfig
from toolkit.data.batch_plan import BatchPlan
from toolkit.launch import accelerator, environment
from toolkit.launch.accelerator import bound_primitive_cache, build_accelerator, check_trained_dtype, frozen_dtype
from toolkit.launch.environment import why_no_gpu
from toolkit.launch.process_state import process_state_kept

WRAP = ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
ON_EVERY_RANK = ["--fsdp_cpu_ram_efficient_loading", "false"]
MESH = [
    *("--use_fsdp", *WRAP, *ON_EVERY_RANK, "--fsdp_version", "2"),
    *("--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"),
]


FLAGS = {
    "accelerate launch: fsdp_config.fsdp_cpu_ram_efficient_loading is true: set it to false": ["--use_fsdp", *WRAP],
    "accelerate launch: fsdp_config.fsdp_auto_wrap_policy is NO_WRAP: ": ["--use_fsdp", *ON_EVERY_RANK],
    "dynamo_config.dynamo_use_regional_compilation is not true: ": ["--multi_gpu", "--dynamo_backend", "inductor"],
    "their product must be num_processes (2), and dp_shard_size": [*MESH, "--parallelism_config_dp_replicate_size", "2"],
    "parallelism_config_tp_size is 2: set it to 1, accelerate imports a part": [*MESH, "--parallelism_config_tp_size", "2"],
    "mixed_precision is 'fp16': write bf16": ["--multi_gpu", "--mixed_precision", "fp16"],
}


@pytest.mark.parametrize("sentence", FLAGS)
def test_what_flags_of_the_launcher_ask_for_is_refused(monkeypatch, sentence):
    command = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", *FLAGS[sentence], "t5.py"]
    monkeypatch.setattr("toolkit.launch.environment.find_accelerate_yaml", lambda: None)
    arguments = _validate_launch_command(launch_command_parser().parse_args(command))[0]
    for name, value in {**prepare_multi_gpu_env(arguments), "WORLD_SIZE": "2"}.items():  # as the launcher sets it
        monkeypatch.setenv(name, value)
    assert sentence in refusal(build_accelerator)


@pytest.fixture
def on_gpus(monkeypatch) -> None:
    """As on a machine with GPUs, with nothing set by a launcher; `build_accelerator` ends where the ranks would meet."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    monkeypatch.setattr("toolkit.launch.environment.find_accelerate_yaml", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "rendezvous_arguments", MagicMock(side_effect=ConnectionAbortedError))


@pytest.mark.parametrize(
    ("given", "grow"),
    [
        ({}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"ACCELERATE_USE_CPU": "true"}, False),
    ],
)
def test_segments_grow_on_a_gpu_unless_the_user_has_set_the_allocator(on_gpus, given, grow):
    """Set before the ranks connect, which is before any allocation; this machine's torch reads it back."""
    os.environ.update(given)
    with process_state_kept():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        with pytest.raises(ConnectionAbortedError):
            build_accelerator()
        assert torch._C._accelerator_getAllocatorSettings() == f"expandable_segments:{grow}"


def test_products_of_fp32_stay_in_fp32_whoever_has_allowed_tf32():
    """NVIDIA's images set the variable, which torch reads at its start; accelerate allows TF32 to compiled runs in fp32."""
    script = """
import logging, sys, accelerate, torch
from toolkit.launch.accelerator import build_accelerator
class AsCompiled(accelerate.Accelerator):  # accelerate/state.py:1030
    def __init__(self, **options):
        super().__init__(**options)
        torch.backends.cuda.matmul.allow_tf32 = True
accelerate.Accelerator = AsCompiled
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
found = lambda: [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.allow_tf32]
print(*found())
build_accelerator()
print(*found())
"""
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "ACCELERATE_USE_CPU": "true"}
    printed = subprocess.run([sys.executable, "-c", script], env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    before, said, after = printed.stdout.splitlines()
    assert before == "high tf32 True" and after == "highest ieee False", printed
    assert said.startswith("products of fp32 tensors stay in fp32: TF32 is off, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def test_a_mesh_connects_its_own_groups_and_none_over_all_ranks(monkeypatch):
    """nccl would hold one more communicator, over every rank of a large job."""
    reduced = []
    monkeypatch.setattr(accelerator, "world_size", lambda: 4)
    monkeypatch.setattr(accelerator.dist, "all_reduce", lambda tensor, group: reduced.append((tensor.device.type, group)))
    mesh = MagicMock(get_all_groups=lambda: ["replicas", "shards"])
    parallelism = MagicMock(fsdp_dim_names=["dp_replicate", "dp_shard_cp"])
    for chosen in ({("dp_replicate", "dp_shard_cp"): mesh}, None):
        of_mesh = {"torch_device_mesh": chosen, "parallelism_config": parallelism}
        accelerator.connect_devices(MagicMock(**of_mesh, device=torch.device("cpu")))
    assert reduced == [("cpu", "replicas"), ("cpu", "shards"), ("cpu", torch.distributed.group.WORLD)]


def test_hybrid_shards_of_fsdp1_need_all_gpus_of_a_machine_in_sight(monkeypatch, on_gpus):
    """SLURM can bind one GPU to each task. FSDP1 would then replicate the full model, and say nothing."""
    launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "LOCAL_WORLD_SIZE": "8"}
    os.environ.update({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "WORLD_SIZE": "16", **launched})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "but it sees 1, and 8 run here" in refusal(build_accelerator)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ConnectionAbortedError):
        build_accelerator()


SINGLE = REPOSITORY / "accelerate_configs" / "single.yaml"
OF_GPUS = [path for path in sorted(SINGLE.parent.glob("*.yaml")) if "_cpu" not in path.stem and "single" not in path.stem]


@pytest.mark.parametrize("path", OF_GPUS, ids=lambda path: path.stem)
def test_a_gpu_preset_without_a_gpu_says_what_is_missing(monkeypatch, path):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    num_processes = yaml.safe_load(path.read_text())["num_processes"]
    os.environ.update({"TOOLKIT_ACCELERATE_YAML": str(path), "RANK": "0", "WORLD_SIZE": str(num_processes)})
    sentence = refusal(build_accelerator)
    fp8 = "needs a CUDA GPU of compute capability 8.9 (Ada, Hopper) or newer; torch sees none: write bf16"
    others = (
        "this accelerate config wants GPUs, but torch sees none here: take a CPU one "
        "(accelerate_configs/fsdp2_cpu.yaml, ddp_cpu.yaml), or set use_cpu: true in it"
    )
    assert fp8 in sentence if path.stem == "fsdp2_fp8" else sentence == others


def test_what_float8_lacks_is_named(monkeypatch):
    gpu = {"is_available": True, "get_device_name": "NVIDIA A100", "get_device_capability": (8, 0)}
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert "8.9 (Ada, Hopper) or newer; NVIDIA A100 has 8.0: write bf16" in refusal(environment.check_capability)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    environment.check_capability()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torchao is not installed: run pip install 'torchao>=" in refusal(environment.check_torchao)


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)\nGCC version: 12.3.0\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc version 12.3.0\n"
WHEEL = "take its wheel for CUDA {0} (pip install torch==2.13.0+{1} --index-url https://download.pytorch.org/whl/{1})"


@pytest.mark.parametrize(
    ("built", "version", "text", "driver", "helps"),
    [
        ("13.0", "cu130", CLOSED, "535.104.05", WHEEL.format("12.9", "cu129")),
        (None, "cpu", OPEN, "580.95.05", WHEEL.format("13.0", "cu130")),
        ("13.0", "cu130", CLOSED, "470.82.01", "update the driver to 525 or newer"),
        ("13.2", "cu132", OPEN, "580.95.05", "run nvidia-smi and python -c 'import torch; torch.cuda.init()', which say why"),
        ("12.9", "cu129", "", "unknown", "run nvidia-smi"),
    ],
)
def test_gpus_that_torch_cannot_use_are_named_with_their_driver_and_the_wheel_to_take(
    monkeypatch, tmp_path, built, version, text, driver, helps
):
    """`single` trained on the CPU in silence, and `make gpu` ended with a traceback."""
    for number in range(8):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    if text:
        (tmp_path / "version").write_text(text.format(driver))
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch, "__version__", f"2.13.0+{version}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "TOOLKIT_ACCELERATE_YAML": str(SINGLE)})
    places = str(tmp_path / "nvidia[0-9]*"), tmp_path / "version"
    said = why_no_gpu(*places)
    gpus = f"cannot use the 8 NVIDIA GPUs here, whose driver is {driver}"
    assert said.startswith(f"torch 2.13.0+{version} for {f'CUDA {built}' if built else 'CPUs'} {gpus}: {helps}")

    monkeypatch.setattr(environment, "why_no_gpu", lambda: why_no_gpu(*places))
    assert refusal(build_accelerator) == f"{said}; or set use_cpu: true in the accelerate config"
    for hides in ({"CUDA_VISIBLE_DEVICES": ""}, {"ACCELERATE_USE_CPU": "true"}):
        monkeypatch.setattr(os, "environ", {**os.environ, **hides})
        environment.check_hardware()
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_no_gpu(*places) == "" and why_no_gpu(str(tmp_path / "none*")) == ""


@pytest.mark.parametrize(
    ("capabilities", "onednn", "has"),
    [
        ({"avx2": True}, False, False),
        ({"avx512_f": True}, True, False),  # oneDNN alone says yes
        ({"avx512_bf16": True}, True, True),
        ({"amx_bf16": True}, True, True),
        ({"bf16": True, "neon": True}, True, True),
        ({"avx512_bf16": True}, False, False),  # oneDNN is kept from it
    ],
)
def test_a_cpu_has_bf16_or_a_line_says_that_it_does_not(monkeypatch, capabilities, onednn, has):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    slow = environment.slow_bf16({"mixed_precision": "bf16", "use_cpu": True, "distributed_type": "FSDP"})
    what = "mixed_precision is bf16, which this CPU emulates"
    assert slow == ("" if has else f"{what}: up to 20 times slower than fp32, which --mixed_precision no takes")
    for others in ({"mixed_precision": "no"}, {"use_cpu": False}):  # another precision; a preset for GPUs
        assert not environment.slow_bf16({"mixed_precision": "bf16", "use_cpu": True, "distributed_type": "FSDP", **others})


CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def test_capacity_follows_the_shapes_unless_the_user_has_set_it(monkeypatch):
    for num_shapes, capacity in ((1, "128"), (4, "128"), (5, "150"), (34, "1020"), (35, "128"), (3000, "128")):
        for own, expected in (({}, capacity), ({CAPACITY: "7"}, "7")):
            monkeypatch.setattr(os, "environ", {**own})
            bound_primitive_cache(num_shapes)
            assert os.environ == {CAPACITY: expected}


def test_shapes_of_a_plan_are_those_of_its_padded_micro_batches_and_packs_in_one_row_have_that_of_their_sum():
    train = TrainConfig(global_batch_size_rows=4, micro_batch_size_rows=2, max_steps=9)
    for lengths, shapes in ((np.full(40, 9), {(2, 9, 1)}), (np.repeat([5, 9], 20), {(2, 5, 1), (2, 9, 1)})):
        plan = BatchPlan(lengths, np.ones(40, int), train, world_size=1)
        assert {*plan.shapes((plan.num_tokens, plan.num_label_tokens), 10, 0)} == shapes
    lengths = np.array([5, 4, 6, 3, 5, 3, 4, 5])
    train = replace(train, global_batch_size_rows=8)
    plan = BatchPlan(lengths, lengths - 1, train, world_size=1, pack_length_tokens=9)
    packs = [[row for pack in micro_batch.packs for row in pack] for micro_batch in plan.iterate(1, 1, 0)]
    sums = {(1, int(lengths[rows].sum()), int((lengths - 1)[rows].sum())) for rows in packs}
    assert max(map(len, packs)) > 2 and {*plan.shapes((lengths, lengths - 1), 1, 0, one_row=True)} == sums


def test_onednn_keeps_no_more_though_torch_is_imported_before():
    """200 shapes twice: in a cache of 128, which drops the oldest, none is there the second time; in oneDNN's own, all are."""
    script = (
        "import torch\n"
        "from toolkit.launch.accelerator import bound_primitive_cache\n"
        "bound_primitive_cache(3000)\n"
        "weight_3x3 = torch.ones(16, 16, 3, 3)\n"
        "for width in 2 * [*range(8, 208)]:\n"
        "    torch.nn.functional.conv2d(torch.ones(16, 16, 3, width), weight_3x3)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != CAPACITY}
    environment |= {"PYTHONPATH": str(REPOSITORY), "ONEDNN_VERBOSE": "profile_create", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    made = [line for line in done.stdout.splitlines() if "primitive,create:cache_miss,cpu,convolution" in line]
    assert len(made) == 2 * 200, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("kind", "version", "precision", "reason"),
    [
        ("FSDP", 1, "bf16", "FSDP1 flattens weights"),
        ("MULTI_GPU", None, "bf16", "DDP would reduce gradients in bf16"),
        ("FSDP", 2, "fp8", "mixed_precision is fp8"),
        ("NO", None, "no", "mixed_precision is 'no'"),
        ("NO", None, "bf16", ""),
        ("FSDP", 2, "no", ""),
    ],
)
def test_where_frozen_and_trained_weights_are_kept_in_bf16(kind, version, precision, reason):
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), state=state, mixed_precision=precision)
    check_trained_dtype(accelerator, "float32")
    if version == 1:
        sentence = "model.frozen_dtype is bfloat16, but FSDP1 keeps frozen and trainable parameters"
        assert refusal(frozen_dtype, accelerator, "bfloat16", has_adapter=True).startswith(sentence)
    if not reason:
        return check_trained_dtype(accelerator, "bfloat16_stochastic")
    sentence = f"model.trained_dtype is bfloat16_stochastic, but {reason}: take one process with mixed_precision: bf16, or FSDP2"
    assert refusal(check_trained_dtype, accelerator, "bfloat16_stochastic").startswith(sentence)
