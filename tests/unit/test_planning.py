"""The planner against closed forms, against memory that is really allocated, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from toolkit import causal_loss, models
from toolkit.errors import UserError
from toolkit.losses import summed_loss
from toolkit.planning.peak import OPTIMIZER, estimate_peak, trace_rank
from toolkit.planning.plan import Plan, build_plan
from toolkit.planning.report import plan_as_dict, plan_as_text
from toolkit.planning.strategy import Strategy, load_strategy
from toolkit.planning.subject import build_batch, build_subject
from toolkit.planning.trace import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    SHARDED_PARAMETERS,
    UNSHARDED,
    Bytes,
    Trace,
    fake_ranks,
)

PRESETS = Path(__file__).parents[2] / "accelerate_configs"
HIDDEN, INNER, VOCAB, LAYERS, HEADS = 256, 512, 2048, 7, 4
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": HIDDEN, "d_kv": 64, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS,
    "vocab_size": VOCAB, "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BLOCK = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
NUM_PARAMETERS = LAYERS * BLOCK + 2 * VOCAB * HIDDEN + HIDDEN
UNPACKED = ["--data.max_length_tokens=256", "--data.packing=false"]
LORA = ["--adapter.method=lora", "--adapter.rank=8", "--adapter.target_modules=[q_proj]"]
NUM_LORA = LAYERS * 2 * 8 * HIDDEN
FSDP2 = Strategy(kind="fsdp2", num_shards=4, num_replicas=1, num_machines=1, compute_dtype=torch.bfloat16)
SINGLE = Strategy(kind="single", num_shards=1, num_replicas=1, num_machines=1, compute_dtype=torch.float32)

Folder = Callable[[dict], str]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A model folder with a config alone."""

    def save(settings: dict) -> str:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
        return str(tmp_path / "model")

    return save


def trace(model: str, strategy: Strategy, arguments: list[str], rows: int = 1) -> Trace:
    subject = build_subject(model, strategy, arguments, None)
    with fake_ranks(strategy.num_processes):
        return trace_rank(subject, strategy, subject.skeleton, rows)[0]


def highest(traced: Trace, kind: str) -> int:
    return max(peak[kind] for peak in traced.peaks)


def plan(model: str, preset: str, num_processes: int, *arguments: str, gib: float = 0.2) -> Plan:
    return build_plan(model, PRESETS / f"{preset}.yaml", num_processes, list(arguments), None, gib)


@pytest.mark.parametrize("num_shards", [4, 8])
def test_parameters_gradients_and_moments_are_shared_out(folder: Folder, num_shards: int) -> None:
    traced = trace(folder(LLAMA), dataclasses.replace(FSDP2, num_shards=num_shards), UNPACKED)
    share = NUM_PARAMETERS * 4 / num_shards
    # Weights of 256 elements take more than their share: the allocator's 512 bytes are the least.
    assert traced.peak[SHARDED_PARAMETERS] == pytest.approx(share, rel=0.005)
    assert traced.peaks[-1][GRADIENTS] == pytest.approx(share, rel=0.005)
    assert traced.peak[OPTIMIZER] == pytest.approx(2 * share, rel=1e-6)


def test_every_block_is_gathered_twice_and_the_root_once(folder: Folder) -> None:
    traced = trace(folder(LLAMA), FSDP2, UNPACKED)
    root = NUM_PARAMETERS - LAYERS * BLOCK
    # torch keeps the last block gathered no longer than the others, and the root from its forward to its backward.
    assert traced.gathered_bytes == pytest.approx(2 * (2 * LAYERS * BLOCK + root), rel=0.001)
    assert traced.reduced_bytes == pytest.approx(4 * NUM_PARAMETERS, rel=0.001)
    assert traced.largest_gather_bytes == pytest.approx(2 * root, rel=0.001)
    kept = trace(folder(LLAMA), dataclasses.replace(FSDP2, reshard_after_forward=False), UNPACKED)
    assert kept.gathered_bytes == pytest.approx(2 * NUM_PARAMETERS, rel=0.001)
    assert highest(kept, UNSHARDED) == pytest.approx(2 * NUM_PARAMETERS, rel=0.001)


def test_doubling_the_sequence_doubles_activations_alone(folder: Folder) -> None:
    short = trace(folder(LLAMA), FSDP2, UNPACKED)
    long = trace(folder(LLAMA), FSDP2, ["--data.max_length_tokens=512", "--data.packing=false"])
    assert highest(long, ACTIVATIONS) == pytest.approx(2 * highest(short, ACTIVATIONS), rel=0.02)
    assert long.peak[SHARDED_PARAMETERS] == short.peak[SHARDED_PARAMETERS]
    assert long.gathered_bytes == short.gathered_bytes


def test_packed_rows_keep_a_mask_in_every_block_but_with_flash_attention(folder: Folder) -> None:
    unpacked = trace(folder(LLAMA), FSDP2, UNPACKED)
    packed = trace(folder(LLAMA), FSDP2, UNPACKED[:1])
    flash = trace(folder(LLAMA), FSDP2, [*UNPACKED[:1], "--model.attn_implementation=flash_attention_2"])
    masks = LAYERS * 256 * 256 * 2
    assert highest(packed, ACTIVATIONS) - highest(unpacked, ACTIVATIONS) == pytest.approx(masks, rel=0.01)
    assert flash.peak == unpacked.peak


def test_checkpointing_keeps_a_block_s_input_alone(folder: Folder) -> None:
    model = folder(LLAMA)
    whole = trace(model, FSDP2, UNPACKED)
    checkpointed = trace(model, dataclasses.replace(FSDP2, activation_checkpointing=True), UNPACKED)
    # Forward's end, before the loss: the inputs of all blocks, and what one block and the last norm need.
    a_block = highest(whole, ACTIVATIONS) / LAYERS
    assert highest(checkpointed, ACTIVATIONS) <= 256 * HIDDEN * 2 * LAYERS + 2 * a_block
    assert highest(checkpointed, ACTIVATIONS) >= 256 * HIDDEN * 2 * LAYERS
    assert checkpointed.peak[OPTIMIZER] == whole.peak[OPTIMIZER]


def test_an_adapter_leaves_a_frozen_bf16_base(folder: Folder) -> None:
    traced = trace(folder(LLAMA), FSDP2, [*UNPACKED, *LORA])
    assert traced.peak[SHARDED_PARAMETERS] == pytest.approx((NUM_PARAMETERS * 2 + NUM_LORA * 4) / 4, rel=0.01)
    assert traced.peak[OPTIMIZER] == NUM_LORA * 8 // 4
    assert traced.peaks[-1][GRADIENTS] == NUM_LORA * 4 // 4


def test_whole_logits_are_kept_as_bf16_and_as_fp32(folder: Folder) -> None:
    lengths = ["--data.max_source_length_tokens=64", "--data.max_target_length_tokens=128"]
    traced = trace(folder(T5), FSDP2, lengths, rows=3)
    # At the loss: logits, their fp32 copy, its log-softmax, and on the way back the gradient of the last.
    logits = 3 * 128 * VOCAB
    assert highest(traced, LOGITS) == logits * (4 + 4 + 4)


def test_chunked_logits_do_not_grow_beyond_a_chunk(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 16384
    monkeypatch.setattr(causal_loss, "MAX_LOGITS_AT_ONCE", 128 * vocab_size)
    model = folder(LLAMA | {"vocab_size": vocab_size})
    short = trace(model, FSDP2, UNPACKED)
    long = trace(model, FSDP2, ["--data.max_length_tokens=1024", "--data.packing=false"])
    assert 0 < highest(long, LOGITS) <= 128 * vocab_size * 12
    assert highest(long, LOGITS) == pytest.approx(highest(short, LOGITS), rel=0.02)


def test_gradients_are_there_from_the_start_where_they_accumulate(folder: Folder) -> None:
    arguments = [*UNPACKED, "--train.global_batch_size_rows=8", "--train.micro_batch_size_rows=1"]
    traced = trace(folder(LLAMA), FSDP2, arguments)
    assert traced.peaks[0][GRADIENTS] == pytest.approx(NUM_PARAMETERS, rel=0.005)


@pytest.mark.parametrize("settings", [LLAMA, T5], ids=["llama", "t5"])
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_few_blocks_tell_of_many(folder: Folder, settings: dict, kind: str) -> None:
    shards = 4 if kind == "fsdp2" else 1
    strategy = dataclasses.replace(FSDP2, kind=kind, num_shards=shards, num_replicas=4 // shards)
    arguments = UNPACKED if settings is LLAMA else []
    subject = build_subject(folder(settings), strategy, arguments, None)
    with fake_ranks(4):
        whole, _ = trace_rank(subject, strategy, subject.skeleton, rows=4)
        assert estimate_peak(subject, strategy, rows=4) == pytest.approx(sum(whole.peak.values()), rel=0.001)


@pytest.mark.parametrize("settings", [LLAMA, T5], ids=["llama", "t5"])
def test_the_trace_is_what_a_real_micro_batch_allocates(folder: Folder, settings: dict) -> None:
    arguments = ["--model.attn_implementation=eager", "--model.from_scratch=true", *(UNPACKED if settings is LLAMA else [])]
    subject = build_subject(folder(settings), SINGLE, arguments, None)
    with fake_ranks(1):
        traced, _ = trace_rank(subject, SINGLE, subject.skeleton, rows=2)
    auto_class = "AutoModelForCausalLM" if settings is LLAMA else "AutoModelForSeq2SeqLM"
    model = models.load_model(subject.config.model, subject.model_config, auto_class, seed=0).train()
    causal_loss.install(model)
    batch = build_batch(subject, rows=2)
    at_start = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *batch.values()))
    expected = at_start + _allocated_peak(model, batch)
    assert sum(traced.peak.values()) - traced.peak[OPTIMIZER] == pytest.approx(expected, rel=0.002)


def _allocated_peak(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Most bytes beyond those there before, as the CPU's allocator reports them, in a forward and backward."""
    summed_loss(model, batch)[0].backward()  # lazily made things
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        summed_loss(model, batch)[0].backward()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now)
    return peak


def test_ddp_has_buckets_beside_whole_gradients(folder: Folder) -> None:
    planned = plan(folder(LLAMA), "ddp", 4, *UNPACKED)
    assert planned.device[SHARDED_PARAMETERS] == pytest.approx(NUM_PARAMETERS * 4, rel=0.001)
    assert planned.device[GATHERED] == NUM_PARAMETERS * 4
    assert planned.device[OPTIMIZER] == NUM_PARAMETERS * 8
    assert planned.moved["all-reduce"] == pytest.approx(2 * NUM_PARAMETERS * 4 * 3 / 4, rel=1e-6)
    assert any("derived" in note for note in planned.notes)


def test_fsdp1_s_flat_gradient_covers_the_frozen_base_and_is_said_to_be_derived(folder: Folder) -> None:
    model = folder(LLAMA)
    planned = plan(model, "fsdp1_full_shard", 4, *UNPACKED, *LORA)
    assert planned.device[SHARDED_PARAMETERS] == pytest.approx((NUM_PARAMETERS + NUM_LORA) * 4 / 4, rel=0.01)  # fp32 base
    traced = trace(model, dataclasses.replace(FSDP2, kind="fsdp1"), [*UNPACKED, *LORA])
    assert traced.peaks[-1][GRADIENTS] == pytest.approx(LAYERS * BLOCK * 4 / 4 + NUM_LORA * 4 / 4, rel=0.01)
    assert any("derived" in note for note in planned.notes)


def test_offloaded_shards_are_the_host_s(folder: Folder) -> None:
    planned = plan(folder(LLAMA), "fsdp2_offload", 4, *UNPACKED)
    assert planned.device[SHARDED_PARAMETERS] == planned.device[GRADIENTS] == planned.device[OPTIMIZER] == 0
    assert planned.device[UNSHARDED] > 0
    assert planned.host["offloaded shards"] == pytest.approx(NUM_PARAMETERS * 16 / 4, rel=0.001)


def test_hybrid_shards_are_reduced_over_the_replicas_too(folder: Folder, tmp_path: Path) -> None:
    text = (PRESETS / "fsdp2_full_shard.yaml").read_text()
    preset = tmp_path / "hsdp.yaml"
    mesh = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n"
    preset.write_text(text + mesh)
    planned = build_plan(folder(LLAMA), preset, 8, UNPACKED, None, 0.2)
    assert planned.device[SHARDED_PARAMETERS] == pytest.approx(NUM_PARAMETERS, rel=0.005)
    assert planned.moved["all-reduce"] == pytest.approx(2 * NUM_PARAMETERS * 4 / 4 / 2, rel=0.01)
    with pytest.raises(UserError, match=r"dp_replicate_size 2 x dp_shard_size 4 = 8 ranks"):
        load_strategy(preset, 6)


def test_verdict_names_the_largest_micro_batch_and_the_cheapest_change(folder: Folder) -> None:
    model = folder(LLAMA)
    roomy = plan(model, "fsdp2_full_shard", 4, *UNPACKED)
    gib = roomy.total / 2**30 / 0.92
    exact = plan(model, "fsdp2_full_shard", 4, *UNPACKED, gib=gib * 1.001)
    assert exact.fits and exact.largest_micro_batch_rows == 1 and exact.change is None
    tight = plan(model, "fsdp2_full_shard", 4, *UNPACKED, gib=gib * 0.98)
    assert not tight.fits and tight.largest_micro_batch_rows == 0
    assert tight.change == "fsdp_activation_checkpointing: true"
    assert "DOES NOT FIT" in plan_as_text(tight) and "fsdp_activation_checkpointing: true" in plan_as_text(tight)
    hopeless = plan(model, "fsdp2_full_shard", 4, *UNPACKED, gib=0.001)
    assert hopeless.change is None and "no change" in plan_as_text(hopeless)


def test_units_and_ties_are_listed_and_json_has_all(folder: Folder) -> None:
    planned = plan(folder(LLAMA | {"tie_word_embeddings": True}), "fsdp2_full_shard", 4, *UNPACKED)
    described = json.loads(json.dumps(plan_as_dict(planned)))
    assert [unit["count"] for unit in described["units"]] == [LAYERS, 1]
    assert described["units"][0]["parameters"] == BLOCK
    assert described["tied"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert described["checkpoint_bytes"] == {
        "trainable parameters": (NUM_PARAMETERS - VOCAB * HIDDEN) * 4,
        OPTIMIZER: (NUM_PARAMETERS - VOCAB * HIDDEN) * 8,
    }
    assert described["device_bytes_total"] == sum(described["device_bytes"].values())


def test_bad_input_is_told_in_a_sentence(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere is not a folder here"):
        plan("./nowhere", "fsdp2_full_shard", 4)
    with pytest.raises(UserError, match=r"could not be read"):
        plan(folder({"layers": 3}), "fsdp2_full_shard", 4)
    with pytest.raises(UserError, match=r"distributed_type NO, which starts 1"):
        plan(folder(LLAMA), "single", 4)
    with pytest.raises(UserError, match=r"--num-processes is 0"):
        plan(folder(LLAMA), "single", 0)
    with pytest.raises(UserError, match=r"max_length_tokens to at most 1024"):
        plan(folder(LLAMA), "fsdp2_full_shard", 4, "--data.max_length_tokens=4096")
    preset = tmp_path / "wrap.yaml"
    text = (PRESETS / "fsdp2_full_shard.yaml").read_text()
    preset.write_text(text.replace("fsdp_config:\n", "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: T6Block\n"))
    with pytest.raises(UserError, match=r"names T6Block, which is not in .* LlamaDecoderLayer"):
        build_plan(folder(LLAMA), preset, 4, UNPACKED, None, 0.2)
    preset.write_text(text.replace("num_machines: 1", "num_machines: 4\nmain_process_ip: a").replace("port: 0", "port: 2950"))
    with pytest.raises(UserError, match=r"cannot spread evenly over its num_machines 4"):
        load_strategy(preset, 6)


def test_bytes_add_up(folder: Folder) -> None:
    planned = plan(folder(T5), "fsdp2_shard_grad_op", 4)
    by_kind: Bytes = planned.device
    assert planned.total == sum(by_kind.values()) and min(by_kind.values()) >= 0
