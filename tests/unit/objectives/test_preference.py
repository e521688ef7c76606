"""Losses of pairs beside those that `verify` writes out and TRL's values; batches of pairs. By encoder-decoders: beside plain
code, a row at a time; rows and models that do not fit."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support import seq2seq_families
from tests.support.model_folders import build_model_folders
from tests.support.preference_golden import BETA, FILE, MARGIN, PAIRS, SMOOTHING, build_model
from tests.support.refusals import refusal
from toolkit.config.data import Seq2SeqPreferenceDataConfig
from toolkit.config.schema import ModelConfig, OptimConfig, PreferenceLossConfig
from toolkit.loss import IGNORED_LABEL
from toolkit.models.patches import chunked_loss, masks
from toolkit.objectives.preference import PairCollator, Preference, Seq2SeqPreference
from toolkit.objectives.preference_losses import LOSSES, Answers
from toolkit.objectives.reference import Reference, _load
from toolkit.tools.verify.plain import pair_loss

LOGPS, REFERENCE, LENGTHS = ((-4.0, -5.0), (-9.0, -2.0)), ((-4.5, -4.0), (-8.0, -3.0)), ((3, 5), (6, 1))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_loss_is_its_formula(loss, share):
    """As it is written out for `verify`, by which it compares."""
    answers = Answers(*(torch.tensor(values, dtype=torch.float64) for values in (LOGPS, REFERENCE, LENGTHS)))
    settings = PreferenceLossConfig(loss=loss, beta=BETA, label_smoothing=share, margin=MARGIN)
    expected = [pair_loss(settings, *parts).item() for parts in zip(*answers, strict=True)]
    assert LOSSES[loss](answers, settings).tolist() == pytest.approx(expected, rel=1e-9)


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
    """The loss of pairs in these packs and its other sums, with the second model as reference."""
    trained, of_reference = map(build_model, (0, 1))
    for model in (trained, of_reference):
        chunked_loss.install(model)
    known = objective.answers_of(of_reference, PairCollator(0).collate(packs)).logps_P2.numpy()
    ids = np.array([row["row_id"] for pack in packs for row in pack])
    loss_sum, sums = objective.loss(trained, PairCollator(0, reference=Reference(ids, known)).collate(packs))
    return loss_sum.item(), sums.tolist()


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
    # A dummy has no loss, but gradients of every parameter.
    chunked_loss.install(model := build_model(0))
    loss_sum, sums = objective.loss(model, PairCollator(0).collate([[rows()[0]]], is_dummy=True))
    loss_sum.backward()
    assert loss_sum.item() == 0 and not sums.any()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def config_of(optim: OptimConfig | None = None, **preference) -> SimpleNamespace:
    model = ModelConfig(name_or_path="m")
    return SimpleNamespace(model=model, optim=optim or OptimConfig(), preference=PreferenceLossConfig(**preference))


def test_settings_and_models_that_do_not_fit_are_refused():
    for preference, expected in (
        ({"loss": "kto"}, "preference.loss is kto: choose one of sigmoid, robust, ipo, simpo, orpo"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "preference.label_smoothing is 0.1, but ipo has none: leave it out"),
        ({"margin": 2.0}, "preference.margin is 2.0, but sigmoid has none: leave it out"),
        ({"loss": "orpo", "reference": "m"}, "preference.reference is m, but orpo has none: leave it out"),
        ({"label_smoothing": 0.5}, "preference.label_smoothing is 0.5, so most pairs would be wrong: give less than 0.5"),
    ):
        assert refusal(Preference, config_of(**preference)) == expected
    expected = "optim.router_aux_loss knows no pairs, whose answers are documents of their own: leave it out"
    assert refusal(Preference, config_of(OptimConfig(router_aux_loss="document"))) == expected
    t5, llama = (SimpleNamespace(model_type=kind, is_encoder_decoder=kind == "t5") for kind in ("t5", "llama"))
    expected = "model.name_or_path m is a t5 model, an encoder-decoder: start recipes/dpo_t5.py, or write recipe: dpo_t5"
    assert refusal(Preference().check_model_config, t5, config_of().model) == expected
    expected = "model.name_or_path m is a llama model, not an encoder-decoder: start recipes/dpo.py, or write recipe: dpo"
    assert refusal(Seq2SeqPreference().check_model_config, llama, config_of().model) == expected
    expected = "preference.reference /gone is not a folder here: give an existing folder or a hub id"
    assert refusal(_load, config_of(reference="/gone"), Preference(), None, None) == expected


SOURCE_PAIRS = [
    {"row_id": 3, "input_ids": [5, 6, 7, 8, 9, 1], "chosen": [11, 12, 13, 1], "rejected": [14, 1]},
    {"row_id": 7, "input_ids": [20, 21, 1], "chosen": [22, 1], "rejected": [23, 24, 25, 26, 1]},
    {"row_id": 9, "input_ids": [30, 31, 32, 33, 1], "chosen": [34, 35, 1], "rejected": [35, 34, 1]},
]
SOURCE_ROWS = [
    {"row_id": pair["row_id"], "input_ids": pair["input_ids"], "labels": pair["chosen"] + pair["rejected"]}
    | {"num_chosen_tokens": len(pair["chosen"])}
    for pair in SOURCE_PAIRS
]
KNOWN = Reference(np.array([3, 7, 9]), np.array([[-18.0, -9.5], [-10.0, -25.0], [-16.0, -15.0]], dtype=np.float32))
DEFAULT_BETA = 0.1


def plain_logp(model, shift, source: list[int], target: list[int]) -> torch.Tensor:
    labels_1T = torch.tensor([target])
    decoder_inputs_1T = shift(labels_1T.clone())
    logits_TV = model(input_ids=torch.tensor([source]), decoder_input_ids=decoder_inputs_1T, use_cache=False).logits[0]
    return torch.log_softmax(logits_TV, dim=-1)[torch.arange(len(target)), labels_1T[0]].sum()


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["t5", "bart", "mbart", "pegasus", "led", "fsmt", "encoder-decoder"])
def test_one_encoding_serves_both_targets_as_in_plain_code_a_row_at_a_time(family):
    model = seq2seq_families.build_model(family)
    objective = Seq2SeqPreference()
    collator = objective.build_collator(model, model.config.pad_token_id or 0)
    targets = [(pair["input_ids"], pair[name]) for pair in SOURCE_PAIRS for name in ("chosen", "rejected")]
    logps_P2 = torch.stack([plain_logp(model, collator.decoder_inputs, *target) for target in targets]).view(-1, 2)
    ratios_P2 = logps_P2 - torch.from_numpy(KNOWN.logps_R2)
    expected = -torch.nn.functional.logsigmoid(DEFAULT_BETA * (ratios_P2[:, 0] - ratios_P2[:, 1])).sum()
    expected.backward()
    theirs = gradients(model)
    model.zero_grad()

    chunked_loss.install(model)
    masks.install(model)
    encoded: list[int] = []
    model.get_encoder().register_forward_hook(lambda module, args, output: encoded.append(len(output[0])))
    known = dataclasses.replace(collator, reference=KNOWN)
    loss_sum, sums = objective.loss(model, known.collate([[row] for row in SOURCE_ROWS]))
    loss_sum.backward()

    assert encoded == [3]
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums[-2:].tolist() == pytest.approx(logps_P2.sum(0).tolist(), rel=1e-5)
    ours = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    model.zero_grad()
    loss_sum, sums = objective.loss(model, known.collate([[SOURCE_ROWS[0]]], is_dummy=True))
    loss_sum.backward()
    assert loss_sum.item() == 0 and not sums.any() and gradients(model).keys() == theirs.keys()


def test_rows_hold_both_targets_and_what_is_cut_or_equal_is_said(tmp_path):
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build_model_folders(tmp_path, ["t5"])["t5"])
    config = Seq2SeqPreferenceDataConfig(files="a.jsonl", prefix="say: ", max_source_length_tokens=8, max_target_length_tokens=4)
    texts = {"prompt": ["read the file", "read"], "completion": ["open it now please", "a"], "rejected": ["no", "b"]}
    rows: dict[str, list] = {"row_id": [0, 1], "messages": [None, None], "lead_text": ["", ""], **texts}
    columns = Seq2SeqPreference().tokenize(rows, tokenizer, config, [("a.jsonl", 2)])
    for place in (0, 1):
        answers = [texts[name][place] for name in ("completion", "rejected")]
        ids = [tokenizer(text_target=text, truncation=True, max_length=4)["input_ids"] for text in answers]
        source = tokenizer("say: " + texts["prompt"][place], truncation=True, max_length=8)["input_ids"]
        assert list(columns["labels"][place]) == ids[0] + ids[1] and columns["input_ids"][place] == source
        assert columns["num_chosen_tokens"][place] == len(ids[0]) and columns["num_label_tokens"][place] == 1
        assert columns["num_tokens"][place] == len(source) + len(ids[0]) + len(ids[1])
        assert columns["num_answer_tokens"][place] == len(ids[0]) + len(ids[1])
    rows["messages"][1] = [{"role": "user", "content": "a"}]
    expected = "a.jsonl, row 2: a pair of lists of messages, and an encoder-decoder takes texts: give texts"
    assert refusal(Seq2SeqPreference().tokenize, rows, tokenizer, config, [("a.jsonl", 2)]) == expected
    of_chat = SimpleNamespace(train=Dataset.from_dict({"prompt": [None, "read"], "completion": [None, "a"]}))
    assert Seq2SeqPreference().describe(tokenizer, of_chat) == []  # comes before
