"""The planner against closed forms, against memory that is really allocated, and what it refuses."""

import dataclasses
import functools
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.support.launch import REPOSITORY
from tests.support.model_folders import MIXTURES
from tests.support.refusals import refusal
from tests.support.workbench import call_toolkit
from toolkit.models import load as models
from toolkit.models.patches import chunked_loss, masks
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.models.tensor_reader import PIECE_BYTES
from toolkit.parallel.compute_copies import ComputeCopies
from toolkit.parallel.units import describe_units, repeated_blocks
from toolkit.tools.plan.plan import Plan, _notes, build_plan, plan_as_dict, plan_as_text
from toolkit.tools.plan.search import estimate_peak
from toolkit.tools.plan.strategy import Strategy, load_strategy
from toolkit.tools.plan.subject import OPTIMIZER, Subject, build_batch, build_subject, trace_rank
from toolkit.tools.plan.trace import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS,
    SHARDED_PARAMETERS,
    TEMPORARIES,
    UNSHARDED,
    UNSHARDED_GRADIENTS,
    Trace,
    fake_ranks,
)

PRESETS = REPOSITORY / "accelerate_configs"
RUN_YAML = f"--config={REPOSITORY}/recipes/configs/llm_chat_lora.yaml"
HIDDEN, INNER, VOCAB, LAYERS, HEADS = 256, 512, 2048, 2, 4
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": HIDDEN, "d_kv": 64, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS,
    "vocab_size": VOCAB, "dropout_rate": 0.1, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BART = {
    "model_type": "bart", "d_model": HIDDEN, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
GPT1 = {"model_type": "openai-gpt", "n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 1024}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
BLOCK = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
END = VOCAB * HIDDEN
"""The embedding, and the head: units of their own, where they are not tied."""
NUM_PARAMETERS = LAYERS * BLOCK + 2 * END + HIDDEN
TOKENS = 256
UNPACKED = (f"--data.max_length_tokens={TOKENS}", "--data.packing=false")
SDPA = "--model.attn_implementation=sdpa"
LORA = ("--adapter.method=lora", "--adapter.rank=8", "--adapter.target_modules=[q_proj]")
IN_BF16 = ("--model.trained_dtype=bfloat16_stochastic", "--optim.name=lion")
NUM_LORA = LAYERS * 2 * 8 * HIDDEN
QWEN_MOE = MIXTURES["qwen3_moe"][1] | {"model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": HIDDEN}
QWEN_MOE |= {"moe_intermediate_size": 128, "max_position_embeddings": TOKENS}
EXPERTS_LORA = (*UNPACKED, *LORA[:2], "--adapter.experts=true", "--adapter.target_modules=[]")
FSDP2 = Strategy(kind="fsdp2", num_shards=4, num_replicas=1, num_machines=1, compute_dtype=torch.bfloat16)
ALONE = dataclasses.replace(FSDP2, kind="single", num_shards=1)
with_ = functools.partial(dataclasses.replace, FSDP2)

FOLDERS = tempfile.TemporaryDirectory(prefix="planned-")


def model_folder(settings: dict) -> str:
    """A model folder with a config alone, the same for the same settings."""
    text = json.dumps(settings)
    path = Path(FOLDERS.name, hashlib.sha256(text.encode()).hexdigest())
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(text)
    return str(path)


@functools.cache
def _subject(model: str, strategy: Strategy, arguments: tuple[str, ...]) -> Subject:
    return build_subject(model, strategy, list(arguments), None)


@functools.cache
def _trace(model: str, strategy: Strategy, arguments: tuple[str, ...], rows: int) -> Trace:
    subject = _subject(model, strategy, arguments)
    with fake_ranks(strategy.num_processes):
        return trace_rank(subject, strategy, subject.skeleton, rows)[0]


def trace(settings: dict, strategy: Strategy, arguments: tuple[str, ...], rows: int = 1) -> Trace:
    """One that several tests look at is made once."""
    return _trace(model_folder(settings), strategy, arguments, rows)


def highest(traced: Trace, kind: str) -> int:
    return max(peak[kind] for peak in traced.peaks)


def at_the_end(traced: Trace) -> dict[str, int]:
    return {kind: traced.peaks[-1][kind] for kind in (SHARDED_PARAMETERS, GRADIENTS, OPTIMIZER)}


def plan(
    settings: dict, preset: str | Path, num_processes: int, *arguments: str, gib: float = 0.2, searches: bool = False
) -> Plan:
    path = preset if isinstance(preset, Path) else PRESETS / f"{preset}.yaml"
    return build_plan(model_folder(settings), path, num_processes, list(arguments), None, gib, searches=searches)


@pytest.fixture
def edited(tmp_path) -> Iterator:
    """A preset with some of its text replaced."""

    def save(preset: str, old: str, new: str) -> Path:
        text = (PRESETS / f"{preset}.yaml").read_text()
        assert old in text
        (tmp_path / f"{preset}.yaml").write_text(text.replace(old, new))
        return tmp_path / f"{preset}.yaml"

    return save


@pytest.mark.parametrize("num_shards", [4, 8])
def test_ranks_share_parameters_gradients_and_moments_and_nothing_else(num_shards):
    traced, share = trace(LLAMA, with_(num_shards=num_shards), UNPACKED), NUM_PARAMETERS * 4 / num_shards
    # Weights of 256 elements take more than their share: the allocator's 512 bytes are the least.
    assert at_the_end(traced) == pytest.approx({SHARDED_PARAMETERS: share, GRADIENTS: share, OPTIMIZER: 2 * share}, rel=0.005)
    assert traced.peak[OPTIMIZER] == 2 * share
    fewer = trace(LLAMA, FSDP2, UNPACKED)
    for kind in (ACTIVATIONS, LOGITS, UNSHARDED):
        assert highest(traced, kind) == highest(fewer, kind)
    # A row's first token has no label. Logits in bf16 and fp32, then fp32 and log-softmax, then with the gradient of that.
    assert highest(fewer, LOGITS) == pytest.approx((TOKENS - 1) * VOCAB * 12, rel=0.01)
    # Gradients are there from the start where they accumulate.
    batch = ("--train.global_batch_size_rows=8", "--train.micro_batch_size_rows=1")
    assert trace(LLAMA, FSDP2, (*UNPACKED, *batch)).peaks[0][GRADIENTS] == pytest.approx(NUM_PARAMETERS, rel=0.005)
    assert fewer.peaks[0][GRADIENTS] == 0


@pytest.mark.parametrize(("num_shards", "remark"), [(3, ""), (4, ", each expert cut by rows"), (7, "")])
def test_experts_that_ranks_cannot_share_evenly_are_cut_by_rows(num_shards, remark):
    """6 on 4 ranks: with whole experts, two ranks would hold a quarter less, and the first ones a third more than their share."""
    strategy = with_(num_shards=num_shards)
    subject = _subject(model_folder(MIXTRAL), strategy, UNPACKED)
    with fake_ranks(num_shards):
        traced, sharded = trace_rank(subject, strategy, subject.skeleton, 1)
        units = describe_units(sharded.units)
    assert {unit["unit"]: unit["count"] for unit in units}[f"MixtralDecoderLayer{remark}"] == LAYERS
    if num_shards < 7:
        size = sum(p.numel() for p in subject.skeleton.parameters())
        assert traced.peak[SHARDED_PARAMETERS] == pytest.approx(4 * size / num_shards, rel=0.005)


def test_every_block_and_the_embedding_are_gathered_twice_and_the_head_once():
    traced = trace(LLAMA, FSDP2, UNPACKED)
    # torch keeps the last block gathered no longer than the others; the head stays from its forward to its backward.
    assert traced.gathered_bytes == pytest.approx(2 * (2 * LAYERS * BLOCK + 3 * END), rel=0.001)
    assert highest(traced, UNSHARDED) <= 2 * (END + 2 * BLOCK) * 1.001, "embedding and head are not there at the same time"
    assert traced.reduced_bytes == pytest.approx(4 * NUM_PARAMETERS, rel=0.001)
    assert traced.largest_gather_bytes == pytest.approx(2 * max(BLOCK, END), rel=0.001)
    kept = trace(LLAMA, with_(reshard_after_forward=False), UNPACKED)
    assert kept.gathered_bytes == pytest.approx(2 * NUM_PARAMETERS, rel=0.001)
    assert highest(kept, UNSHARDED) == pytest.approx(2 * NUM_PARAMETERS, rel=0.001)
    # A unit's gradients are whole in bf16 until they are reduced.
    assert highest(traced, UNSHARDED_GRADIENTS) <= 2 * (END + BLOCK) * 1.001


def test_packed_rows_keep_a_mask_in_every_block_where_they_are_not_attended_to_by_document(edited):
    dense = (*UNPACKED[:1], SDPA)
    unpacked, packed, by_document = (trace(LLAMA, FSDP2, arguments) for arguments in (UNPACKED, dense, UNPACKED[:1]))
    for kind in (ACTIVATIONS, TEMPORARIES):
        assert highest(by_document, kind) == pytest.approx(highest(unpacked, kind), rel=0.001)
    masks = LAYERS * TOKENS * TOKENS * 2
    # And the one of booleans that they are made from.
    assert highest(packed, ACTIVATIONS) - highest(unpacked, ACTIVATIONS) == pytest.approx(masks, abs=TOKENS * TOKENS)
    for attention in ("flash_attention_2", "flex_attention"):
        assert trace(LLAMA, FSDP2, (*UNPACKED[:1], f"--model.attn_implementation={attention}")).peak == unpacked.peak
    # A note says why.
    one_graph = edited("fsdp2_compile", "dynamo_config:", "dynamo_config:\n  dynamo_use_fullgraph: true")
    named = plan(LLAMA, "fsdp2_full_shard", 4, *dense)
    for planned, reason in ((named, "model.attn_implementation is sdpa"), (plan(LLAMA, one_graph, 4, UNPACKED[0]), "dynamo_use")):
        assert f"keeps packed rows apart by a dense mask, because {reason}" in plan_as_text(planned)
    assert "dense mask" not in plan_as_text(plan(LLAMA, "fsdp2_full_shard", 4, UNPACKED[0]))


def test_checkpointing_keeps_a_block_s_input_alone():
    whole, selective, checkpointed = (
        trace(LLAMA, with_(activation_checkpointing=mode), UNPACKED) for mode in ("none", "selective", "full")
    )
    # Forward's end, before the loss: the inputs of all blocks, and what one block and the last norm need.
    a_block = highest(whole, ACTIVATIONS) / LAYERS
    inputs = TOKENS * HIDDEN * 2 * LAYERS
    assert inputs <= highest(checkpointed, ACTIVATIONS) <= inputs + 2 * a_block
    # Selective: the results of seven products too, and of attention with the sums of its scores.
    products = TOKENS * LAYERS * (2 * (6 * HIDDEN + 2 * INNER) + 4 * HEADS)
    assert inputs + products <= highest(selective, ACTIVATIONS) <= inputs + products + a_block / 2 < highest(whole, ACTIVATIONS)
    assert at_the_end(checkpointed) == at_the_end(selective) == at_the_end(whole)
    assert highest(checkpointed, LOGITS) == highest(whole, LOGITS)
    assert (checkpointed.gathered_bytes, checkpointed.reduced_bytes) == (whole.gathered_bytes, whole.reduced_bytes)


def test_one_process_recomputes_too_and_attention_that_draws_dropout_is_not_kept():
    def kept(settings: dict, mode, *arguments: str) -> int:
        return highest(trace(settings, dataclasses.replace(ALONE, activation_checkpointing=mode), arguments), ACTIVATIONS)

    assert kept(LLAMA, "full", *UNPACKED) < kept(LLAMA, "selective", *UNPACKED) < kept(LLAMA, "none", *UNPACKED)
    # An adapter's second matrices are computed again: each would be kept beside what it is added to.
    adapted = (*UNPACKED, "--adapter.method=lora", "--adapter.rank=8", "--adapter.target_modules=all-linear")
    assert kept(LLAMA, "selective", *adapted) < 1.05 * kept(LLAMA, "selective", *UNPACKED)
    drawn, undrawn = (kept(T5, "selective", f"--model.dropout={rate}") for rate in (0.1, 0.0))
    assert kept(T5, "full") < drawn < undrawn


@pytest.mark.parametrize(("rows", "gradient_bytes"), [(4, 2), (1, 4)])
def test_weights_in_bf16_take_half_and_gradients_add_up_in_fp32(rows, gradient_bytes):
    batch = ("--train.global_batch_size_rows=4", f"--train.micro_batch_size_rows={rows}", "--train.num_epochs=1")
    arguments = (*UNPACKED, *IN_BF16, *batch)
    held = at_the_end(trace(LLAMA, ALONE, arguments, rows))
    bytes_each = {SHARDED_PARAMETERS: 2, GRADIENTS: gradient_bytes, OPTIMIZER: 4}
    assert held == pytest.approx({kind: each * NUM_PARAMETERS for kind, each in bytes_each.items()}, rel=0.005)
    planned = plan(LLAMA, "single", 1, *arguments)
    assert planned.checkpoint_bytes["trainable parameters"] == 2 * NUM_PARAMETERS


def test_an_adapter_leaves_a_frozen_bf16_base_without_gradients_and_moments():
    traced = trace(LLAMA, FSDP2, (*UNPACKED, *LORA))
    assert traced.peak[SHARDED_PARAMETERS] == pytest.approx((NUM_PARAMETERS * 2 + NUM_LORA * 4) / 4, rel=0.01)
    assert traced.peak[OPTIMIZER] == NUM_LORA * 8 // 4
    assert traced.peaks[-1][GRADIENTS] == NUM_LORA * 4 // 4
    assert traced.reduced_bytes == 4 * NUM_LORA
    # Every unit but the root's frozen rest goes through the backward again.
    assert traced.gathered_bytes == pytest.approx(2 * (2 * (LAYERS * BLOCK + NUM_LORA) + 2 * END), rel=0.002)


@pytest.mark.parametrize(
    ("model", "limit", "other"),
    [(LLAMA, "max_length", "packing=false"), (T5, "max_target_length", "max_source_length_tokens=64")],
    ids=["llama", "t5"],
)
def test_chunked_logits_do_not_grow_beyond_a_chunk(model, limit, other, monkeypatch):
    vocab_size = 16384
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS_AT_ONCE", 128 * vocab_size)
    lengths = ((f"--data.{limit}_tokens={num}", f"--data.{other}") for num in (256, 1024))
    short, long = (trace(model | {"vocab_size": vocab_size}, FSDP2, length) for length in lengths)
    assert 0 < highest(long, LOGITS) <= 128 * vocab_size * 12
    assert highest(long, LOGITS) == pytest.approx(highest(short, LOGITS), rel=0.02)


@pytest.mark.parametrize(
    ("settings", "num_shards", "arguments"),
    [
        (T5 | {"num_layers": 1}, 4, ()),
        (BART, 4, ()),
        (GPT1, 4, ()),
        (LLAMA, 4, (*UNPACKED, "--adapter.method=dora", *LORA[1:])),
        (QWEN_MOE, 2, EXPERTS_LORA),
        (QWEN_MOE, 4, EXPERTS_LORA),  # each of 6 experts is cut by rows
    ],
    ids=["t5", "bart", "gpt1", "dora", "whole-experts", "experts"],
)
def test_every_family_is_sharded_by_what_trains(settings, num_shards, arguments):
    strategy = with_(num_shards=num_shards)
    traced = trace(settings, strategy, arguments)
    parameters = list(_subject(model_folder(settings), strategy, arguments).skeleton.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    rounded = 512 * len(parameters)
    assert traced.peak[SHARDED_PARAMETERS] == pytest.approx(sum(p.nbytes for p in parameters) / num_shards, rel=0.01)
    assert traced.peak[OPTIMIZER] == pytest.approx(8 * trainable / num_shards, rel=0.002)
    assert traced.peaks[-1][GRADIENTS] == pytest.approx(4 * trainable / num_shards, rel=0.01, abs=rounded)
    assert traced.reduced_bytes == pytest.approx(4 * trainable, rel=0.01)


@pytest.mark.parametrize(("settings", "kind"), [(LLAMA, "fsdp2"), (T5, "fsdp2"), (LLAMA, "ddp")], ids=["llama", "t5", "ddp"])
def test_few_blocks_tell_of_many(settings, kind):
    deep = settings | {"num_hidden_layers" if settings is LLAMA else "num_layers": 5}
    strategy = with_(kind=kind, num_shards=4 if kind == "fsdp2" else 1, num_replicas=1 if kind == "fsdp2" else 4)
    arguments = UNPACKED if settings is LLAMA else ()
    whole = trace(deep, strategy, arguments, rows=4)
    with fake_ranks(4):
        estimated = estimate_peak(_subject(model_folder(deep), strategy, arguments), strategy, rows=4)
    assert estimated == pytest.approx(sum(whole.peak.values()), rel=0.001)


@pytest.mark.parametrize(
    ("settings", "attention", "dtype", "is_cpu", "rows"),
    [
        (LLAMA, "sdpa", torch.bfloat16, False, (*UNPACKED, SDPA)),  # fused kernels of the CPU keep what CUDA's do
        (LLAMA, "documents", torch.bfloat16, True, UNPACKED[:1]),
        (MIXTRAL, "sdpa", torch.float32, True, (*UNPACKED, SDPA)),
        (T5, "sdpa", torch.bfloat16, True, ("--data.max_source_length_tokens=96", "--data.max_target_length_tokens=32", SDPA)),
    ],
    ids=["sdpa-cuda", "packed", "experts", "t5"],
)
def test_the_trace_is_what_a_real_micro_batch_allocates(settings, attention, dtype, is_cpu, rows, request):
    strategy = dataclasses.replace(ALONE, compute_dtype=dtype, is_cpu=is_cpu)
    is_packed = attention == "documents"
    arguments = ("--model.from_scratch=true", *rows)
    traced = trace(settings, strategy, arguments, rows=2)
    subject = _subject(model_folder(settings), strategy, arguments)
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    model = models.load_model(subject.config.model, subject.model_config, subject.objective, seed=0).train()
    model.set_attn_implementation(attention)
    chunked_loss.install(model)
    masks.install(model)
    batch = build_batch(subject, rows=2)
    assert (batch.get("position_ids") is not None, "document_lengths" in batch) == (is_packed, is_packed)
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    at_start = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *tensors))
    expected = at_start + _allocated_peak(model, batch, dtype)
    assert sum(traced.peak.values()) - traced.peak[OPTIMIZER] == pytest.approx(expected, rel=0.002)


def _allocated_peak(model: torch.nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> int:
    """Most bytes beyond those there before, as the CPU's allocator reports them, in a forward and backward."""
    copies = ComputeCopies(model, repeated_blocks(model).values(), dtype)

    def step() -> None:
        with copies.held():
            summed_loss(model, batch)[0].backward()

    step()  # lazily made things
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now)
    return peak


def test_ddp_and_fsdp1_are_derived():
    """DDP holds whole gradients in its buckets; FSDP1's flat gradient covers the frozen base."""
    planned = plan(LLAMA, "ddp", 4, *UNPACKED)
    assert planned.device_bytes[SHARDED_PARAMETERS] == pytest.approx(NUM_PARAMETERS * 4, rel=0.001)
    assert planned.device_bytes[GRADIENTS] == NUM_PARAMETERS * 4
    assert planned.device_bytes[OPTIMIZER] == NUM_PARAMETERS * 8
    assert planned.moved_bytes["all-reduce"] == pytest.approx(2 * NUM_PARAMETERS * 4 * 3 / 4, rel=1e-6)
    assert any("DDP: derived" in note for note in planned.notes)
    alone = plan(LLAMA, "single", 1, *UNPACKED)
    assert alone.total < planned.total <= alone.total + NUM_PARAMETERS * 4  # there, gradients come during the backward
    assert sum(alone.moved_bytes.values()) == 0
    planned = plan(LLAMA, "fsdp1_full_shard", 4, *UNPACKED, *LORA)
    assert planned.device_bytes[SHARDED_PARAMETERS] == pytest.approx((NUM_PARAMETERS + NUM_LORA) * 4 / 4, rel=0.01)  # fp32 base
    traced = trace(LLAMA, with_(kind="fsdp1"), (*UNPACKED, *LORA))
    assert traced.peaks[-1][GRADIENTS] == pytest.approx(LAYERS * BLOCK * 4 / 4 + NUM_LORA * 4 / 4, rel=0.01)
    assert any("FSDP1: derived" in note for note in planned.notes)


def test_a_model_loads_piece_by_piece_but_from_scratch_and_under_fsdp1_and_offloaded_shards_are_the_hosts():
    for preset in ("fsdp2_full_shard", "ddp"):
        assert plan(LLAMA, preset, 4, *UNPACKED).host_bytes["while loading"] == 2 * PIECE_BYTES
    for preset, flags in (("fsdp2_full_shard", ["--model.from_scratch=true"]), ("fsdp1_full_shard", [])):
        assert plan(LLAMA, preset, 4, *UNPACKED, *flags).host_bytes["while loading"] == NUM_PARAMETERS * 4
    planned = plan(LLAMA, "fsdp2_offload", 4, *UNPACKED)
    assert planned.device_bytes[SHARDED_PARAMETERS] == planned.device_bytes[GRADIENTS] == planned.device_bytes[OPTIMIZER] == 0
    assert planned.device_bytes[UNSHARDED] > 0
    assert planned.host_bytes["offloaded shards"] == pytest.approx(NUM_PARAMETERS * 16 / 4, rel=0.001)


@pytest.mark.parametrize(("base_dtype", "bytes_of_64"), [("nf4", 32 + 4), ("int8", 64 + 4)])
def test_a_quantized_base_is_planned_in_its_codes(base_dtype, bytes_of_64):
    all_linear = ("--adapter.method=lora", "--adapter.rank=8", f"--adapter.base_dtype={base_dtype}")
    planned = plan(LLAMA, "fsdp2_full_shard", 4, *UNPACKED, *all_linear)
    num_lora = LAYERS * 8 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))
    linears = LAYERS * (BLOCK - 2 * HIDDEN)
    held = linears * bytes_of_64 / 64 + (NUM_PARAMETERS - linears) * 2 + num_lora * 4
    assert planned.device_bytes[SHARDED_PARAMETERS] == pytest.approx(held / 4, rel=0.01)
    block = next(unit for unit in planned.units if unit["count"] == LAYERS)
    assert block["num_parameters"] == BLOCK + num_lora // LAYERS
    gathered = (BLOCK - 2 * HIDDEN) * bytes_of_64 / 64 + (2 * HIDDEN + num_lora // LAYERS) * 2
    assert block["gather_bytes"] == gathered
    assert planned.largest_gather_bytes == END * 2
    assert planned.host_bytes["while loading"] == 12 * PIECE_BYTES


@pytest.mark.parametrize(
    ("name", "of_matrix", "of_vector"),
    [
        ("adamw_8bit", lambda rows, columns: rows * columns * (2 + 8 / 256) + 4, lambda rows: rows * 8 + 4),
        ("adafactor", lambda rows, columns: (rows + columns) * 4 + 4, lambda rows: rows * 4 + 4),
        ("lion", lambda rows, columns: rows * columns * 4, lambda rows: rows * 4),
    ],
    ids=["adamw_8bit", "adafactor", "lion"],
)
def test_other_optimizers_are_planned_in_their_own_bytes(name, of_matrix, of_vector):
    planned = plan(LLAMA, "fsdp2_full_shard", 4, *UNPACKED, f"--optim.name={name}")

    def held(num_shards: int) -> float:
        """Columns' means and the number of updates are whole on every rank."""
        block = 4 * of_matrix(HIDDEN // num_shards, HIDDEN) + 2 * of_matrix(INNER // num_shards, HIDDEN)
        block += of_matrix(HIDDEN // num_shards, INNER) + 2 * of_vector(HIDDEN // num_shards)
        return LAYERS * block + 2 * of_matrix(VOCAB // num_shards, HIDDEN) + of_vector(HIDDEN // num_shards)

    assert (planned.device_bytes[OPTIMIZER], planned.checkpoint_bytes[OPTIMIZER]) == (held(4), held(1))


def test_float8_is_planned_as_bf16_and_says_so():
    float8, bf16 = (plan(LLAMA, preset, 4, *UNPACKED) for preset in ("fsdp2_fp8", "fsdp2_compile"))
    assert float8.device_bytes == bf16.device_bytes
    assert [note for note in float8.notes if note not in bf16.notes] == [
        "float8: planned as bf16; the weights of converted Linears are gathered in half the bytes"
    ]


def test_a_pair_is_planned_as_two_rows_and_the_pass_of_its_reference_is_said():
    pairs = {
        loss: plan(LLAMA, "fsdp2_full_shard", 4, *UNPACKED, f"--preference.loss={loss}", "--eval.batch_size_rows=16")
        for loss in ("sigmoid", "orpo")
    }
    rows = plan(LLAMA, "fsdp2_full_shard", 4, *UNPACKED, "--train.micro_batch_size_rows=2", "--train.global_batch_size_rows=8")
    assert pairs["sigmoid"].device_bytes[ACTIVATIONS] == pytest.approx(rows.device_bytes[ACTIVATIONS], rel=0.02)
    assert [note for note in pairs["sigmoid"].notes if note not in pairs["orpo"].notes] == [
        "before step 1 a forward of all pairs, eval.batch_size_rows 16 at a time: a third of an epoch's time, half with an "
        "adapter; memory of an evaluation without texts"
    ]


def test_hybrid_shards_are_reduced_over_the_replicas_too(edited):
    preset = edited("fsdp2_hsdp", "dp_shard_size: 8", "dp_shard_size: 4")
    preset.write_text(preset.read_text().replace("num_processes: 16", "num_processes: 8"))
    planned = plan(LLAMA, preset, 8, *UNPACKED)
    assert planned.device_bytes[SHARDED_PARAMETERS] == pytest.approx(NUM_PARAMETERS, rel=0.005)
    assert planned.moved_bytes["all-reduce"] == pytest.approx(2 * NUM_PARAMETERS * 4 / 4 / 2, rel=0.01)
    assert "dp_replicate_size 2 x dp_shard_size 4 = 8 ranks" in refusal(load_strategy, preset, 6)


def test_size_based_wrap_and_the_dynamo_section_are_taken_as_the_launcher_takes_them(edited):
    preset = edited("fsdp2_full_shard", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP")
    assert load_strategy(preset, 4).min_num_parameters == 10**8  # of the launcher, where the file has none
    assert [unit["unit"] for unit in plan(LLAMA, preset, 4, *UNPACKED).units] == ["LlamaForCausalLM (the rest)"]
    preset = edited("fsdp2_full_shard", "TRANSFORMER_BASED_WRAP", f"SIZE_BASED_WRAP\n  fsdp_min_num_params: {BLOCK}")
    assert sum(unit["count"] for unit in plan(LLAMA, preset, 4, *UNPACKED).units) > LAYERS
    assert load_strategy(PRESETS / "fsdp2_compile.yaml", 4).is_compiled
    preset = edited("fsdp2_full_shard", "fsdp_config:", "dynamo_config:\n  dynamo_backend: 'NO'\nfsdp_config:")
    assert not load_strategy(preset, 4).is_compiled


def test_verdict_names_the_largest_micro_batch_and_the_cheapest_change():
    model = LLAMA | {"num_hidden_layers": 1}
    roomy = plan(model, "fsdp2_full_shard", 4, *UNPACKED)
    gib = roomy.total / 2**30 / 0.92
    exact = plan(model, "fsdp2_full_shard", 4, *UNPACKED, gib=gib * 1.001, searches=True)
    assert exact.fits and exact.largest_micro_batch_rows == 1 and exact.change is None
    assert "FITS" in plan_as_text(exact) and "has 1 row" in plan_as_text(exact)
    tight = plan(model, "fsdp2_full_shard", 4, *UNPACKED, gib=gib * 0.98, searches=True)
    assert not tight.fits and tight.largest_micro_batch_rows == 0
    assert tight.change == "train.activation_checkpointing: selective"
    assert "DOES NOT FIT" in plan_as_text(tight) and tight.change in plan_as_text(tight)
    hopeless = plan(model, "fsdp2_full_shard", 4, *UNPACKED, gib=0.001, searches=True)
    assert hopeless.change is None and "no change" in plan_as_text(hopeless)


def test_with_offload_fewer_micro_batches_are_proposed_where_they_fit():
    batch = (*UNPACKED, "--train.global_batch_size_rows=16", "--train.micro_batch_size_rows=1")

    def proposed(strategy: Strategy, largest: int | None) -> list[str]:
        return [note for note in _notes(_subject(model_folder(LLAMA), strategy, batch), strategy, largest) if "offload: " in note]

    sentence = "offload: gradients of 4 micro-batches are added on the host while the GPU waits; train.micro_batch_size_rows "
    assert proposed(with_(offload=True), 64) == [f"{sentence}4 fits too, and takes 1"]
    assert proposed(with_(offload=True), 2) == [f"{sentence}2 fits too, and takes 2"]
    assert proposed(with_(offload=True), 1) == proposed(with_(offload=True), None) == proposed(FSDP2, 64) == []


def test_units_and_ties_are_listed_and_json_has_all():
    planned = plan(LLAMA | {"tie_word_embeddings": True}, "fsdp2_full_shard", 4, *UNPACKED)
    described = json.loads(json.dumps(plan_as_dict(planned)))
    assert [unit["count"] for unit in described["units"]] == [LAYERS, 1]
    assert described["units"][0]["num_parameters"] == BLOCK
    assert described["tied"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert described["checkpoint_bytes"] == {
        "trainable parameters": (NUM_PARAMETERS - VOCAB * HIDDEN) * 4,
        OPTIMIZER: (NUM_PARAMETERS - VOCAB * HIDDEN) * 8,
    }
    assert described["device_bytes_total"] == sum(described["device_bytes"].values()) == planned.total
    assert min(planned.device_bytes.values()) >= 0


@pytest.mark.parametrize(
    ("settings", "preset", "num_processes", "flags", "sentence"),
    [
        ("./nowhere", "fsdp2_full_shard", 4, [], "nowhere is not a folder here"),
        ({"layers": 3}, "fsdp2_full_shard", 4, [], "could not be read"),
        (LLAMA, "single", 4, [], "distributed_type NO, which starts 1"),
        (LLAMA, "fsdp2_full_shard", 4, ["--data.max_length_tokens=4096"], "max_length_tokens to at most 1024"),
        (LLAMA, "fsdp2_multi_node", 5, [], "cannot spread evenly over its num_machines 2"),
        (LLAMA, "fsdp1_full_shard", 4, IN_BF16, "bfloat16_stochastic, but FSDP1 flattens weights: take one process"),
        (LLAMA, "fsdp1_full_shard", 4, [LORA[0], "--adapter.base_dtype=nf4"], "nf4, but FSDP1 keeps frozen and trainable"),
    ],
)
def test_bad_input_is_reported_in_a_sentence(settings, preset, num_processes, flags, sentence):
    model = settings if isinstance(settings, str) else model_folder(settings)
    assert sentence in refusal(build_plan, model, PRESETS / f"{preset}.yaml", num_processes, flags, None, 80.0)
    assert "--gpu-memory-gib is nan" in refusal(build_plan, model, PRESETS / "single.yaml", 1, [], None, float("nan"))


def test_a_hub_id_out_of_reach_is_asked_for_once(monkeypatch):
    ask = Mock(side_effect=OSError("We couldn't connect to 'https://huggingface.co'.\nCheck your connection"))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", ask)
    said = refusal(build_plan, "some/model", PRESETS / "single.yaml", 1, [], None, 80.0)
    assert said.startswith("model some/model is not a local folder ")
    assert "(We couldn't connect to 'https://huggingface.co')" in said and ask.call_count == 1


@pytest.mark.parametrize(
    ("gib", "flag", "code"),
    [("0.2", "--data.packing=false", 0), ("0.2", RUN_YAML, 0), ("0.001", "", 1), ("0.2", "--data.x=1", 2)],
    ids=["fits", "run-yaml", "too-large", "unknown-flag"],
)
def test_the_command_s_exit_code_is_its_verdict(gib, flag, code, capsys):
    """Also with a run YAML whose data is not there."""
    preset, model = str(PRESETS / "fsdp2_full_shard.yaml"), model_folder(LLAMA | {"num_hidden_layers": 1})
    words = ["--model", model, "--accelerate-config", preset, "--num-processes", "4", "--gpu-memory-gib", gib]
    assert call_toolkit("plan", *words, *filter(None, [flag]), "--data.max_length_tokens=32") == code
    printed = capsys.readouterr()
    assert ["\nFITS", "\nDOES NOT FIT", "error: "][code] in printed.out + printed.err
    done = ["building ", "tracing ", "searching for the largest ", "searching for a change "]
    lines = [line.removeprefix("planning: ") for line in printed.err.splitlines() if line.startswith("planning: ")]
    assert "planning" not in printed.out and len(lines) == [3, 4, 1][code]
    assert all(line.startswith(start) for line, start in zip(lines, done, strict=False))
