"""Losses of pairs beside their written-out formulas and TRL's values; batches of pairs; what is left out."""

import json
import math

import numpy as np
import pytest
import torch

from tests.support.preference_golden import BETA, FILE, MARGIN, PAIRS, SMOOTHING, build_model
from tests.support.refusals import refusal
from toolkit.config.schema import OptimConfig, PreferenceLossConfig
from toolkit.loss import IGNORED_LABEL
from toolkit.models.patches import chunked_loss
from toolkit.objectives.preference import PairCollator, Preference
from toolkit.objectives.preference_losses import LOSSES, SMOOTHED, Answers
from toolkit.objectives.reference import Reference
from toolkit.tools.verify.plain import pair_loss

LOGPS, REFERENCE, LENGTHS = ((-4.0, -5.0), (-9.0, -2.0)), ((-4.5, -4.0), (-8.0, -3.0)), ((3, 5), (6, 1))


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


def by_hand(loss: str, place: int, share: float) -> float:
    """The formula of the paper, for one pair."""
    (chosen, rejected), (of_chosen, of_rejected), (long, other) = LOGPS[place], REFERENCE[place], LENGTHS[place]
    margin = BETA * ((chosen - of_chosen) - (rejected - of_rejected))
    if loss == "sigmoid":
        return (1 - share) * softplus(-margin) + share * softplus(margin)
    if loss == "robust":
        return ((1 - share) * softplus(-margin) - share * softplus(margin)) / (1 - 2 * share)
    if loss == "ipo":
        return ((chosen - of_chosen) / long - (rejected - of_rejected) / other - 1 / (2 * BETA)) ** 2
    if loss == "simpo":
        gap = BETA * (chosen / long - rejected / other) - MARGIN
        return (1 - share) * softplus(-gap) + share * softplus(gap)
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (chosen / long, rejected / other)]
    return -chosen / long + BETA * softplus(-math.log(odds[0] / odds[1]))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_loss_is_its_formula(loss, share):
    answers = Answers(*(torch.tensor(values, dtype=torch.float64) for values in (LOGPS, REFERENCE, LENGTHS)))
    settings = PreferenceLossConfig(loss=loss, beta=BETA, label_smoothing=share, margin=MARGIN)
    expected = pytest.approx([by_hand(loss, place, share) for place in (0, 1)], rel=1e-9)
    assert LOSSES[loss](answers, settings).tolist() == expected
    if not share or loss in SMOOTHED:  # what `verify` compares with
        assert [pair_loss(settings, *parts).item() for parts in zip(*answers, strict=True)] == expected


def rows() -> list[dict]:
    made = []
    for number, pair in enumerate(PAIRS):
        documents = [pair["prompt"] + pair[name] for name in ("chosen", "rejected")]
        labels = [[IGNORED_LABEL] * len(pair["prompt"]) + pair[name] for name in ("chosen", "rejected")]
        ids = {"input_ids": np.concatenate(documents), "labels": np.concatenate(labels)}
        made.append({**ids, "num_chosen_tokens": len(documents[0]), "row_id": 10 * number})
    return made


def objective_of(loss: str, share: float = 0.0) -> Preference:
    objective = Preference()
    objective.settings = PreferenceLossConfig(loss=loss, beta=BETA, label_smoothing=share, margin=MARGIN)
    return objective


@torch.no_grad()
def compute(objective: Preference, packs: list) -> tuple[float, list[float]]:
    """The loss of pairs in these packs, with the second model as reference."""
    values = []
    collator = PairCollator(0)
    for seed in (1, 0):
        chunked_loss.install(model := build_model(seed))
        batch = collator.collate(packs)
        if seed:
            pairs = [row for pack in packs for row in pack]
            known = objective.answers_of(model, batch).logps_P2.numpy()
            order = np.argsort([row["row_id"] for row in pairs])
            ids = np.array([row["row_id"] for row in pairs])[order]
            collator = PairCollator(0, reference=Reference(ids, known[order]))
        else:
            loss_sum, sums = objective.loss(model, batch)
            values = [loss_sum.item(), sums.tolist()]
    return values[0], values[1]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_that_of_trl_for_each_pair_and_its_sum_for_a_pack(loss):
    golden, objective = json.loads(FILE.read_text())[loss], objective_of(loss, SMOOTHING if loss == "robust" else 0.0)
    alone = [compute(objective, [[row]])[0] for row in rows()]
    assert alone == pytest.approx(golden, rel=1e-5, abs=1e-7)  # IPO squares a difference that may be near 0
    (first, sums), (packed, sums_packed) = compute(objective, [[row] for row in rows()]), compute(objective, [rows()])
    assert [first, packed] == pytest.approx([sum(golden)] * 2, rel=1e-5) and sums_packed == pytest.approx(sums, rel=1e-5)
    figures = objective.metrics(first, sums, 3, 0)
    assert figures["loss"] == pytest.approx(sum(golden) / 3, rel=1e-5)
    assert figures["rewards/margins"] == pytest.approx(figures["rewards/chosen"] - figures["rewards/rejected"], rel=1e-4)


def test_a_dummy_has_no_loss_but_gradients_of_every_parameter():
    chunked_loss.install(model := build_model(0))
    for loss in LOSSES:
        loss_sum, sums = objective_of(loss).loss(model, PairCollator(0).collate([[rows()[0]]], is_dummy=True))
        loss_sum.backward()
        assert loss_sum.item() == 0 and not sums.any()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"optim": OptimConfig(router_aux_loss="document")},
            "optim.router_aux_loss knows no pairs, whose answers are documents of their own: leave it out",
        ),
        ({"loss": "kto"}, "preference.loss is kto: choose one of sigmoid, robust, ipo, simpo, orpo"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "preference.label_smoothing is 0.1, but ipo has none: leave it out"),
        ({"label_smoothing": 0.5}, "preference.label_smoothing is 0.5, so most pairs would be wrong: give less than 0.5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, expected):
    class Config:
        optim = settings.pop("optim", None)
        preference = PreferenceLossConfig(**settings)

    assert refusal(Preference, Config()) == expected
