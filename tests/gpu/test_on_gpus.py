"""What only a GPU shows: pinned host copies, updates left out on the device, steps that do not wait, nccl beside gloo; float8."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import T5Config, T5ForConditionalGeneration
from transformers.integrations.moe import _grouped_mm

from tests.distributed.test_float8_training import BF16, PRESET, check_run, check_step, take_step
from tests.distributed.test_host_reads import READS_OF_TRANSFORMERS, build_run, take_two_steps
from tests.distributed.test_weights import COMPARED, HYBRID_CASES, build_folders, load_both_ways
from tests.gpu.conftest import needs_gpus
from tests.support.launch import run_on_ranks
from tests.support.small_run import T5_CONFIG, train_and_record_gradients
from tests.support.tiny_models import build_rows
from tests.unit.models.patches.test_documents import LENGTHS, build
from toolkit.checkpoint.save import HostCopier
from toolkit.config.schema import OptimConfig
from toolkit.data.collate import CausalCollator, move_to
from toolkit.distributed.comm import build_group, control_group
from toolkit.launch.accelerator import build_accelerator
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.models.patches.documents import BY_DOCUMENT
from toolkit.models.quantized import choose_kernel, dequantize, find_scales, quantize
from toolkit.parallel.units import local_tensor
from toolkit.parallel.wrap import shard_model
from toolkit.training.optim import build_optimizer

GPU = torch.device("cuda", 0)


@needs_gpus(1)
def test_a_host_copy_is_pinned_and_keeps_its_values():
    """Copy, change what was copied, look; twice, as the memory is used again."""
    copier = HostCopier(GPU)
    tensors = {"weight": torch.arange(1_000_000, dtype=torch.float32, device=GPU), "step": torch.ones((), device=GPU)}
    for change in (0.0, 1.0):
        expected = {name: (tensor + change).cpu() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.add_(change)
        copied = copier.copy(tensors)
        for tensor in tensors.values():
            tensor.mul_(-3)
        assert all(torch.equal(copied[name], value) for name, value in expected.items())
        assert {tensor.device.type for tensor in copied.values()} == {"cpu"}
        for name, tensor in tensors.items():
            tensor.copy_(expected[name])
    # torch leaves copies below 5 bytes unpinned (checkpoint/_state_dict_stager.py:34, 169).
    assert {name: tensor.is_pinned() for name, tensor in copied.items()} == {"weight": True, "step": False}


@needs_gpus(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_without_tokens_get_gradients_of_zeros(dtype):
    """Grouped products of experts without tokens, also the first and the last one, are those of each expert's own product.

    The allocator gives memory again that held NaN: a kernel that writes nothing for an empty group would leave it there.
    """
    torch.manual_seed(0)
    tokens = [0, 5, 0, 0, 11, 16, 0, 0]
    weights = torch.randn(len(tokens), 64, 128, device=GPU, dtype=dtype, requires_grad=True)
    inputs = torch.randn(sum(tokens), 64, device=GPU, dtype=dtype, requires_grad=True)
    ends = torch.tensor(tokens, device=GPU).cumsum(0).to(torch.int32)
    by_expert = torch.cat([part @ weight for part, weight in zip(inputs.split(tokens), weights, strict=True)])
    of_output = torch.randn_like(by_expert)
    expected = (by_expert, *torch.autograd.grad(by_expert, (inputs, weights), of_output))
    for _ in range(3):
        poison = [torch.full_like(each, torch.nan) for each in (weights, inputs, by_expert) for _ in range(8)]
        del poison
        output = _grouped_mm(inputs, weights, ends)
        for found, wanted in zip((output, *torch.autograd.grad(output, (inputs, weights), of_output)), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@needs_gpus(1)
def test_an_update_is_left_out_on_the_gpu():
    """`found_inf` of 1 changes no weight, moment or step count; of 0 it changes all; the host waits for none of it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(GPU)
    optimizer = build_optimizer(OptimConfig(lr=0.1), model)

    def state_after(found_inf: float, gradient: float) -> list[torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.found_inf = torch.full((), found_inf, device=GPU)
        optimizer.step()
        tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
        return [tensor.detach().clone() for tensor in tensors]

    taken = state_after(0.0, 1.0)
    left_out = state_after(1.0, float("nan"))
    assert len(taken) == 8 and all(torch.equal(before, after) for before, after in zip(taken, left_out, strict=True))
    again = state_after(0.0, 1.0)
    assert not any(torch.equal(before, after) for before, after in zip(left_out, again, strict=True))


@needs_gpus(1)
def test_nf4_is_dequantized_as_on_a_cpu():
    """By bitsandbytes' kernel, if it is installed."""
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 96).unsqueeze(1)
    codes, scales = quantize(weight, "nf4"), find_scales(weight)
    choose_kernel(GPU)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(codes.to(GPU), scales.to(GPU), dtype).cpu(), dequantize(codes, scales, dtype))


@needs_gpus(2)
@pytest.mark.parametrize("preset", ["ddp", "fsdp2_full_shard", "fsdp2_offload"])
def test_gradients_go_over_nccl_and_decisions_over_gloo(preset):
    reports = run_on_ranks(report_backends, preset=preset, overrides={"num_processes": 2, "main_process_port": 0})
    for rank, report in enumerate(reports):
        assert "nccl" in report["backend"] and report["control"] == report["save"] == "gloo"
        assert report["device"] == f"cuda:{rank}" and report["sum"] == 3.0
        assert report["are_pinned"] == (preset == "fsdp2_offload")


def report_backends() -> dict:
    """On every rank: backends of its groups, its device, a sum over it, and whether its parameters lie in pinned host memory."""
    accelerator = build_accelerator()
    total = torch.full((), dist.get_rank() + 1.0, device=accelerator.device)
    dist.all_reduce(total)
    sharded = shard_model(accelerator, T5ForConditionalGeneration(T5Config(**T5_CONFIG)))
    return {
        "backend": dist.get_backend_config(),
        "control": dist.get_backend(control_group()),
        "save": dist.get_backend(build_group()),
        "device": str(accelerator.device),
        "sum": float(total),
        "are_pinned": all(local_tensor(parameter).is_pinned() for parameter in sharded.unwrapped.parameters()),
    }


@needs_gpus(1)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
def test_the_varlen_kernel_computes_what_a_dense_mask_does(family):
    """In bf16, with grouped queries, and with windows shorter than the documents."""
    found = []
    rows = build_rows(LENGTHS)
    for attention in ("sdpa", BY_DOCUMENT):
        model = build(family, attention).to(GPU, torch.bfloat16)
        batch = CausalCollator(0, one_row=attention == BY_DOCUMENT).collate([rows[:3], rows[3:]])
        loss, _ = summed_loss(model, move_to(GPU, batch))
        loss.backward()
        found.append((loss.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])))
    (expected, expected_gradients), (loss, gradients) = found
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    assert (gradients - expected_gradients).norm() <= 5e-2 * expected_gradients.norm()


@needs_gpus(1)
def test_a_step_does_not_wait_for_the_gpu(tmp_path):
    """torch raises where the host waits; what it reads without that is in `tests/distributed/test_host_reads.py`."""
    run_on_ranks(take_steps_without_waiting, preset="single", args=(tmp_path,), timeout_s=240)


WAITS_OF_OFFLOAD = {"graph.py", "_fsdp_collectives.py", "skip_guard.py"}
"""The host updates, so it waits for the gradients: FSDP2 adds up those of micro-batches there, within a backward, which passes
on the warnings of its threads (torch/autograd/graph.py), and `SkipGuard.should_skip` takes the loss to where they are."""


@needs_gpus(2)
@pytest.mark.parametrize(("preset", "waits"), [("fsdp2_full_shard", set()), ("fsdp2_offload", WAITS_OF_OFFLOAD)])
def test_a_sharded_step_waits_only_for_offloaded_gradients(preset, waits, tmp_path):
    two = {"num_processes": 2, "main_process_port": 0}
    run_on_ranks(take_steps_without_waiting, preset=preset, overrides=two, args=(tmp_path, waits), timeout_s=480)


def take_steps_without_waiting(folder: Path, waits: set[str] | None = None) -> None:
    accelerator = build_accelerator()
    for model in READS_OF_TRANSFORMERS:
        take_two_steps(build_run(model, accelerator, folder), (contextlib.nullcontext(), no_waiting(waits or set())))


@contextlib.contextmanager
def no_waiting(waits: set[str]) -> Iterator[None]:
    """Context in which the host waits for the GPU in no file but those of `waits`."""
    torch.cuda.set_sync_debug_mode("warn" if waits else "error")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = {Path(warning.filename).name for warning in caught if "synchronizing CUDA operation" in str(warning.message)}
    assert found <= waits, found


# --- Sharded loading onto GPUs and, under CPU offload, into pinned memory; `tests/distributed/test_weights.py` on CPU.


@needs_gpus(2)
@pytest.mark.parametrize("preset", ["fsdp2_full_shard", "fsdp2_offload"])
def test_shards_on_the_device_are_what_transformers_loads(tmp_path, preset):
    (tmp_path / "models").mkdir()
    on_cpu = {"mixed_precision": "no", "use_cpu": True}
    folders = run_on_ranks(build_folders, preset="single", overrides=on_cpu, args=(tmp_path / "models",))[0]
    found = run_on_ranks(load_both_ways, preset=preset, num_processes=2, args=(folders, HYBRID_CASES), timeout_s=240)
    for case in HYBRID_CASES:
        assert sum(sum(of_rank[case]["reads"]) for of_rank in found) == found[0][case]["num_parameters"]
        assert all(of_rank[case]["differing"] == dict.fromkeys(COMPARED, []) for of_rank in found)


# --- `fsdp2_fp8` on GPUs that multiply float8: real products, compiled blocks, nccl; `tests/distributed/test_float8_training.py`
# has the same checks on CPUs, where torchao emulates the products.

ON_GPUS = {"num_processes": 2}
RESUME_TOLERANCE = 1e-3
"""Of a loss: kernels that add in no fixed order may round a float8 weight to its neighbour."""


@needs_gpus(2, capability=(8, 9))
def test_linears_of_blocks_compute_in_float8_and_masters_stay_fp32():
    float8 = run_on_ranks(take_step, preset="fsdp2_fp8", overrides=ON_GPUS, timeout_s=300)[0]
    bf16 = run_on_ranks(take_step, preset=PRESET, overrides={**ON_GPUS, **BF16}, timeout_s=300)[0]
    check_step(float8, bf16)


@needs_gpus(2, capability=(8, 9))
def test_a_run_learns_as_in_bf16_resumes_and_exports_plain_weights(tmp_path):
    check_run(tmp_path, train_and_record_gradients, ON_GPUS, resume_tolerance=RESUME_TOLERANCE)
