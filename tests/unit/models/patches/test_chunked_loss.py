"""The loss inside a model's forward: that of its own logits, packed or not, for every family."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DynamoBackend

from tests.support import seq2seq_families
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES
from toolkit.data.collate import CausalCollator, labels_at_positions
from toolkit.loss import summed_cross_entropy, summed_loss
from toolkit.models.patches import chunked_loss
from toolkit.parallel import gather, wrap

LENGTHS = (5, 9, 14, 3)
VOCAB_SIZE = 256


def build_model(family: str) -> Any:
    import transformers

    config_class, settings = CAUSAL_FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(vocab_size=VOCAB_SIZE, **settings)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def build_rows(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in rows]


@pytest.mark.parametrize(("family", "smoothing"), [*((family, 0.0) for family in CAUSAL_FAMILIES), ("gemma2", 0.1)])
def test_loss_and_gradients_are_those_of_whole_logits(family: str, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = build_model(family), build_rows()
    expected = torch.zeros(())
    for row in rows:
        ids_BT = torch.tensor([row["input_ids"]])
        expected = expected + summed_cross_entropy(model(input_ids=ids_BT).logits[:, :-1], ids_BT[:, 1:], smoothing)
    expected.backward()
    expected_gradients = take_gradients(model)
    chunked_loss.install(model)
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS_AT_ONCE", 7 * VOCAB_SIZE)  # several chunks, the last one smaller
    for packs in ([[row] for row in rows], [rows[:3], rows[3:]]):
        loss, _ = summed_loss(model, CausalCollator(0).collate(packs), smoothing)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        gradients = take_gradients(model)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            difference = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm().clamp(min=1e-6)
            assert difference < 1e-4, name


def check_loss_is_that_of_its_own_logits(model: Any) -> None:
    rows = build_rows()
    all_ids = [torch.tensor([row["input_ids"]]) for row in rows]
    expected = sum(summed_cross_entropy(model(input_ids=ids_BT).logits[:, :-1], ids_BT[:, 1:]) for ids_BT in all_ids)
    chunked_loss.install(model)
    loss, _ = summed_loss(model, CausalCollator(0).collate([[row] for row in rows]))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_a_forward_may_call_the_stack_inside_its_backbone() -> None:
    """As those of OPT and of decoders of BART's kin do."""
    import transformers

    config = transformers.OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    check_loss_is_that_of_its_own_logits(model)


def test_a_backbone_that_is_not_where_the_class_says_leaves_all_logits() -> None:
    """Llama 4's of text alone is at `model`, and `base_model_prefix` says `language_model`."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_local_experts": 2, "head_dim": 4}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Llama4TextConfig(vocab_size=VOCAB_SIZE, pad_token_id=0, **sizes, **heads)
    model: Any = transformers.Llama4ForCausalLM(config).eval()
    check_loss_is_that_of_its_own_logits(model)


def test_the_head_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks for it module by module, which would cost the host time in every micro-batch."""
    model = build_model("llama")
    chunked_loss.install(model)
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda model: pytest.fail("it is looked for in a step"))
    summed_loss(model, CausalCollator(0).collate([[row] for row in build_rows()]))


SOURCES_AND_TARGETS = [
    {"input_ids": [5, 6, 7, 8, 9, 10, 11], "labels": [9, 20, 21, 2]},
    {"input_ids": [9, 12], "labels": [9, 30, 31, 2, 4, 5]},
    {"input_ids": [13, 4, 6], "labels": [7]},
]


@pytest.mark.parametrize(
    ("family", "smoothing"),
    [*((family, 0.0) for family in (*FAMILIES, *seq2seq_families.IN_PROCESS)), ("t5", 0.1), ("bart", 0.1)],
)
def test_loss_and_gradients_of_an_encoder_decoder_are_those_of_all_logits(
    family: str, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seq2seq_families.build_model(family)
    for parameter in model.parameters():  # biases of heads are zeros, and T5's tied head predicts next to nothing
        torch.nn.init.normal_(parameter, std=0.1)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            torch.nn.init.normal_(buffer)
    batch = seq2seq_families.build_collator(model).collate([[row] for row in SOURCES_AND_TARGETS])
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("label_positions", "labels")}
    logits_BTV = model(**inputs, use_cache=False).logits
    expected = summed_cross_entropy(logits_BTV, labels_at_positions(batch), smoothing)
    expected.backward()
    expected_gradients = take_gradients(model)
    chunked_loss.install(model)
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS_AT_ONCE", 3 * VOCAB_SIZE)  # several chunks, the last one smaller
    loss, _ = summed_loss(model, batch, smoothing)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    gradients = take_gradients(model)
    assert gradients.keys() == expected_gradients.keys()
    norm = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm()
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).norm() < 1e-6 * norm, name
    with torch.no_grad():
        assert summed_loss(model, batch)[1] == (logits_BTV.argmax(-1) == labels_at_positions(batch)).sum()


@pytest.mark.parametrize("family", [*CAUSAL_FAMILIES, *FAMILIES, *seq2seq_families.IN_PROCESS])
def test_padding_up_to_a_grid_changes_neither_loss_nor_gradients(family: str) -> None:
    is_causal = family in CAUSAL_FAMILIES
    model: Any = build_model(family) if is_causal else seq2seq_families.build_model(family)
    chunked_loss.install(model)
    collator: Any = CausalCollator(0) if is_causal else seq2seq_families.build_collator(model)
    rows = build_rows() if is_causal else SOURCES_AND_TARGETS
    results = []
    for longest in (0, 15):  # 16 would be the next multiple: no row may become longer than the longest of all
        of_grid = dataclasses.replace(collator, multiples=(8, 8), longest=(longest, longest))
        batch = of_grid.collate([[row] for row in rows])
        loss, _ = summed_loss(model, batch)
        loss.backward()
        results.append((batch, loss, take_gradients(model)))
    (before, expected, expected_gradients), (after, loss, gradients) = results
    assert after["input_ids"].shape[1] > before["input_ids"].shape[1], "nothing was padded"
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    norm = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm()
    bound = 1e-3 if family == "prophetnet" else 1e-5  # transformers': its outputs depend on the padded length
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).norm() < bound * norm, name


@pytest.mark.parametrize("family", ["t5", "bart", "fsmt"])
def test_a_dummy_has_no_loss_and_no_gradient(family: str) -> None:
    model = seq2seq_families.build_model(family)
    chunked_loss.install(model)
    batch = seq2seq_families.build_collator(model).collate([[row] for row in SOURCES_AND_TARGETS], is_dummy=True)
    loss, _ = summed_loss(model, batch)
    loss.backward()
    assert loss == 0
    gradients = take_gradients(model).values()
    assert gradients and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_changing_a_row_changes_nothing_in_its_neighbours(family: str) -> None:
    model, rows = build_model(family), build_rows()
    chunked_loss.install(model)
    others = [rows[0], build_rows(seed=1)[1], *rows[2:]]
    for row in (rows[1], others[1]):
        row["labels"] = [-100] * len(row["labels"])
    with torch.no_grad():
        losses = [summed_loss(model, CausalCollator(0).collate([packed]))[0] for packed in (rows, others)]
    assert rows[1]["input_ids"] != others[1]["input_ids"]
    assert torch.equal(*losses)


@pytest.mark.parametrize("family", ["llama", "mt5", "bart"])
def test_whole_logits_never_exist(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_causal = family in CAUSAL_FAMILIES
    model = build_model(family) if is_causal else seq2seq_families.build_model(family)
    chunked_loss.install(model)
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS_AT_ONCE", 4 * VOCAB_SIZE)
    seen = watch_logits(model)
    collator = CausalCollator(0) if is_causal else seq2seq_families.build_collator(model)
    batch = collator.collate([build_rows()] if is_causal else [[row] for row in SOURCES_AND_TARGETS])
    summed_loss(model, batch)[0].backward()
    num_labels = len(batch["labels"])
    assert max(logits.numel() for logits in seen) == 4 * VOCAB_SIZE
    assert len(seen) == 2 * -(-num_labels // 4) - 1, "all chunks but the last are computed a second time"


@pytest.mark.parametrize(
    ("gib", "expected"), [(79.2, 2**27), (80, 2**27), (15.8, 2**25), (16, 2**25), (23.6, 2**25), (39.4, 2**26), (140.4, 2**28)]
)
def test_a_chunk_takes_at_most_a_hundredth_of_the_gpu(gib: float, expected: int) -> None:
    chosen = chunked_loss.max_logits_at_once(int(gib * 2**30))
    assert chosen == expected and chosen * 4 <= gib * 2**30 / 100 < 2 * chosen * 4


@pytest.mark.parametrize(("gpu_mib", "num_tokens"), [(None, sum(LENGTHS) - len(LENGTHS)), (1, 8)])
def test_chunks_of_training_and_evaluation_follow_the_gpu(
    gpu_mib: int | None, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1 MiB, a hundredth is 2,621 numbers, so 2,048 logits. Without a GPU one chunk has all. The loss stays the same."""
    monkeypatch.setattr(chunked_loss, "FEWEST_LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(wrap, "smallest_gpu_bytes", lambda device: gpu_mib and gpu_mib * 2**20)
    batch = CausalCollator(0).collate([build_rows()])
    expected = build_model("llama")
    chunked_loss.install(expected)
    sharded = wrap.shard_model(one_process(), build_model("llama"))
    for model in (sharded.plain, gather._replica(sharded, wrap.copy_on_meta(sharded.skeleton))):
        seen = watch_logits(model)
        torch.testing.assert_close(summed_loss(model, batch)[0], summed_loss(expected, batch)[0], rtol=1e-6, atol=0)
        assert max(logits.shape[-2] for logits in seen) == num_tokens


def watch_logits(model: Any) -> list[torch.Tensor]:
    """What the head's forward makes from now on. Its hooks see one call for all chunks."""
    seen, forward = [], model.lm_head.forward

    def watched(*args: Any, **inputs: Any) -> Any:
        seen.append(forward(*args, **inputs))
        return seen[-1] if isinstance(seen[-1], torch.Tensor) else seen.pop()

    model.lm_head.forward = watched
    return seen


def one_process() -> Any:
    """The attributes of an `Accelerator` of one process that `shard_model` and an evaluation read."""
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
    kind, device = SimpleNamespace(value="NO"), torch.device("cpu")
    as_it_is = {"prepare_model": lambda model: model, "autocast": contextlib.nullcontext}
    return SimpleNamespace(distributed_type=kind, mixed_precision="no", device=device, state=state, **as_it_is)


def take_gradients(model: Any) -> dict[str, torch.Tensor]:
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return gradients
