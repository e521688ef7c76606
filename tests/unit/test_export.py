"""An export is held against the trained weights before it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from toolkit.export import _compare

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors, Tensors]:
    """A model folder, its weights, and inputs with the logits for them."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2)).eval()
    folder = tmp_path_factory.mktemp("export")
    model.save_pretrained(folder)
    tokens_BT = torch.arange(8).view(2, 4)
    inputs = {"input_ids": tokens_BT, "attention_mask": torch.ones_like(tokens_BT), "decoder_input_ids": tokens_BT}
    with torch.no_grad():
        logits_BTV = model(**inputs, use_cache=False).logits
    return folder, {name: p.detach().clone() for name, p in model.named_parameters()}, {**inputs, "logits": logits_BTV}


def test_the_trained_weights_pass(exported: tuple[Path, Tensors, Tensors], capsys: pytest.CaptureFixture[str]) -> None:
    folder, weights, check = exported
    _compare(weights, check, folder, torch.float32)
    assert "differ" not in capsys.readouterr().out


def test_every_trained_weight_must_be_there_bit_for_bit(exported: tuple[Path, Tensors, Tensors]) -> None:
    folder, weights, check = exported
    with pytest.raises(RuntimeError, match="adapter.weight is not what was trained"):
        _compare({**weights, "adapter.weight": torch.zeros(1)}, check, folder, torch.bfloat16)
    changed = weights["shared.weight"].clone()
    changed[3, 2] += 1e-6
    with pytest.raises(RuntimeError, match="shared.weight is not what was trained"):
        _compare({**weights, "shared.weight": changed}, check, folder, torch.bfloat16)


def test_other_logits_are_an_error_in_fp32_and_a_remark_in_bf16(
    exported: tuple[Path, Tensors, Tensors], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, weights, check = exported
    other = {**check, "logits": check["logits"] * 1.2}
    with pytest.raises(RuntimeError, match=r"differ by 1.67e-01 of the largest, more than 0.0001$"):
        _compare(weights, other, folder, torch.float32)
    _compare(weights, other, folder, torch.bfloat16)
    assert "differ by 1.67e-01 of the largest, more than 0.05; its weights are bit for bit" in capsys.readouterr().out
