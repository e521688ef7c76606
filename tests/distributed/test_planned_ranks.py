"""The plan of 2 processes against what real ones allocate, gathers and reductions over gloo included."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.adapter_models import with_adapter
from tests.support.launch import run_on_ranks, write_accelerate_yaml
from toolkit.launch.accelerator import build_accelerator, frozen_dtype
from toolkit.loss import scale_to_global_mean
from toolkit.models import load as models
from toolkit.models import lora as adapters
from toolkit.models.freeze import cast_frozen
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.parallel import wrap as sharding
from toolkit.parallel.units import local_tensor
from toolkit.tools.plan.plan import build_plan
from toolkit.tools.plan.strategy import Strategy
from toolkit.tools.plan.subject import build_batch, build_subject
from toolkit.training import optim

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 2048,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
ARGUMENTS = [
    "--data.source=not/read", "--data.max_length_tokens=128", "--train.num_epochs=1", "--train.micro_batch_size_rows=2",
    "--train.global_batch_size_rows=4",
]  # fmt: skip
BF16 = {"mixed_precision": "bf16"}
LORA = ["--adapter.method=lora", "--adapter.target_modules=all-linear", "--adapter.rank=8"]


def allocated(model_folder: str, arguments: list[str]) -> tuple[int, int]:
    """Most bytes of this rank in a training step with moments, and how much of it gloo's threads may have freed unseen."""
    accelerator = build_accelerator()
    strategy = Strategy(kind="fsdp2", num_shards=2, num_replicas=1, num_machines=1, compute_dtype=torch.bfloat16, is_cpu=True)
    subject = build_subject(model_folder, strategy, arguments, None)
    batch = build_batch(subject, rows=2)
    model = models.load_model(subject.config.model, subject.model_config, subject.objective, 0)
    if adapters.is_enabled(subject.config.adapter):
        model = with_adapter(model, subject.config.adapter, model_folder)
        cast_frozen(model, frozen_dtype(accelerator, "auto", has_adapter=True))
    model.set_attn_implementation(subject.skeleton.config._attn_implementation)
    checkpointing = subject.config.train.activation_checkpointing
    sharded = sharding.shard_model(accelerator, model.train(), checkpointing=checkpointing)
    optimizer = optim.build_optimizer(subject.config.optim, sharded.model)

    def take_step() -> None:
        scale_to_global_mean(summed_loss(sharded.model, batch)[0], 1, 1).backward()
        optim.clip_gradients(sharded.model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(2):
        take_step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    inputs = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    at_rest = [local_tensor(t) for t in (*sharded.model.parameters(), *sharded.model.buffers(), *inputs, *moments)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in at_rest}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        take_step()
    now = highest = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        highest = max(highest, now)
    return sum(storages.values()) + highest, now


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({"fsdp_config": {"fsdp_reshard_after_forward": False}}, []),
        (BF16 | {"fsdp_config": {"fsdp_activation_checkpointing": True}}, LORA),
        (BF16, ["--train.activation_checkpointing=selective"]),
    ],
    ids=["fp32-shard-grad-op", "lora-checkpointing", "selective"],
)
def test_a_rank_allocates_what_is_planned(changes, arguments, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    has_base = arguments == LORA
    if has_base:
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    arguments = [*ARGUMENTS, *arguments, f"--model.from_scratch={str(not has_base).lower()}"]
    preset, _ = write_accelerate_yaml(tmp_path, "fsdp2_cpu", changes)
    planned = build_plan(str(tmp_path), preset, 2, arguments, None, 80.0, searches=False).total
    for measured, unseen in run_on_ranks(allocated, preset=preset, args=(str(tmp_path), arguments)):
        assert 0.99 * (measured - unseen) <= planned <= 1.01 * measured
