"""Functions given to a run, against its config; a loss sees all logits with their labels, and must sum over the label tokens.
The auxiliary loss of routers: its size is that of transformers, and models that cannot have it are refused; that it is exact
on any ranks is tested in `tests/distributed/test_mixtures.py`."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.support.model_folders import CAUSAL_FAMILIES, MIXTURES
from tests.support.tiny_models import build_causal
from toolkit import load_config
from toolkit.checkpoint.state import SkipHistory
from toolkit.config.schema import OptimConfig
from toolkit.data.batch_plan import Step
from toolkit.data.collate import CausalCollator
from toolkit.errors import UserError
from toolkit.evaluation.metrics import describe_code
from toolkit.loss import IGNORED_LABEL, count_routed, summed_balance_loss, summed_cross_entropy
from toolkit.models.experts import check_routers
from toolkit.models.patches import chunked_loss
from toolkit.models.patches.chunked_loss import summed_loss
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.training.router_loss import RouterLoss
from toolkit.training.skip_guard import SkipGuard
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


def cross_entropy(logits_BTV: torch.Tensor, labels_BT: torch.Tensor, **how) -> torch.Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), **how)


def focal(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    nats_N = cross_entropy(logits_BTV.float(), labels_BT, ignore_index=IGNORED_LABEL, reduction="none")
    return ((1 - (-nats_N).exp()) ** 2 * nats_N).sum()


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (
            cross_entropy,
            "loss of twice the rows is (.*), and of the rows once \\1: return the sum over the label tokens, not their mean$",
        ),
        (
            partial(cross_entropy, reduction="none"),
            r"loss returned a tensor of shape \(10,\): return a scalar tensor that depends on the logits$",
        ),
        (lambda *_: 3.0, "loss returned float: return a scalar"),
        (
            lambda logits_BTV, labels_BT: cross_entropy(logits_BTV, labels_BT.clamp(min=0), reduction="sum"),
            "loss of rows without a label token is .*, not 0: leave out the labels that are -100$",
        ),
    ],
)
def test_what_is_no_sum_over_label_tokens_is_refused(loss, sentence):
    for sums in (focal, summed_cross_entropy):
        check_own_loss(sums, 11, torch.device("cpu"))
    with pytest.raises(UserError, match=f"^the {sentence}"):
        check_own_loss(loss, 11, torch.device("cpu"))


NO_ROUTERS = "no routers of experts whose scores are known; or set it to off"
NO_COEFFICIENT = r"no router_aux_loss_coef above 0 in its config\.json: set it there, as in 0\.001; or set it to off"
WITH_THESE = {
    "Gemma4TextConfig": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "GraniteMoeHybridConfig": {"num_local_experts": 0, "mamba_n_heads": 4, "layer_types": ["attention", "attention"]},
}


def build(family: str, **changed):
    config_class, settings = {**CAUSAL_FAMILIES, **MIXTURES}.get(family) or (family, MIXTURES["mixtral"][1])
    config = getattr(transformers, config_class)(vocab_size=256, **settings | changed)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("family", "coefficient", "missing"),
    [
        ("llama", 0.5, NO_ROUTERS),
        ("mixtral", 0.0, NO_COEFFICIENT),
        ("deepseek_v3", None, NO_COEFFICIENT),
        ("PhimoeConfig", 0.5, NO_ROUTERS),  # scores of its own, by comparing experts
        ("Gemma4TextConfig", 0.5, NO_ROUTERS),  # its routers return probabilities
        ("GraniteMoeHybridConfig", 0.5, NO_ROUTERS),  # the class has routers, this model none
    ],
)
def test_a_model_without_what_it_needs_is_refused(family, coefficient, missing):
    model = build(family, router_aux_loss_coef=coefficient, **WITH_THESE.get(family, {}))
    with pytest.raises(UserError, match=f"^optim.router_aux_loss is global, but model.name_or_path here has {missing}$"):
        check_routers(model, "global", "here")
    check_routers(model, "off", "here")


def test_the_mixtures_that_train_are_taken():
    for family in MIXTURES:
        check_routers(build(family), "document", "here")


def test_where_all_tokens_are_one_group_it_is_the_loss_of_transformers_without_padding():
    logits_TE = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    documents_T, is_real_T = torch.tensor([1, 1, 0, 1, 1, 1, 0]), torch.tensor([1, 1, 0, 1, 1, 1, 0])
    scores_TE = logits_TE.softmax(dim=-1)
    counts_GE = count_routed(scores_TE.topk(2).indices, documents_T, 1, 4)
    assert counts_GE.sum() == 2 * 5
    actual = summed_balance_loss(scores_TE, counts_GE / 5, documents_T) / 5
    torch.testing.assert_close(actual, load_balancing_loss_func((logits_TE,), 4, 2, attention_mask=is_real_T[None]))


@pytest.mark.parametrize("setting", ["document", "global"])
def test_parts_and_figures_add_up_to_those_of_one_micro_batch(setting):
    """Rows of 5, 3 and 4 tokens and padding, through two layers, at once or one after another."""
    generator, documents = torch.Generator().manual_seed(0), [[1] * 5, [2] * 3 + [0] * 2, [3] * 4 + [0]]
    scores = [torch.randn(3, 5, 4, generator=generator).softmax(dim=-1) for _ in range(2)]
    whole, apart = (of_step(setting, scores, documents, cuts) for cuts in ([[0, 1, 2]], [[0], [1], [2]]))
    for actual, expected in zip(apart, whole, strict=True):
        torch.testing.assert_close(actual, expected)
    assert whole[1][:, 1:].sum(dim=1).tolist() == [2 * 12, 2 * 12]


def of_step(setting: str, scores: list[torch.Tensor], documents: list[list[int]], cuts) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step of these micro-batches adds to the loss, and its figures; each token goes to two experts."""
    loss = new_loss(num_tokens=12)
    if setting == "global":
        loss.shares_LE = torch.full((2, 4), 0.5)
    total = torch.tensor(0.0)
    for rows in cuts:
        taken = [of_layer[rows].flatten(0, 1) for of_layer in scores]
        loss.noted |= {f"layers.{layer}": [(of, of.topk(2).indices)] for layer, of in enumerate(taken)}
        numbers = torch.tensor([documents[row] for row in rows])
        numbers = torch.where(numbers > 0, numbers - rows[0], 0)  # they begin with 1 in each micro-batch
        micro_batch = SimpleNamespace(packs=[[row] for row in rows])
        total = total + loss.share(micro_batch, numbers)
    return total, loss.reduced_figures()


def test_figures_are_reduced_over_every_group(monkeypatch):
    """Under HSDP each rank is in two groups, which together reach all ranks."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda figures, group: figures.mul_(group))
    loss = new_loss(num_tokens=1, groups=[2, 3])
    loss.figures = torch.ones(1, 3)
    assert loss.reduced_figures().tolist() == [[6.0, 6.0, 6.0]]


def new_loss(num_tokens: int, groups: Sequence = ()) -> RouterLoss:
    sharded = SimpleNamespace(routes={}, unwrapped=SimpleNamespace(config=transformers.MixtralConfig(router_aux_loss_coef=0.5)))
    run = SimpleNamespace(sharded=sharded, guard=SkipGuard(OptimConfig(), SkipHistory(), groups))
    return RouterLoss(run, Step(1, 0, (0, 1, 2), num_tokens, num_tokens))
