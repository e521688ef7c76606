"""Functions given to a run, against its config; a loss sees all logits with their labels, and must sum over the label tokens."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.tiny_models import build_causal
from toolkit import UserError, load_config
from toolkit.data.collate import CausalCollator
from toolkit.evaluation.metrics import describe_code
from toolkit.loss import IGNORED_LABEL, summed_cross_entropy
from toolkit.models.patches import chunked_loss
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.training.user_functions import UserHooks, check_hooks, check_own_loss, summed_own_loss

NEEDED = {"model.name_or_path": "model", "train.max_steps": 2, "data.source": "some/rows"}


TEXTS = "score generated texts: set eval.generate to true$"


@pytest.mark.parametrize(
    ("overrides", "own", "sentence"),
    [
        ({"optim.label_smoothing": 0.1}, {"loss": lambda *_: None}, "optim.label_smoothing is 0.1, but loss takes the place of"),
        ({"eval.generate": False}, {"metrics": {"length": len}}, f"metrics length {TEXTS}"),
        ({"eval.generate": False, "eval.metrics": ["chrf"]}, {}, f"metrics chrf {TEXTS}"),
        ({}, {"metrics": ["chrf"]}, r"metrics is \['chrf'\]: give functions by their names; eval.metrics names modules$"),
        ({}, {"after_step": 3}, "after_step is a int, and cannot be called: give a function$"),
        ({}, {"metrics": {"bleu": "bleu"}}, r"metrics\['bleu'\] is a str, and cannot be called"),
    ],
)
def test_functions_that_do_not_fit_are_refused(overrides, own, sentence):
    with pytest.raises(UserError, match=f"^{sentence}"):
        check_hooks(load_config("t5", overrides=NEEDED | overrides), UserHooks(**own), Seq2Seq())


def test_code_is_known_by_its_source():
    def length(predictions: list[str], references: list[str]) -> int:
        return sum(map(len, predictions))

    first = describe_code(length)

    def length(predictions: list[str], references: list[str]) -> int:
        return sum(map(len, references))

    assert describe_code(length) != first and describe_code(length).rsplit(" ")[0] == first.rsplit(" ")[0]
    assert describe_code(len) == "len"


def test_cross_entropy_as_ones_own_loss_is_the_toolkits():
    model = build_causal("llama")
    chunked_loss.install(model)
    rows = [{"input_ids": [3, 4, 5, 6], "labels": [-100, -100, 5, 6]}, {"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}]
    for packs in ([rows], [[row] for row in rows]):
        batch = CausalCollator(0).collate(packs)
        expected, _ = summed_loss(model, batch)
        actual = summed_own_loss(model, batch, "input_ids", summed_cross_entropy)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    dummy = CausalCollator(0).collate([rows], is_dummy=True)
    assert summed_own_loss(model, dummy, "input_ids", summed_cross_entropy).item() == 0


def focal(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    nats_N = F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return ((1 - (-nats_N).exp()) ** 2 * nats_N).sum()


def mean(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def no_scalar(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="none")


def of_ignored_labels_too(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten().clamp(min=0), reduction="sum")


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (mean, "loss of twice the rows is (.*), and of the rows once \\1: return the sum over the label tokens, not their mean$"),
        (no_scalar, r"loss returned a tensor of shape \(10,\): return a scalar tensor that depends on the logits$"),
        (lambda *_: 3.0, "loss returned float: return a scalar"),
        (of_ignored_labels_too, "loss of rows without a label token is .*, not 0: leave out the labels that are -100$"),
    ],
)
def test_what_is_no_sum_over_label_tokens_is_refused(loss, sentence):
    for sums in (focal, summed_cross_entropy):
        check_own_loss(sums, 11, torch.device("cpu"))
    with pytest.raises(UserError, match=f"^the {sentence}"):
        check_own_loss(loss, 11, torch.device("cpu"))
