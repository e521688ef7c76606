"""Attention by document equals attention under transformers' dense mask, without making one; documents cannot see each other.
Which models attend so, on which device, and what a run says of its attention."""

import inspect
import itertools
import json
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.support.model_folders import CAUSAL_FAMILIES
from tests.support.tiny_models import build_causal, build_rows, causal_skeleton, take_gradients
from toolkit.data.collate import CausalCollator, move_to
from toolkit.launch.accelerator import cudnn_attention
from toolkit.models.patches import chunked_loss, documents, masks
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.parallel.compute_copies import ComputeCopies
from toolkit.parallel.units import repeated_blocks

LENGTHS = (5, 9, 14, 1, 20, 3)
"""The windows of the families are 8 tokens; after a document of one token, positions start again without falling."""
BY_DOCUMENT = [family for family in CAUSAL_FAMILIES if family != "gemma2"]


def build(family: str, attention: str = documents.BY_DOCUMENT):
    documents.register()
    model = build_causal(family)
    model.set_attn_implementation(attention)
    chunked_loss.install(model)
    masks.install(model)
    return model


def take_loss_and_gradients(model, packs: list[list]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    is_one_row = model.config._attn_implementation != "sdpa"
    loss, _ = summed_loss(model, CausalCollator(0, one_row=is_one_row).collate(packs))
    loss.backward()
    return loss.detach(), take_gradients(model)


@pytest.mark.parametrize("kernel", ["sdpa a document", "varlen"])
@pytest.mark.parametrize("family", BY_DOCUMENT)
def test_loss_and_gradients_are_those_of_a_dense_mask(family, kernel, monkeypatch):
    rows = build_rows(LENGTHS)
    packs = [rows[:3], rows[3:]]
    expected_loss, expected = take_loss_and_gradients(build(family, "sdpa"), packs)
    if kernel == "varlen":
        monkeypatch.setattr(documents, "attend_by_document", lambda module, *args: documents._varlen(*args[:4], args[5]))
        monkeypatch.setattr(varlen, "varlen_attn", plain_varlen_attn)
    with patch.object(masking_utils, "sdpa_mask") as dense_mask:
        loss, gradients = take_loss_and_gradients(build(family), packs)
    dense_mask.assert_not_called()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm().clamp(min=1e-3), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", BY_DOCUMENT)
def test_a_changed_document_changes_no_bit_of_the_others(family, dtype):
    rows, others = build_rows(LENGTHS), build_rows(LENGTHS, seed=1)
    changed = [rows[0], others[1], *rows[2:]]
    for row in (rows[1], others[1]):
        row["labels"] = [-100] * len(row["labels"])
    model = build(family)
    # A gradient sums over tokens: those of the changed document, which has no label, add zeros.
    with ComputeCopies(model, repeated_blocks(model).values(), dtype).held():
        (loss, gradients), (loss_beside, gradients_beside) = (take_loss_and_gradients(model, [pack]) for pack in (rows, changed))
    assert rows[1]["input_ids"] != changed[1]["input_ids"]
    assert torch.equal(loss, loss_beside)
    assert all(torch.equal(gradient, gradients_beside[name]) for name, gradient in gradients.items())


def test_a_mask_of_another_kind_stays_dense():
    """Tokens that see later ones (those of an image, in Gemma 3) are not the causal documents that a kernel computes."""
    model = build("llama")
    lengths, starts = (2, 3), torch.tensor([0, 2, 5], dtype=torch.int32)
    embeds_1TD, positions_1T = torch.zeros(1, 5, 32), torch.tensor([[0, 1, 0, 1, 2]])

    def build_mask(**options):
        with masks.known_masks(is_packed=True, documents=documents.Documents(lengths, starts)):
            return masking_utils.create_causal_mask(model.config, embeds_1TD, None, None, positions_1T, **options)

    assert isinstance(build_mask(), documents.Documents)
    for options in ({"block_sequence_ids": torch.tensor([[0, 0, 1, 1, 1]])}, {"or_mask_function": lambda *at: at[3] >= 0}):
        mask = build_mask(**options)
        assert isinstance(mask, torch.Tensor) and mask.shape == (1, 1, 5, 5)


@pytest.mark.parametrize("options", [{"dropout": 0.5, "scaling": 2.0}, {"dropout": 0.0}], ids=["dropout", "default scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_are_those_of_sdpa_one_after_the_other(dtype, options):
    """With the same dropout masks and scale; the documents are alike, so that their masks tell them apart."""
    module, generator = torch.nn.Module(), torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 6, 8, generator=generator).to(dtype).unbind()
    located = documents.Documents((6, 6), torch.tensor([0, 6, 12], dtype=torch.int32))
    torch.manual_seed(1)
    output, _ = documents.attend(module, *(torch.cat([part] * 2, dim=2) for part in (query, key, value)), located, **options)
    torch.manual_seed(1)
    expected = [sdpa_attention_forward(module, query, key, value, None, is_causal=True, **options)[0] for _ in range(2)]
    torch.testing.assert_close(output, torch.cat(expected, dim=1), rtol=0, atol=0)
    assert torch.equal(*expected) == (options["dropout"] == 0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_on_a_gpu_dropout_is_not_left_to_the_kernel_that_has_none(dropout):
    place = "transformers.integrations.sdpa_attention.sdpa_attention_forward"
    with FakeTensorMode(), patch.object(documents, "_varlen") as kernel, patch(place) as sdpa:
        sdpa.return_value = torch.empty(1, 6, 2, 8), None
        query, key, value = torch.empty(3, 1, 2, 6, 8, device="cuda").unbind()
        located = documents.Documents((6,), torch.empty(2, dtype=torch.int32))
        documents.attend(torch.nn.Module(), query, key, value, located, dropout=dropout)
    assert (kernel.called, sdpa.called) == (not dropout, bool(dropout))


@pytest.mark.parametrize("window", [None, 4])
def test_the_installed_varlen_kernel_takes_our_call(window):
    """On fake tensors torch's own operators check arguments and shapes, forward and backward."""
    with FakeTensorMode():
        query, key, value = (torch.empty(1, heads, 20, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        located = documents.Documents((5, 9, 6), torch.empty(4, dtype=torch.int32), window)
        output = documents._varlen(query, key, value, located, 0.5)
        assert output.shape == (1, 20, 4, 8)
        output.sum().backward()
        assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in (query, key, value))
    assert str(VARLEN) == SIGNATURE


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_flash_attention_gets_the_documents_and_searches_for_none(family, monkeypatch):
    """Without these four arguments it looks for packed rows in every block, which reads the device."""
    seen = []

    def flash(module, query, key, value, mask, **options):
        assert mask is None
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        seen.append([options[name].tolist() if isinstance(options[name], torch.Tensor) else options[name] for name in names])
        return sdpa_attention_forward(module, query, key, value, mask)

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash)
    model, rows = build_causal(family), build_rows()
    model.config._attn_implementation = "flash_attention_2"  # its setter does not look for the package
    chunked_loss.install(model)
    masks.install(model)
    for packs, starts in (([rows[:3], rows[3:]], [0, 5, 14, 28, 31]), ([[rows[2]]], [0, 14])):
        seen.clear()
        summed_loss(model, batch := CausalCollator(0, one_row=True).collate(packs))
        moved = move_to(torch.device("meta"), batch)  # lengths stay on the host
        assert moved["document_lengths"] == [row_end - row for row, row_end in itertools.pairwise(starts)]
        assert moved["document_starts"].is_meta and seen == [[starts, starts, 14, 14]] * 2, json.dumps(seen)


def test_compiled_blocks_do_not_compile_again_for_other_lengths():
    torch.compiler.reset()
    counter = CompileCounter()
    model = build("llama")
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, backend=counter)
    counts = []
    for step, lengths in enumerate([(5, 9, 14), (8, 3, 6, 2), (30, 4), (2, 2, 2, 2, 11), (7, 18, 5)]):
        rows = build_rows(lengths, seed=step)
        loss, gradients = take_loss_and_gradients(model, [rows])
        counts.append(counter.frame_count)
    # The second length makes the dimension dynamic.
    assert 0 < counts[0] < counts[1] == counts[-1]
    expected_loss, expected = take_loss_and_gradients(build("llama"), [rows])
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name.replace("_orig_mod.", "")], rtol=1e-4, atol=1e-6)


SAYS_BY_DOCUMENT = "sdpa, and packed rows document by document ({}): no mask, and no cost of full rows"


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_every_family_with_sdpa_attends_by_document(family):
    for device_type, settings in (("cpu", {}), ("cuda", {"attn_pdrop": 0.0} if family == "gpt2" else {})):
        model = causal_skeleton(family, **settings)
        why = documents.choose_packed_attention(model, None, device_type, torch.bfloat16)
        assert masks.attends_by_document(model) == (family != "gemma2")
        assert ("has no sdpa (a soft cap" in why) == (family == "gemma2")
        # What a checkpoint or an export says of it.
        assert model.config.to_dict() == causal_skeleton(family, **settings).config.to_dict()


@pytest.mark.parametrize(
    ("family", "settings", "changed", "reason"),
    [
        ("llama", {}, {"named": "sdpa"}, "model.attn_implementation is sdpa (leave it out"),
        ("llama", {}, {"dtype": torch.float32}, "bf16 and fp16 only"),
        ("llama", {}, {"is_one_graph": True}, "dynamo_use_fullgraph"),
        ("llama", {}, {"capability": (7, 5)}, "Ampere generation or later"),
        ("llama", {"attention_dropout": 0.1}, {}, "the model's is 0.1 (model.dropout 0"),
        ("gpt2", {}, {}, "the model's is 0.1 (model.dropout 0"),
        *(("llama", {"head_dim": size}, {}, f"head sizes of LlamaAttention ([{size}])") for size in (12, 512)),
        # Attention of its own, and heads of two sizes.
        *((family, {}, {}, "") for family in ("falcon", "bloom")),
        ("deepseek_v3", {"v_head_dim": 4}, {}, ""),
        # The oldest GPU and the largest head that the kernel takes.
        ("llama", {"head_dim": 256}, {"dtype": torch.float16}, None),
    ],
)
def test_other_packed_rows_get_a_dense_mask_and_the_reason_is_said(family, settings, changed, reason, monkeypatch):
    model = causal_skeleton(family, **settings)
    asked = {"named": None, "dtype": torch.bfloat16, "is_one_graph": False, "capability": (8, 0)} | changed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: asked["capability"])
    why = documents.choose_packed_attention(model, asked["named"], "cuda", asked["dtype"], is_one_graph=asked["is_one_graph"])
    assert masks.attends_by_document(model) == (why == "") == (reason is None)
    if why:
        assert reason in why and why in str(documents.warn_of_full_rows(model, why))


@pytest.mark.parametrize(
    ("name", "is_encoder_decoder", "packing", "dtype", "on_gpu"),
    [
        ("sdpa", False, False, torch.bfloat16, "sdpa, the flash kernel"),
        ("sdpa", False, False, torch.float32, "sdpa in fp32: the memory-efficient kernel"),
        ("sdpa", False, True, torch.bfloat16, "sdpa with a dense mask, which keeps packed rows apart: no flash kernel"),
        ("sdpa", True, False, torch.bfloat16, "sdpa with a dense mask, which has padding or position biases: no flash kernel"),
        *((name, False, True, torch.bfloat16, name) for name in ("eager", "flex_attention", "flash_attention_2")),
        ("documents", False, True, torch.bfloat16, SAYS_BY_DOCUMENT.format("torch's varlen kernel")),
    ],
)
def test_a_run_says_which_attention_kernel_runs(name, is_encoder_decoder, packing, dtype, on_gpu):
    model = torch.nn.Module()
    model.config = SimpleNamespace(_attn_implementation=name, is_encoder_decoder=is_encoder_decoder)
    for has_cudnn in (False, True):
        with cudnn_attention(has_cudnn):
            said = documents.describe_attention(model, torch.device("cuda", 0), dtype, packing=packing)
        is_taken = has_cudnn and name == "sdpa" and dtype == torch.bfloat16
        assert said.startswith(on_gpu) and said.endswith(" or cuDNN's") == is_taken
    on_cpu = SAYS_BY_DOCUMENT.format("one causal sdpa each") if name == "documents" else name
    assert documents.describe_attention(model, torch.device("cpu"), dtype, packing=packing) == on_cpu
    assert documents.warn_of_full_rows(model, "") is None
    assert masks.attends_by_document(model) == (name in ("documents", "flash_attention_2"))


VARLEN = inspect.signature(varlen.varlen_attn)
SIGNATURE = (
    "(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor | None, "
    "max_q: int, max_k: int, *, return_aux: torch.nn.attention.varlen.AuxRequest | None = None, scale: float | None = None, "
    "window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: torch.Tensor | None = None, "
    "block_table: torch.Tensor | None = None, num_splits: int | None = None) -> "
    "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
)
GIVEN = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa")


def plain_varlen_attn(*args, **options) -> torch.Tensor:
    """Stands in for torch's: scores, mask and softmax in plain torch, for each document, as its docstring describes them."""
    given = VARLEN.bind(*args, **options).arguments
    assert tuple(given) == GIVEN
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa = given.values()
    assert cu_seq_k is cu_seq_q and max_k == max_q and cu_seq_q.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    starts = cu_seq_q.tolist()
    assert max_q == max(end - start for start, end in itertools.pairwise(starts))
    before, after = window_size
    outputs = []
    for start, end in itertools.pairwise(starts):
        q_HLD, k_HLD, v_HLD = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        scores_HLL = q_HLD @ k_HLD.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        distance_LL = torch.arange(end - start)[:, None] - torch.arange(end - start)
        is_seen_LL = ((before < 0) | (distance_LL <= before)) & ((after < 0) | (-distance_LL <= after))
        outputs.append((scores_HLL.masked_fill(~is_seen_LL, -torch.inf).softmax(-1) @ v_HLD).transpose(0, 1))
    return torch.cat(outputs)
