"""Pairs of answers by encoder-decoders: beside plain code, a row at a time; rows and models that do not fit."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support import seq2seq_families
from tests.support.model_folders import build_model_folders
from tests.support.refusals import refusal
from toolkit.config.data import Seq2SeqPreferenceDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.models.patches import chunked_loss, masks
from toolkit.objectives.preference import Preference, Seq2SeqPreference
from toolkit.objectives.reference import Reference

PAIRS = [
    {"row_id": 3, "input_ids": [5, 6, 7, 8, 9, 1], "chosen": [11, 12, 13, 1], "rejected": [14, 1]},
    {"row_id": 7, "input_ids": [20, 21, 1], "chosen": [22, 1], "rejected": [23, 24, 25, 26, 1]},
    {"row_id": 9, "input_ids": [30, 31, 32, 33, 1], "chosen": [34, 35, 1], "rejected": [35, 34, 1]},
]
ROWS = [
    {"row_id": pair["row_id"], "input_ids": pair["input_ids"], "labels": pair["chosen"] + pair["rejected"]}
    | {"num_chosen_tokens": len(pair["chosen"])}
    for pair in PAIRS
]
REFERENCE = Reference(np.array([3, 7, 9]), np.array([[-18.0, -9.5], [-10.0, -25.0], [-16.0, -15.0]], dtype=np.float32))
BETA = 0.1


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
    targets = [(pair["input_ids"], pair[name]) for pair in PAIRS for name in ("chosen", "rejected")]
    logps_P2 = torch.stack([plain_logp(model, collator.decoder_inputs, *target) for target in targets]).view(-1, 2)
    ratios_P2 = logps_P2 - torch.from_numpy(REFERENCE.logps_R2)
    expected = -torch.nn.functional.logsigmoid(BETA * (ratios_P2[:, 0] - ratios_P2[:, 1])).sum()
    expected.backward()
    theirs = gradients(model)
    model.zero_grad()

    chunked_loss.install(model)
    masks.install(model)
    encoded: list[int] = []
    model.get_encoder().register_forward_hook(lambda module, args, output: encoded.append(len(output[0])))
    known = dataclasses.replace(collator, reference=REFERENCE)
    loss_sum, sums = objective.loss(model, known.collate([[row] for row in ROWS]))
    loss_sum.backward()

    assert encoded == [3]
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums[-2:].tolist() == pytest.approx(logps_P2.sum(0).tolist(), rel=1e-5)
    ours = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    model.zero_grad()
    loss_sum, sums = objective.loss(model, known.collate([[ROWS[0]]], is_dummy=True))
    loss_sum.backward()
    assert loss_sum.item() == 0 and not sums.any() and gradients(model).keys() == theirs.keys()


def test_rows_hold_both_targets_and_what_is_cut_or_equal_is_said(tmp_path):
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


def test_a_model_of_the_other_kind_is_refused_with_the_recipe_that_takes_it():
    name = ModelConfig(name_or_path="m")
    t5, llama = (SimpleNamespace(model_type=kind, is_encoder_decoder=kind == "t5") for kind in ("t5", "llama"))
    sentence = "model.name_or_path m is a t5 model, an encoder-decoder: start recipes/dpo_t5.py, or write recipe: dpo_t5"
    assert refusal(Preference().check_model_config, t5, name) == sentence
    sentence = "model.name_or_path m is a llama model, not an encoder-decoder: start recipes/dpo.py, or write recipe: dpo"
    assert refusal(Seq2SeqPreference().check_model_config, llama, name) == sentence
