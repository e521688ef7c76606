"""Masks made without a read are those that transformers makes, in every family; what families read by themselves is listed."""

import types
from collections import Counter

import pytest
import torch
import transformers
from transformers import ModernBertConfig, masking_utils

from tests.families.kinds import kind_on_meta, tiny_config
from tests.support.host_reads import recorded
from tests.support.model_folders import CAUSAL_FAMILIES, FAMILIES
from tests.support.seq2seq_families import IN_PROCESS, build_collator
from tests.support.seq2seq_families import build_model as build_seq2seq
from tests.support.tiny_models import build_causal, build_rows, causal_skeleton, take_gradients
from toolkit.config.data import LLMDataConfig
from toolkit.config.schema import AdapterConfig, LLMConfig, ModelConfig
from toolkit.data.collate import CausalCollator
from toolkit.errors import UserError
from toolkit.models.lora import add_adapter
from toolkit.models.patches import chunked_loss, masks
from toolkit.models.patches.chunked_loss import summed_loss

LED = "led/modeling_led.py:"
LEFT: dict[str, dict[str, int]] = {
    "fsmt": {"fsmt/modeling_fsmt.py:make_padding_mask": 1},
    # Only the first is a read. Its blocks divide integers as tensors of the host.
    "led": {
        f"{LED}forward": 1, f"{LED}_chunk": 8, f"{LED}_sliding_chunks_query_key_matmul": 4,
        f"{LED}_sliding_chunks_matmul_attn_probs_value": 4,
    },
}  # fmt: skip
"""What a forward and backward still reads, by family; each is a `_local_scalar_dense`."""
ONLY_EAGER = {"gemma2", "longt5", "bigbird_pegasus", "pegasus_x", "t5gemma"}

GIVEN_POSITIONS = ("falcon", "gpt_oss", "afmoe", "opt", "bloom", "mpt")
OF_IMAGES = ("qwen2_vl", "qwen3_vl", "glm4v", "mistral3", "llava", "kosmos-2.5")
APART = (*GIVEN_POSITIONS, *OF_IMAGES, "granitemoehybrid", "bamba")
"""Further kinds whose rows are packed."""
NOT_APART = ("biogpt", "deepseek_v4")
"""Kinds whose masks can get no positions in transformers 5.23, and whose compressed blocks of tokens go across documents."""


@pytest.mark.parametrize("family", [*CAUSAL_FAMILIES, *APART, *NOT_APART])
def test_rows_are_packed_where_masks_can_tell_them_apart(family, caplog):
    packs = family not in NOT_APART
    model = causal_skeleton(family) if family in CAUSAL_FAMILIES else kind_on_meta(family)

    def chosen(packing) -> bool | str:
        with caplog.at_level("INFO", "toolkit"):
            config = LLMConfig(model=ModelConfig(name_or_path=family), data=LLMDataConfig(packing=packing))
            return masks.choose_packing(config, model).data.packing

    assert chosen("auto") is packs and chosen(False) is False
    name = type(model).__name__
    lines = [] if packs else [f"rows are not packed (data.packing auto): {name} would let packed rows see each other"]
    assert [record.message for record in caplog.records if record.name == "toolkit"] == lines
    if packs:
        assert chosen(True) is True
        return
    with pytest.raises(UserError, match=f"^data.packing is true, but {name} lets .* set data.packing to auto or false$"):
        chosen(True)
    if family == "biogpt":  # of a base in codes too, before it loads
        adapter = AdapterConfig(method="lora", base_dtype="nf4")
        add_adapter(model, adapter, ModelConfig(name_or_path="biogpt", revision="1"))
        assert chosen("auto") is False


@pytest.mark.parametrize("takes_positions", [True, False])
def test_code_of_ones_own_is_packed_by_what_its_forward_takes(takes_positions):
    """Of `trust_remote_code`. What fails on the meta device is left to the check of the real model."""
    model = torch.nn.Module()
    model.base_model, model.config = torch.nn.Module(), types.SimpleNamespace(_attn_implementation="eager")
    model.config.is_encoder_decoder, model.config.get_text_config = False, lambda: model.config

    def fails(input_ids: torch.Tensor, use_cache: bool, position_ids: torch.Tensor) -> None:
        raise ValueError("no language is set")

    model.base_model.forward = fails if takes_positions else lambda input_ids, use_cache: None
    config = LLMConfig(model=ModelConfig(name_or_path="own"), data=LLMDataConfig())
    assert masks.choose_packing(config, model).data.packing is takes_positions


@pytest.mark.parametrize(
    ("family", "settings"), [*((family, {}) for family in (*GIVEN_POSITIONS, *OF_IMAGES)), ("falcon", {"alibi": True})]
)
def test_rows_do_not_see_each_other_where_masks_are_given_positions(family, settings):
    """A packed row has the logits that it has alone, and does not change with the row before it."""
    torch.manual_seed(0)
    auto_class = "AutoModelForImageTextToText" if family in OF_IMAGES else "AutoModelForCausalLM"
    config = tiny_config(family)
    config.update(settings)
    model = getattr(transformers, auto_class).from_config(config, experts_implementation="batched_mm").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that attention has something to say
    masks.install(model)
    first, second = (torch.tensor(row["input_ids"])[None] for row in build_rows((7, 9)))
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    with torch.no_grad():
        alone = model(input_ids=second, use_cache=False).logits
        packed, other = (
            model(input_ids=torch.cat([start, second], dim=1), position_ids=positions, use_cache=False).logits[:, 7:]
            for start in (first, first.flip(1) + 1)
        )
    assert torch.equal(packed, other)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "eager" if family in ONLY_EAGER else "sdpa") for family in [*CAUSAL_FAMILIES, *FAMILIES, *IN_PROCESS]),
        *((family, "eager") for family in ("llama", "mistral", "t5", "bart")),
    ],
)
def test_masks_are_those_of_transformers(family, attention):
    model, batches = build(family)
    model.set_attn_implementation(attention)
    chunked_loss.install(model)
    expected = [take_loss_and_gradients(model, batch)[0] for batch in batches]
    masks.install(model)
    for batch, (loss, gradients) in zip(batches, expected, strict=True):
        (actual_loss, actual), reads = take_loss_and_gradients(model, batch)
        assert torch.equal(actual_loss, loss)
        assert actual.keys() == gradients.keys() and all(torch.equal(actual[name], gradients[name]) for name in actual)
        assert reads == {f"{place} _local_scalar_dense": number for place, number in LEFT.get(family, {}).items()}


def build(family: str) -> tuple:
    """A tiny model, and batches: of padded and of packed rows, or of padded and of full ones."""
    if family in CAUSAL_FAMILIES:
        rows = build_rows()
        return build_causal(family), [
            CausalCollator(0).collate(packs) for packs in ([[row] for row in rows], [rows[:3], rows[3:]])
        ]
    model = build_seq2seq(family)
    rows = [{"input_ids": list(range(5, 5 + length)), "labels": [9, 20, 21, 2][-length:]} for length in (7, 3, 7)]
    collator = build_collator(model)
    batches = [collator.collate([[row] for row in rows]), collator.collate([[rows[0]], [rows[2]]])]
    assert ["attention_mask" in batch for batch in batches] == [True, False]
    return model, batches


def take_loss_and_gradients(model, batch: dict[str, torch.Tensor]) -> tuple[tuple[torch.Tensor, dict], Counter[str]]:
    """Of one micro-batch: loss, gradients by name, and the reads."""
    reads: Counter[str] = Counter()
    with recorded(reads):
        loss, _ = summed_loss(model, batch)
        loss.backward()
    return (loss.detach(), take_gradients(model)), reads


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3", "t5", "bart", "t5gemma"])
def test_a_mask_that_is_given_is_applied(family):
    """`generate` pads at the start, where causal attention would see the padding."""
    is_causal = family in CAUSAL_FAMILIES
    model = build_causal(family) if is_causal else build_seq2seq(family)
    rows = [{**row, "prompt_length": len(row["input_ids"])} for row in build_rows((9, 4))]
    prompts = (CausalCollator(0) if is_causal else build_collator(model)).prompts(rows)

    def take() -> list[torch.Tensor]:
        texts = model.generate(**prompts, max_new_tokens=4, num_beams=1 if is_causal else 2, do_sample=False)
        return [texts, model(**prompts, use_cache=False).logits] if is_causal else [texts]

    with torch.no_grad():
        expected = take()
        masks.install(model)
        assert all(map(torch.equal, take(), expected))


@pytest.mark.parametrize("length", [4, 8, 20])
def test_a_window_to_both_sides_masks_what_is_beyond_it(length):
    """Of an encoder. No family here has one under sdpa, which alone leaves masks out."""
    config = ModernBertConfig(hidden_size=32, num_attention_heads=4, local_attention=12, attn_implementation="sdpa")
    expected = masking_utils.create_bidirectional_sliding_window_mask(config, torch.zeros(1, length, 32), None)
    with masks.known_masks(is_packed=False, documents=None):
        mask = masking_utils.create_bidirectional_sliding_window_mask(config, torch.zeros(1, length, 32), None)
    assert (mask is None) == (expected is None) == (length == 4)
    assert mask is None or torch.equal(mask, expected)


def test_what_was_replaced_is_put_back_after_an_error():
    kept = {name: getattr(masking_utils, name) for name in dir(masking_utils)}
    model = build_causal("llama")
    masks.install(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[10**6]]), use_cache=False)
    assert {name: getattr(masking_utils, name) for name in dir(masking_utils)} == kept
