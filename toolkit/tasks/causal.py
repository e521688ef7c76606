"""Texts, completions and chats by a causal model: a row is one sequence, some of whose tokens count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.config.task import Task
from toolkit.data.collate import CausalCollator
from toolkit.data.rows.columns import choose_columns
from toolkit.data.tokens import causal
from toolkit.errors import UserError
from toolkit.models.patches.documents import attends_by_document
from toolkit.private import private
from toolkit.training.model_checks import check_causal_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _check_model_config(model_config: PretrainedConfig, name: str) -> None:
    """Refuse a model like BART, of which only the decoder would train, or like BERT, whose tokens see later ones.

    transformers maps both kinds to causal models.
    """
    from transformers import AutoModelForMaskedLM

    is_decoder = getattr(model_config, "is_decoder", True)  # also False for GPT-NeoX, which does not use it
    is_masked = type(model_config) in private("_model_mapping", AutoModelForMaskedLM)
    if model_config.is_encoder_decoder or (is_masked and not is_decoder):
        raise UserError(f"model.name_or_path {name} is a {model_config.model_type} model, not {TASK.takes}")


TASK = Task(
    auto_class="AutoModelForCausalLM",
    takes="a causal language model: take one such as Llama, Qwen or Gemma",
    pipeline_tag="text-generation",
    sides={"row": "max_length_tokens"},
    lengths=lambda num_tokens, num_labels: (num_tokens,),
    choose_columns=choose_columns,
    tokens=causal,
    build_collator=lambda model, pad_token_id: CausalCollator(pad_token_id, one_row=attends_by_document(model)),
    check_model_config=_check_model_config,
    check_model=lambda sharded, collator, config: check_causal_model(sharded, collator, packing=config.packs),
)
