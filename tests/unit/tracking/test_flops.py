"""FLOPs of rows: those of the formula, and those that torch counts in the real forward and backward of its rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support import seq2seq_families
from tests.support.model_folders import FAMILIES
from tests.support.tiny_models import build_causal
from toolkit.data.collate import CausalCollator
from toolkit.models.patches import chunked_loss
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.models.patches.experts import experts_by_token
from toolkit.models.quantized import quantize_layers
from toolkit.models.tensor_reader import copy_on_meta
from toolkit.objectives.causal import Causal
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.tracking.flops import count_per_term, find_peak_tflops, seconds_at_peak

LENGTHS = np.array([30, 7, 12]), np.array([9, 3, 11])
"""Tokens and labels, or source and target tokens; none is among those that are counted."""
D, V, LAYERS, FORWARD = 32, 256, 2, 64


def build(family: str, **changes):
    return seq2seq_families.build_model(family) if family in FAMILIES else build_causal(family, **changes)


def objective_of(model):
    return Seq2Seq() if model.config.is_encoder_decoder else Causal()


def collator_of(model):
    return objective_of(model).build_collator(model, 0)


@pytest.fixture
def a100(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")


def sharded(device: str, skeleton):
    return SimpleNamespace(accelerator=SimpleNamespace(device=torch.device(device)), skeleton=skeleton)


def per_term_of(model) -> list[float]:
    return count_per_term(objective_of(model), copy_on_meta(model), collator_of(model)).tolist()


def test_each_kind_of_block_runs_once_for_each_length(monkeypatch):
    """Gemma 2 has two kinds of layers in turn. A frozen layer, and one before which nothing trains, are other kinds."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

    calls, forward = [], Gemma2DecoderLayer.forward

    def counted(self, *args, **inputs):
        calls.append(self)
        return forward(self, *args, **inputs)

    monkeypatch.setattr(Gemma2DecoderLayer, "forward", counted)
    num_lengths = 4
    two, four, twelve = (np.array(per_term_of(build("gemma2", num_hidden_layers=layers))) for layers in (2, 4, 12))
    assert len(calls) == 3 * 2 * num_lengths
    np.testing.assert_allclose(twelve - two, 5 * (four - two), rtol=1e-9, atol=1e-3)
    calls.clear()
    model = build("gemma2", num_hidden_layers=6)
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    frozen = np.array(per_term_of(model))
    assert len(calls) == 5 * num_lengths
    assert frozen[1] == pytest.approx(two[1] / 3 + 2 * two[1])


def test_llama_by_hand_and_a_frozen_base_costs_two_thirds_and_its_adapter_all():
    import peft

    model = build("llama")
    rank, few = 4, D // 2  # outputs of keys and values: 2 heads in place of 4
    shapes = [(D, D), (D, few), (D, few), (D, D), (D, FORWARD), (D, FORWARD), (FORWARD, D)]
    frozen = LAYERS * sum(inputs * outputs for inputs, outputs in shapes)
    whole = [0, 6 * frozen, 6 * D * V, LAYERS * 3 * 4 * D / 2]
    assert per_term_of(model) == pytest.approx(whole, rel=1e-9, abs=1e-6)
    padded = CausalCollator(0, multiples=(24,), longest=(8192,))
    padded_too = count_per_term(objective_of(model), copy_on_meta(model), padded).tolist()
    assert padded_too == per_term_of(model), "padding of a run's batches does not count"
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear")).base_model.model
    adapter = LAYERS * rank * sum(inputs + outputs for inputs, outputs in shapes)
    # Before the first layer's queries, keys and values nothing trains, so their inputs need no gradient.
    first_inputs = D * (D + 2 * few) + 3 * rank * D
    per_term = per_term_of(adapted)
    assert per_term[1] == pytest.approx(4 * frozen + 6 * adapter - 2 * first_inputs)
    assert per_term[2] == pytest.approx(whole[2] * 2 / 3) and per_term[3] == pytest.approx(whole[3])
    # Codes cost what a plain frozen base does.
    wide, quantized = (copy_on_meta(build("llama", hidden_size=64, intermediate_size=128)) for _ in range(2))
    adapt = peft.LoraConfig(r=4, target_modules="all-linear")
    wide, quantized = (peft.get_peft_model(each, adapt).base_model.model for each in (wide, quantized))
    quantize_layers(quantized, "nf4")
    assert per_term_of(quantized) == pytest.approx(per_term_of(wide))


@pytest.mark.usefixtures("a100")
@pytest.mark.parametrize("family", ["t5", "bart", "gemma2", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_rows_of_other_lengths_cost_what_torch_counts_and_half_the_causal_pairs(family):
    model = build(family).train()
    model.set_attn_implementation("eager")
    collator = collator_of(model)
    of_rows = seconds_at_peak(objective_of(model), sharded("cuda", copy_on_meta(model)), collator, [LENGTHS])
    ours, per_term = of_rows.sum() * 312e12, per_term_of(model)
    chunked_loss.install(model)
    counted = 0
    for first, second in zip(*LENGTHS, strict=True):
        unlabelled = 0 if family in FAMILIES else first - second
        row = {"input_ids": [5] * first, "labels": [-100] * unlabelled + [5] * second}
        with FlopCounterMode(display=False) as counter, experts_by_token(model):
            summed_loss(model, collator.collate([[row]]))[0].backward()
        counted += counter.get_total_flops()
    halves = per_term[-1] * (LENGTHS[int(family in FAMILIES)] ** 2).sum()
    assert ours + halves == pytest.approx(counted, rel=1e-3)
    assert ours < 0.999 * counted


def test_a_gpu_that_the_table_does_not_name_or_a_part_of_one_has_no_peak():
    peaks = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA GeForce RTX 3090": 71, "Tesla T4": None}
    others = ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA RTX 3090 Ti", "NVIDIA L40", "NVIDIA A10G")
    peaks |= dict.fromkeys(others)
    assert {gpu: find_peak_tflops(gpu) for gpu in peaks} == peaks
    assert seconds_at_peak(Causal(), sharded("cpu", copy_on_meta(build("llama"))), CausalCollator(0), [LENGTHS]) is None


@pytest.mark.usefixtures("a100")
def test_a_model_that_cannot_be_counted_or_pads_by_itself_is_one_line(capsys):
    assert seconds_at_peak(Causal(), sharded("cuda", torch.nn.Linear(2, 2)), CausalCollator(0), [LENGTHS]) is None
    assert capsys.readouterr().out.startswith("the log has no MFU: the FLOPs of Linear could not be counted (")
    model = seq2seq_families.build_model("pegasus_x")
    assert seconds_at_peak(objective_of(model), sharded("cuda", copy_on_meta(model)), collator_of(model), [LENGTHS]) is None
    assert "could not be counted (a row's are not a polynomial of its lengths)" in capsys.readouterr().out
