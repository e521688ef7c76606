"""Summaries and translations by an encoder-decoder: a row is a source with its target.

The tokenizers of M2M-100, NLLB, mBART and PLBart add a language token before or after a text. Its position is found by encoding
a text, not by the model's name.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config.data import DataConfig
from toolkit.config.schema import ModelConfig, RecipeConfig
from toolkit.data.collate import Collator, SummarizationCollator
from toolkit.data.rows.columns import choose_seq2seq_columns
from toolkit.data.rows.example import Example
from toolkit.data.rows.load import TextRows
from toolkit.data.tokens.causal import choose_few
from toolkit.data.tokens.cuts import describe_cut, describe_lost_text, describe_unknown
from toolkit.data.tokens.special_tokens import INNER_END, compile_inner_ends, read_target
from toolkit.data.tokens.tokenizer import marks_languages, train_tokenizer
from toolkit.errors import UserError, first_of
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
    import numpy as np
    from datasets import Dataset
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("toolkit")


class Seq2Seq(Objective):
    """The tokens of a target, given its source."""

    name = "seq2seq"
    auto_class = "AutoModelForSeq2SeqLM"
    takes = "an encoder-decoder that generates text: take one such as T5, BART or Pegasus"
    kind = "an encoder-decoder"
    limits = {"source": "max_source_length_tokens", "target": "max_target_length_tokens"}
    inputs = ("input_ids", "decoder_input_ids")
    label_side = "target"
    reported_columns = (
        *Objective.reported_columns,
        "num_lost_source_tokens", "num_lost_target_tokens", "num_unknown_source_tokens", "num_unknown_target_tokens",
    )  # fmt: skip
    trained = "unigram trained"

    choose_columns = staticmethod(choose_seq2seq_columns)
    metrics = staticmethod(text_figures)
    forward_kept = staticmethod(encoder_output_kept)

    def set_up(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, model: ModelConfig) -> None:
        """Set the languages of a translation model."""
        set_languages(tokenizer, model.name_or_path, config.source_language, config.target_language)

    def list_settings(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        settings = {name: getattr(config, name) for name in ("prefix", *self.limits.values())}
        if tokenizer is not None and marks_languages(tokenizer):
            settings["languages"] = f"{tokenizer.src_lang} to {tokenizer.tgt_lang}"
        return settings

    def train(self, rows: Dataset, vocab_size: int, config: DataConfig) -> PreTrainedTokenizerBase:
        """One like T5's."""
        return train_tokenizer(rows, vocab_size, config.prefix)

    def describe(self, tokenizer: PreTrainedTokenizerBase, rows: TextRows) -> list[str]:
        sentences: list[str] = []
        if marks_languages(tokenizer):
            sentences.append(f"sources are marked as {tokenizer.src_lang}, targets as {tokenizer.tgt_lang}")
        for what, column in (("targets", "completion"), ("sources", "prompt")):
            texts = [[text] for text in choose_few(rows)[column] if text is not None]  # of a chat, which `tokenize` refuses
            sentences += describe_lost_text(tokenizer, texts, what)
        return sentences

    def tokenize(
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, config: DataConfig, origins: list[tuple[str, int]]
    ) -> dict[str, list]:
        """The columns of `TokenizedRows`, `reported_columns`, `odd`, what to say of a row's special tokens, and `held`, those of
        its target, with zeros between them."""
        prompts = [config.prefix + text for text in rows["prompt"]]
        sources, num_lost_of_sources = encode_texts(tokenizer, prompts, config.max_source_length_tokens, "text")
        labels, num_lost_of_targets = encode_texts(tokenizer, rows["completion"], config.max_target_length_tokens, "text_target")
        texts = [
            str(tokenizer.decode(ids, skip_special_tokens=True)) if num_lost else text
            for ids, text, num_lost in zip(labels, rows["completion"], num_lost_of_targets, strict=True)
        ]
        targets, held = zip(*(read_target(tokenizer, text) for text in rows["completion"]), strict=True)
        odd = [map(compile_inner_ends(tokenizer).search, pair) for pair in zip(prompts, rows["completion"], strict=True)]
        return {
            "row_id": rows["row_id"],
            "target": list(targets),
            "held": list(map("\0".join, held)),
            "odd": [INNER_END * any(found) for found in odd],
            "lead_text": rows["lead_text"],
            "input_ids": sources,
            "labels": labels,
            "num_tokens": [len(source) + len(target) for source, target in zip(sources, labels, strict=True)],
            "num_label_tokens": [len(ids) for ids in labels],
            "target_bytes": [len(text.encode()) for text in texts],
            "num_lost_source_tokens": num_lost_of_sources,
            "num_lost_target_tokens": num_lost_of_targets,
            "num_unknown_source_tokens": [ids.count(tokenizer.unk_token_id) for ids in sources],
            "num_unknown_target_tokens": [ids.count(tokenizer.unk_token_id) for ids in labels],
        }

    def report(self, counts: dict[str, np.ndarray], config: DataConfig, name: str, origins: list[tuple[str, int]]) -> list[str]:
        """Sentences about cuts and unknown tokens."""
        num_of_targets = counts.get("num_answer_tokens", counts["num_label_tokens"])  # the former of pairs
        num_kept = {"source": counts["num_tokens"] - num_of_targets, "target": num_of_targets}
        sentences: list[str] = []
        for side, limit in self.limits.items():
            num_lost, of_limit = counts[f"num_lost_{side}_tokens"], f"data.{limit} = {getattr(config, limit)}"
            sentences += describe_cut(num_kept[side] + num_lost, num_lost, len(num_lost), name, of_limit, side)
            sentences += describe_unknown(num_kept[side], counts[f"num_unknown_{side}_tokens"], name, side)
        return sentences

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
        set_languages(tokenizer, name, usage.source_language, usage.target_language)

    def encode_prompts(
        self, tokenizer: PreTrainedTokenizerBase, texts: list[str], are_chats: list[bool], usage: Usage
    ) -> tuple[list[list[int]], list[int]]:
        prefixed = [f"{usage.prefix}{text}" for text in texts]
        return encode_texts(tokenizer, prefixed, usage.max_source_length_tokens, "text")

    def start_generation(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, collator: Any) -> None:
        """Set the generation config so that `generate`, also after an export, begins as the decoder inputs in training do.

        The first decoder input is the start token: the target's language for mBART, `</s>` for NLLB. If targets begin with a
        language, as NLLB's do, it is forced as the first generated token.
        """
        labels = tokenizer(text_target="a")["input_ids"]
        start = int(collator.decoder_inputs(torch.tensor([labels]))[0, 0])
        generation: Any = model.generation_config
        used = generation.decoder_start_token_id
        settings: dict[str, int | None] = {}
        if start != (generation.bos_token_id if used is None else used):
            settings["decoder_start_token_id"] = start
        if marks_languages(tokenizer):
            plain = tokenizer(text_target="a", add_special_tokens=False)["input_ids"]
            forced = labels[0] if labels[: len(plain)] != plain else None
            if forced != generation.forced_bos_token_id:
                settings["forced_bos_token_id"] = forced
        for setting, token_id in settings.items():
            setattr(generation, setting, token_id)
            token = None if token_id is None else tokenizer.convert_ids_to_tokens(token_id)
            logger.info(f"{setting} of the generation config is set to {token_id} ({token}), as in training")

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


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int | None, argument: str
) -> tuple[list[list[int]], list[int]]:
    """Token ids of texts, and how many tokens each has lost. A text of over `max_length` tokens, if that is given, is encoded
    again, cut by the tokenizer; `argument` is the tokenizer's, `text` or `text_target`."""
    all_ids = tokenizer(**{argument: texts}, verbose=False)["input_ids"]
    num_lost = [0] * len(texts)
    for i, text in enumerate(texts):
        if (num_given := len(all_ids[i])) > (max_length or num_given):
            all_ids[i] = tokenizer(**{argument: text}, truncation=True, max_length=max_length)["input_ids"]
            num_lost[i] = num_given - len(all_ids[i])
    return all_ids, num_lost


def set_languages(tokenizer: PreTrainedTokenizerBase, name: str, source: str | None, target: str | None) -> None:
    """Make the tokenizer mark sources and targets with these languages; None keeps the tokenizer's saved language. A tokenizer
    that marks no languages, lacks this one, or has none set, is a `UserError`. `name` is the model's, for errors."""
    is_marking = marks_languages(tokenizer)
    languages = _language_ids(tokenizer) if is_marking else {}
    sides = ("source", source, "src_lang", "text"), ("target", target, "tgt_lang", "text_target")
    for side, given, attribute, argument in sides:
        if not is_marking:
            if given is not None:
                what = f"data.{side}_language is {given}, but the tokenizer of {name} does not mark languages"
                raise UserError(f"{what}: leave it out")
            continue
        language = getattr(tokenizer, attribute) if given is None else given
        if language is None:
            what = f"the tokenizer of {name} marks each text with its language: set data.{side}_language"
            raise UserError(f"{what} to one of {first_of(sorted(languages))}")
        try:
            setattr(tokenizer, attribute, language)
            marks = tokenizer(**{argument: ""})["input_ids"]
        except KeyError:
            marks = [tokenizer.unk_token_id]
        # The mark must be a language: NLLB's `fr` is a piece of words, its French is `fra_Latn`.
        ids = set(languages.values())
        if not ids.intersection(marks) or not {*tokenizer.all_special_ids, *ids}.issuperset(marks):
            what = f"data.{side}_language {language!r} is not a language of the tokenizer of {name}"
            raise UserError(f"{what}: it has {first_of(sorted(languages))}")


def _language_ids(tokenizer: Any) -> dict[str, int]:
    """Token id of each language. Without a table of languages: of each special token that has no other role."""
    if table := getattr(tokenizer, "lang_code_to_id", None):
        return table
    named = {token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
    return {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens if token not in named}
