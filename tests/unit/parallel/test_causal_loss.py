"""The loss inside a causal model's forward: that of its own logits, packed or not, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.model_folders import CAUSAL_FAMILIES
from toolkit.data.collate import CausalCollator
from toolkit.loss import summed_cross_entropy, summed_loss
from toolkit.parallel import causal_loss

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
    causal_loss.install(model)
    monkeypatch.setattr(causal_loss, "MAX_LOGITS_AT_ONCE", 7 * VOCAB_SIZE)  # several chunks, the last one smaller
    for packs in ([[row] for row in rows], [rows[:3], rows[3:]]):
        loss, _ = summed_loss(model, CausalCollator(0).collate(packs), smoothing)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        gradients = take_gradients(model)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            difference = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm().clamp(min=1e-6)
            assert difference < 1e-4, name


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_changing_a_row_changes_nothing_in_its_neighbours(family: str) -> None:
    model, rows = build_model(family), build_rows()
    causal_loss.install(model)
    others = [rows[0], build_rows(seed=1)[1], *rows[2:]]
    for row in (rows[1], others[1]):
        row["labels"] = [-100] * len(row["labels"])
    with torch.no_grad():
        losses = [summed_loss(model, CausalCollator(0).collate([packed]))[0] for packed in (rows, others)]
    assert rows[1]["input_ids"] != others[1]["input_ids"]
    assert torch.equal(*losses)


def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    causal_loss.install(model)
    monkeypatch.setattr(causal_loss, "MAX_LOGITS_AT_ONCE", 4 * VOCAB_SIZE)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.numel()))
    summed_loss(model, CausalCollator(0).collate([build_rows()]))[0].backward()
    num_labels = sum(LENGTHS) - len(LENGTHS)
    assert max(seen) == 4 * VOCAB_SIZE
    assert len(seen) == 2 * -(-num_labels // 4) - 1, "all chunks but the last are computed a second time"


def take_gradients(model: Any) -> dict[str, torch.Tensor]:
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return gradients
