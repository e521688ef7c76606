"""Every encoder-decoder that `AutoModelForSeq2SeqLM` names has the model's own loss, or is refused.

`tests/recipes/test_families.py` trains and exports them.
"""

from pathlib import Path

import pytest

from tests.support.launch import run_on_ranks
from tests.support.model_folders import FAMILIES
from tests.support.refusals import refusal
from tests.support.seq2seq_families import IN_PROCESS, REFUSED, build_collator, build_model


def test_the_list_of_families_is_whole():
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as NAMED

    launched = {getattr(transformers, config_class).model_type for config_class, _ in FAMILIES.values()}
    with_images = "t5gemma2"  # which a test of `tests/families` trains and exports
    assert sorted([*launched, *IN_PROCESS, with_images, *REFUSED]) == sorted(NAMED), "each is run or refused, once"


def test_loss_is_the_model_s_own_in_every_family(tmp_path):
    (losses,) = run_on_ranks(own_and_our_losses, preset="single", overrides={"mixed_precision": "no"}, args=(tmp_path,))
    assert set(losses) == {*FAMILIES, *IN_PROCESS}
    assert {family: ours for family, (ours, _) in losses.items()} == {
        family: pytest.approx(own, rel=1e-6) for family, (_, own) in losses.items()
    }


def test_audio_experts_and_losses_of_several_tokens_are_refused(tmp_path):
    (errors,) = run_on_ranks(refusals, preset="single_cpu", args=(tmp_path,))
    expected = REFUSED | {"ngrams": "predicts 2 tokens at once (ngram)"}
    assert set(errors) == set(expected)
    assert {family: error for family, error in errors.items() if expected[family] not in error} == {}
    assert "set disable_ngram_loss true" in errors["ngrams"]


def test_an_evaluation_that_would_die_is_refused_before_training():
    for error in run_on_ranks(check_without_casts, preset="fsdp2_cpu", overrides={"mixed_precision": "bf16"}):
        assert "M2M100ForConditionalGeneration cannot be evaluated here (" in error and "eval.unshard never" in error


def own_and_our_losses(folder: Path) -> dict[str, tuple[float, float]]:
    """`(ours, the model's own)` of the same labels, by family; its config passes the recipe's checks."""
    import torch

    from toolkit.config.schema import ModelConfig
    from toolkit.data.collate import labels_at_positions
    from toolkit.models.config import load_model_config
    from toolkit.models.patches import chunked_loss
    from toolkit.models.patches.chunked_loss import summed_loss
    from toolkit.objectives.seq2seq import Seq2Seq

    rows = [
        {"input_ids": [5, 6, 7, 8, 9, 10, 11], "labels": [9, 20, 21, 2]},
        {"input_ids": [9, 12], "labels": [9, 30, 31, 2, 4, 5]},
    ]
    losses = {}
    for family in (*FAMILIES, *IN_PROCESS):
        model = build_model(family)
        model.config.save_pretrained(folder / family)
        chunked_loss.install(model)
        load_model_config(ModelConfig(name_or_path=str(folder / family), from_scratch=True), Seq2Seq())
        collator = build_collator(model)
        batch = collator.collate([[row] for row in rows])
        # FSMT makes decoder inputs of the source where it gets none: they are given, as transformers' own collator gives them.
        shifted = {"decoder_input_ids": batch["decoder_input_ids"]} if family == "fsmt" else {}
        with torch.no_grad():
            own = model(
                **collator.prompts(rows),
                **shifted,
                labels=labels_at_positions(batch, batch["decoder_input_ids"]),
                use_cache=False,
            ).loss
            losses[family] = (summed_loss(model, batch)[0].item() / 10, own.item())
    return losses


def refusals(folder: Path) -> dict[str, str]:
    """What each family is refused for, by its config or its structure."""
    from transformers import CONFIG_MAPPING, ProphetNetConfig

    configs = {family: CONFIG_MAPPING[family](decoder_start_token_id=0) for family in REFUSED}
    configs["ngrams"] = ProphetNetConfig(ngram=2)
    return {family: refusal(check_family, config, folder / family) for family, config in configs.items()}


def check_family(config, folder: Path) -> None:
    from toolkit.config.schema import ModelConfig
    from toolkit.models.config import load_model_config
    from toolkit.models.experts import check_experts
    from toolkit.models.load import build_skeleton
    from toolkit.objectives.seq2seq import Seq2Seq

    config.save_pretrained(folder)
    of_run = ModelConfig(name_or_path=str(folder), from_scratch=True)
    check_experts(build_skeleton(of_run, load_model_config(of_run, Seq2Seq()), Seq2Seq()), str(folder))


def check_without_casts() -> str:
    """The check's error for M2M-100 when nothing casts the fp32 positions in its bf16 copy."""
    from unittest.mock import patch

    from toolkit.config.schema import EvalConfig
    from toolkit.launch.accelerator import build_accelerator
    from toolkit.objectives.model_checks import check_seq2seq_model
    from toolkit.parallel import gather
    from toolkit.parallel.wrap import shard_model

    model = build_model("m2m_100")
    sharded = shard_model(build_accelerator(), model)
    with patch.object(gather, "cast_inputs", lambda dtype, block, args, kwargs: (args, kwargs)):
        return refusal(check_seq2seq_model, sharded, build_collator(model), EvalConfig())
