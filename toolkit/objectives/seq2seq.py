"""Summaries and translations by an encoder-decoder: a row is a source with its target."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import ModelConfig, RecipeConfig
from toolkit.data.collate import Collator, SummarizationCollator
from toolkit.data.rows.columns import choose_seq2seq_columns
from toolkit.data.rows.example import Example
from toolkit.data.tokens import languages, seq2seq
from toolkit.errors import UserError
from toolkit.evaluation.generate import encoder_output_kept
from toolkit.evaluation.loop import text_figures
from toolkit.export.run_data import RunData
from toolkit.export.usage import TextUsage, Usage
from toolkit.models.config import special_tokens
from toolkit.models.generation import load_settings
from toolkit.objectives.model_checks import check_seq2seq_model
from toolkit.objectives.objective import Objective
from toolkit.parallel.wrap import ShardedModel
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class Seq2Seq(Objective):
    """The tokens of a target, given its source."""

    name = "seq2seq"
    auto_class = "AutoModelForSeq2SeqLM"
    takes = "an encoder-decoder that generates text: take one such as T5, BART or Pegasus"
    kind = "an encoder-decoder"
    limits = {"source": "max_source_length_tokens", "target": "max_target_length_tokens"}
    inputs = ("input_ids", "decoder_input_ids")
    label_side = "target"
    reported_columns = (*Objective.reported_columns, *seq2seq.REPORTED)
    trained = "unigram trained"

    choose_columns = staticmethod(choose_seq2seq_columns)
    set_up = staticmethod(seq2seq.set_up)
    list_settings = staticmethod(seq2seq.list_settings)
    train = staticmethod(seq2seq.train)
    describe = staticmethod(seq2seq.describe)
    tokenize = staticmethod(seq2seq.tokenize)
    report = staticmethod(seq2seq.report)
    metrics = staticmethod(text_figures)
    start_generation = staticmethod(languages.start_generation)
    forward_kept = staticmethod(encoder_output_kept)

    def lengths(self, num_tokens: Any, num_labels: Any) -> tuple[Any, ...]:
        return num_tokens - num_labels, num_labels

    def build_collator(self, model: PreTrainedModel, pad_token_id: int) -> Collator:
        # It pads as the model's config says. The model's own function reads only its config: it may be on the meta device.
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        return SummarizationCollator(*special_tokens(model.config, str(model.name_or_path)), shift)

    def build_row(self, num_tokens: int, num_labels: int, token: int) -> dict[str, Any]:
        return {"input_ids": [token] * num_tokens, "labels": [token] * num_labels}

    def check_model_config(self, model_config: PretrainedConfig, config: ModelConfig) -> None:
        """Refuse a model of speech; of images and texts, what a text's loss does not reach is frozen."""
        from transformers import AutoModelForSeq2SeqLM

        name = config.name_or_path
        if getattr(model_config, "decoder_start_token_id", None) is None:
            start = load_settings(config).get("decoder_start_token_id")
            vars(model_config).update({} if start is None else {"decoder_start_token_id": start})
        if type(model_config) in (mapping := private("_model_mapping", AutoModelForSeq2SeqLM)):
            # SeamlessM4T's text model is only a part of it, but declares text alone.
            has_speech = hasattr(model_config, "speech_encoder_layers")
            modalities = "audio" if has_speech else mapping[type(model_config)].input_modalities
            if others := sorted(set([modalities] if isinstance(modalities, str) else modalities) - {"text", "image"}):
                what = f"model.name_or_path {name} is a {model_config.model_type} model, which takes {' and '.join(others)}"
                raise UserError(f"{what} beside text, and rows here are text: take a model of text alone")
        special_tokens(model_config, name)

    def check_model(self, sharded: ShardedModel, collator: Any, config: RecipeConfig) -> None:
        check_seq2seq_model(sharded, collator, config.eval)

    def set_languages(self, tokenizer: PreTrainedTokenizerBase, name: str, usage: Usage) -> None:
        languages.set_languages(tokenizer, name, usage.source_language, usage.target_language)

    def encode_prompts(
        self, tokenizer: PreTrainedTokenizerBase, texts: list[str], are_chats: list[bool], usage: Usage
    ) -> tuple[list[list[int]], list[int]]:
        prefixed = [f"{usage.prefix}{text}" for text in texts]
        return seq2seq.encode_texts(tokenizer, prefixed, usage.max_source_length_tokens, "text")

    def task_params(self, config: RecipeConfig) -> dict[str, Any]:
        own = {"prefix": config.data.prefix, "max_new_tokens": config.eval.max_new_tokens, "num_beams": config.eval.num_beams}
        return dict.fromkeys(("summarization", "translation", "text2text-generation"), own)

    def write_usage(self, config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, data: RunData | None) -> TextUsage:
        prompts = f"[{config.data.prefix!r} + text for text in texts]" if config.data.prefix else "texts"
        return TextUsage(prompts, f"truncation=True, max_length={config.data.max_source_length_tokens}", new="")

    def list_commands(self, config: RecipeConfig, skeleton: PreTrainedModel, folder: Path, *, is_adapter: bool) -> list[str]:
        if skeleton.config.model_type not in ("t5", "mt5", "umt5") or is_adapter:  # whose texts are the same in CTranslate2 4.8
            return []
        place, converted = shlex.quote(str(folder)), shlex.quote(f"{folder}-ct2")
        return [f"convert it: ct2-transformers-converter --model {place} --output_dir {converted}"]

    def pipeline_tag(self, config: RecipeConfig) -> str:
        return "translation" if config.data.target_language else "summarization"

    def show_texts(self, example: Example, tokenizer: Any, config: Any, where: str) -> dict[str, str]:
        return {"source": config.prefix + str(example.prompt), "target": str(example.completion)}
