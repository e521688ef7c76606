"""The loss inside a model's forward: that of its own logits, packed or not, for every family."""

import dataclasses
import functools

import pytest
import torch
import transformers

from tests.families.kinds import tiny_config
from tests.support import seq2seq_families
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES
from tests.support.tiny_models import LENGTHS, VOCAB_SIZE, build_causal, build_rows, one_process, take_gradients
from toolkit.data.collate import CausalCollator, labels_at_positions
from toolkit.loss import summed_cross_entropy
from toolkit.models.patches import chunked_loss
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.parallel import gather, wrap
from toolkit.parallel.compute_copies import cast_inputs

ELSEWHERE = ("opt", "llama4_text", "gemma4_text", "falcon_h1", "reads beside")
"""OPT's forward calls the stack inside its backbone, as those of decoders of BART's kin do. Llama 4's of text alone is at
`model`, and `base_model_prefix` says `language_model`. Gemma 4's reads the shape of its input, Falcon-H1's a number of its
backbone. One that reads what its backbone makes beside takes all logits."""
ENCODER_DECODERS = [*FAMILIES, *seq2seq_families.IN_PROCESS]
SOURCES_AND_TARGETS = [
    {"input_ids": [5, 6, 7, 8, 9, 10, 11], "labels": [9, 20, 21, 2]},
    {"input_ids": [9, 12], "labels": [9, 30, 31, 2, 4, 5]},
    {"input_ids": [13, 4, 6], "labels": [7]},
]


def build(family: str) -> tuple:
    """A model, its collator, and rows for it."""
    if family in ENCODER_DECODERS:
        model = seq2seq_families.build_model(family)
        return model, seq2seq_families.build_collator(model), SOURCES_AND_TARGETS
    if family in CAUSAL_FAMILIES:
        return build_causal(family), CausalCollator(0), build_rows()
    config = tiny_config("llama" if family == "reads beside" else family)
    return transformers.AutoModelForCausalLM.from_config(config).eval(), CausalCollator(0), build_rows()


def in_chunks(family: str) -> tuple:
    """The same with the loss in chunks, each row in a pack of its own."""
    model, collator, rows = build(family)
    chunked_loss.install(model)
    return model, collator, [[row] for row in rows]


def assert_near(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float, *, of_each=False) -> None:
    """The bound is a share of the norm of all gradients, or of each one's."""
    assert gradients.keys() == expected.keys()
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in gradients.items():
        share = expected[name].norm().clamp(min=1e-6) if of_each else norm
        assert (gradient - expected[name]).norm() < bound * share, name


@pytest.mark.parametrize(
    ("family", "smoothing"),
    [
        *((family, 0.0) for family in (*CAUSAL_FAMILIES, *ELSEWHERE, *ENCODER_DECODERS)),
        *(("gemma2", 0.1), ("t5", 0.1), ("bart", 0.1)),
    ],
)
def test_loss_and_gradients_are_those_of_all_logits(family, smoothing, monkeypatch):
    """Also padded up to a grid; and causal ones in packs, where each row has the loss that it has alone. A dummy has none."""
    model, collator, rows = build(family)
    batch = collator.collate(packs := [[row] for row in rows])
    # 16 would be the next multiple: no row may become longer than the longest of all.
    of_grid = dataclasses.replace(collator, multiples=(8, 8), longest=(15, 15)).collate(packs)
    assert of_grid["input_ids"].shape[1] > batch["input_ids"].shape[1], "nothing was padded"
    # Prophetnet's outputs depend on the padded length, in transformers too.
    batches = [(batch, 1e-6, 1e-6), (of_grid, 1e-5, 1e-3 if family == "prophetnet" else 1e-5)]
    if family in CAUSAL_FAMILIES:
        batches.append((collator.collate([rows[:3], rows[3:]]), 1e-6, 1e-6))
    if family in ENCODER_DECODERS:
        biases = [buffer for name, buffer in model.named_buffers() if name == "final_logits_bias"]
        for tensor in (*model.parameters(), *biases):  # biases are zeros, and T5's tied head predicts next to nothing
            torch.nn.init.normal_(tensor, std=0.1)
        inputs = {name: tensor for name, tensor in batch.items() if name not in ("label_positions", "labels")}
        labels_BT = labels_at_positions(batch, batch["decoder_input_ids"])
        pairs = [(model(**inputs, use_cache=False).logits, labels_BT)]
    else:
        ids = [torch.tensor([row["input_ids"]]) for row in rows]
        pairs = [(model(input_ids=ids_1T).logits[:, :-1], ids_1T[:, 1:]) for ids_1T in ids]
    expected = torch.stack([summed_cross_entropy(logits, labels, smoothing) for logits, labels in pairs]).sum()
    num_top = sum((logits.argmax(-1) == labels).sum() for logits, labels in pairs)
    expected.backward()
    expected_gradients = take_gradients(model)
    if family == "reads beside":
        theirs = transformers.LlamaForCausalLM.forward

        def forward(self, input_ids=None, **inputs):
            assert len(self.model.layers)
            return theirs(self, input_ids=input_ids, **inputs)

        forward.__module__ = theirs.__module__
        monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    assert chunked_loss.holds_all_logits(model) == (family in (*chunked_loss.NO_CHUNKS, "llama4_text", "reads beside"))
    chunked_loss.install(model)
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS_AT_ONCE", 4 * VOCAB_SIZE)  # several chunks, the last one smaller
    for batch, rtol, bound in batches:
        loss, _ = summed_loss(model, batch, smoothing)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=rtol, atol=0)
        assert_near(gradients := take_gradients(model), expected_gradients, bound)
        if family in CAUSAL_FAMILIES:
            assert_near(gradients, expected_gradients, 1e-4, of_each=True)
        with torch.no_grad():
            assert summed_loss(model, batch)[1] == num_top
    loss, _ = summed_loss(model, collator.collate(packs, is_dummy=True), smoothing)
    loss.backward()
    gradients = take_gradients(model).values()
    assert loss == 0 and gradients and not any(gradient.any() for gradient in gradients)


def test_the_head_is_found_before_the_first_step_and_without_its_weights(monkeypatch):
    """transformers looks for it module by module, which would cost the host time in every micro-batch. An 8B model's weights are
    2 GB in fp32, on each rank."""
    shapes = []

    def seen(self: torch.Tensor, *shape: int) -> torch.Tensor:
        shapes.append(shape)
        return torch.zeros(shape, dtype=self.dtype)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_zeros", seen)
        assert not chunked_loss.holds_all_logits(build_causal("llama"))
    assert shapes == [(1, 2, VOCAB_SIZE)]
    model, collator, packs = in_chunks("llama")
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda model: pytest.fail("it is looked for in a step"))
    summed_loss(model, collator.collate(packs))


@pytest.mark.parametrize("family", ["llama", "mt5", "bart"])
def test_whole_logits_never_exist(family, monkeypatch):
    model, collator, packs = in_chunks(family)
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS_AT_ONCE", 4 * VOCAB_SIZE)
    seen = watch_logits(model)
    batch = collator.collate(packs)
    summed_loss(model, batch)[0].backward()
    num_labels = len(batch["labels"])
    assert max(logits.numel() for logits in seen) == 4 * VOCAB_SIZE
    assert len(seen) == 2 * -(-num_labels // 4) - 1, "all chunks but the last are computed a second time"


@pytest.mark.parametrize(
    ("gib", "expected"), [(79.2, 2**27), (80, 2**27), (15.8, 2**25), (16, 2**25), (23.6, 2**25), (39.4, 2**26), (140.4, 2**28)]
)
def test_a_chunk_takes_at_most_a_hundredth_of_the_gpu(gib, expected):
    chosen = chunked_loss.max_logits_at_once(int(gib * 2**30))
    assert chosen == expected and chosen * 4 <= gib * 2**30 / 100 < 2 * chosen * 4


@pytest.mark.parametrize(("gpu_mib", "num_tokens"), [(None, sum(LENGTHS) - len(LENGTHS)), (1, 8)])
def test_chunks_of_training_and_evaluation_follow_the_gpu(gpu_mib, num_tokens, monkeypatch):
    """Of 1 MiB, a hundredth is 2,621 numbers, so 2,048 logits. Without a GPU one chunk has all. The loss stays the same."""
    monkeypatch.setattr(chunked_loss, "FEWEST_LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(wrap, "smallest_gpu_bytes", lambda device: gpu_mib and gpu_mib * 2**20)
    batch = CausalCollator(0).collate([build_rows()])
    expected = build_causal("llama")
    chunked_loss.install(expected)
    sharded = wrap.shard_model(one_process(), build_causal("llama"))
    for model in (sharded.unwrapped, gather._replica(sharded, wrap.copy_on_meta(sharded.skeleton))):
        seen = watch_logits(model)
        torch.testing.assert_close(summed_loss(model, batch)[0], summed_loss(expected, batch)[0], rtol=1e-6, atol=0)
        assert max(logits.shape[-2] for logits in seen) == num_tokens


def watch_logits(model) -> list[torch.Tensor]:
    """What the head's forward makes from now on. Its hooks see one call for all chunks."""
    seen, forward = [], model.lm_head.forward

    def watched(*args, **inputs):
        seen.append(forward(*args, **inputs))
        return seen[-1] if isinstance(seen[-1], torch.Tensor) else seen.pop()

    model.lm_head.forward = watched
    return seen


def test_numbers_of_a_batch_reach_the_loss_as_they_are():
    """FSDP casts the floats that its root gets."""
    model = build_causal("llama")
    chunked_loss.install(model)
    model.register_forward_pre_hook(functools.partial(cast_inputs, torch.bfloat16), with_kwargs=True)
    batch = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([1234.567])}
    labels = chunked_loss.inside_forward(model, lambda inside, labels, **inputs: labels, batch)
    assert torch.equal(labels, batch["labels"])
