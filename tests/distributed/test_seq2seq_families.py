"""Every encoder-decoder that `AutoModelForSeq2SeqLM` names has the model's own loss, or is refused.

`tests/recipes/test_families.py` trains and exports them.
"""

from unittest.mock import patch

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from tests.support.launch import run_on_ranks
from tests.support.model_folders import FAMILIES
from tests.support.refusals import refusal
from tests.support.seq2seq_families import IN_PROCESS, REFUSED, build_collator, build_model
from toolkit.config.schema import EvalConfig, ModelConfig
from toolkit.data.collate import labels_at_positions
from toolkit.launch.accelerator import build_accelerator
from toolkit.models.config import load_model_config
from toolkit.models.experts import check_experts
from toolkit.models.load import build_skeleton
from toolkit.models.patches import chunked_loss
from toolkit.objectives.model_checks import check_seq2seq_model
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.parallel import gather
from toolkit.parallel.wrap import shard_model

ROWS = [
    {"input_ids": [5, 6, 7, 8, 9, 10, 11], "labels": [9, 20, 21, 2]},
    {"input_ids": [9, 12], "labels": [9, 30, 31, 2, 4, 5]},
]


def test_the_list_of_families_is_whole():
    launched = {getattr(transformers, config_class).model_type for config_class, _ in FAMILIES.values()}
    with_images = "t5gemma2"  # which a test of `tests/families` trains and exports
    named = sorted(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    assert sorted([*launched, *IN_PROCESS, with_images, *REFUSED]) == named, "each is run or refused, once"


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, *IN_PROCESS])
def test_loss_is_the_model_s_own(tmp_path, family):
    """Of the same labels; its config passes the recipe's checks."""
    model = build_model(family)
    model.config.save_pretrained(tmp_path)
    chunked_loss.install(model)
    load_model_config(ModelConfig(name_or_path=str(tmp_path), from_scratch=True), Seq2Seq())
    collator = build_collator(model)
    batch = collator.collate([[row] for row in ROWS])
    # FSMT makes decoder inputs of the source where it gets none: they are given, as transformers' own collator gives them.
    shifted = {"decoder_input_ids": batch["decoder_input_ids"]} if family == "fsmt" else {}
    labels = labels_at_positions(batch, batch["decoder_input_ids"])
    own = model(**collator.prompts(ROWS), **shifted, labels=labels, use_cache=False).loss
    assert chunked_loss.summed_loss(model, batch)[0].item() / 10 == pytest.approx(own.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        *((family, {"decoder_start_token_id": 0}, sentence) for family, sentence in REFUSED.items()),
        (
            "prophetnet",
            {"ngram": 2},
            "predicts 2 tokens at once (ngram), so its loss is not that of its labels: set disable_ngram_loss true",
        ),
    ],
)
def test_audio_experts_and_losses_of_several_tokens_are_refused(tmp_path, family, settings, sentence):
    """By the config or the structure."""
    transformers.CONFIG_MAPPING[family](**settings).save_pretrained(tmp_path)
    of_run = ModelConfig(name_or_path=str(tmp_path), from_scratch=True)

    def check() -> None:
        check_experts(build_skeleton(of_run, load_model_config(of_run, Seq2Seq()), Seq2Seq()), str(tmp_path))

    assert sentence in refusal(check)


def test_an_evaluation_that_would_die_is_refused_before_training():
    for error in run_on_ranks(check_without_casts, preset="fsdp2_cpu", overrides={"mixed_precision": "bf16"}):
        assert "M2M100ForConditionalGeneration cannot be evaluated here (" in error and "eval.unshard never" in error


def check_without_casts() -> str:
    """The check's error for M2M-100 when nothing casts the fp32 positions in its bf16 copy."""
    model = build_model("m2m_100")
    sharded = shard_model(build_accelerator(), model)
    with patch.object(gather, "cast_inputs", lambda dtype, block, args, kwargs: (args, kwargs)):
        return refusal(check_seq2seq_model, sharded, build_collator(model), EvalConfig())
