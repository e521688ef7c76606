"""Summaries and translations by an encoder-decoder: a row is a source with its target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.config.task import Task
from toolkit.data.collate import SummarizationCollator
from toolkit.data.rows.columns import choose_seq2seq_columns
from toolkit.data.tokens import seq2seq
from toolkit.errors import UserError
from toolkit.models.config import special_tokens
from toolkit.private import private
from toolkit.training.model_checks import check_seq2seq_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _check_model_config(model_config: PretrainedConfig, name: str) -> None:
    """Refuse a model that takes more than text, such as `audio` or `image`."""
    from transformers import AutoModelForSeq2SeqLM

    if type(model_config) in (mapping := private("_model_mapping", AutoModelForSeq2SeqLM)):
        # SeamlessM4T's text model is only a part of it, but declares text alone.
        has_speech = hasattr(model_config, "speech_encoder_layers")
        modalities = "audio" if has_speech else mapping[type(model_config)].input_modalities
        if others := sorted(set([modalities] if isinstance(modalities, str) else modalities) - {"text"}):
            what = f"model.name_or_path {name} is a {model_config.model_type} model, which takes {' and '.join(others)}"
            raise UserError(f"{what} beside text, and rows here are text: take a model of text alone")
    special_tokens(model_config, name)


TASK = Task(
    auto_class="AutoModelForSeq2SeqLM",
    takes="an encoder-decoder that generates text: take one such as T5, BART or Pegasus",
    pipeline_tag="summarization",
    sides={"source": "max_source_length_tokens", "target": "max_target_length_tokens"},
    lengths=lambda num_tokens, num_labels: (num_tokens - num_labels, num_labels),
    choose_columns=choose_seq2seq_columns,
    tokens=seq2seq,
    # It pads as the model's config says. The model's own function reads only its config: it may be on the meta device.
    build_collator=lambda model, _: SummarizationCollator(
        *special_tokens(model.config, str(model.name_or_path)), getattr(model, "prepare_decoder_input_ids_from_labels", None)
    ),
    check_model_config=_check_model_config,
    check_model=lambda sharded, collator, config: check_seq2seq_model(sharded, collator, config.eval),
)
