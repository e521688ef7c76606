"""Texts, completions and chats by a causal model: a row is one sequence, some of whose tokens count."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import ModelConfig, RecipeConfig
from toolkit.data.collate import CausalCollator, Collator
from toolkit.data.rows.example import Example
from toolkit.data.tokens import causal
from toolkit.data.tokens.chat_template import DATE
from toolkit.data.tokens.prompts import prepare_chat
from toolkit.data.tokens.special_tokens import show
from toolkit.errors import UserError
from toolkit.evaluation.loop import text_figures
from toolkit.export.run_data import RunData
from toolkit.export.usage import TextUsage, Usage, vllm_command
from toolkit.models.patches.masks import attends_by_document
from toolkit.objectives.model_checks import check_causal_model
from toolkit.objectives.objective import Objective
from toolkit.parallel.wrap import ShardedModel
from toolkit.private import private

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class Causal(Objective):
    """The next token."""

    name = "causal"
    auto_class = "AutoModelForCausalLM"
    takes = "a causal language model: take one such as Llama, Qwen or Gemma"
    kind = "a causal model"
    trained = "byte-level trained"
    can_pack = counts_tokens = takes_chats = continues_prompt = drops_unlabelled = True
    reported_columns = (*Objective.reported_columns, *causal.REPORTED)

    set_up = staticmethod(causal.set_up)
    list_settings = staticmethod(causal.list_settings)
    train = staticmethod(causal.train)
    describe = staticmethod(causal.describe)
    tokenize = staticmethod(causal.tokenize)
    report = staticmethod(causal.report)
    metrics = staticmethod(text_figures)

    def build_collator(self, model: PreTrainedModel, pad_token_id: int) -> Collator:
        return CausalCollator(pad_token_id, one_row=attends_by_document(model))

    def loader(self, model_config: Any) -> Any:
        """That of all parts of a model of images and texts, unless `architectures` names the class of its texts' part alone."""
        from transformers import AutoModelForImageTextToText

        auto_class = super().loader(model_config)
        kind = model_config if isinstance(model_config, type) else type(model_config)
        of_texts: Any = private("_model_mapping", auto_class).get(kind, None)
        named = getattr(model_config, "architectures", None) or ()
        takes_part = of_texts is None or (of_texts.config_class is not kind and of_texts.__name__ not in named)
        has_images = kind in private("_model_mapping", AutoModelForImageTextToText)
        return AutoModelForImageTextToText if takes_part and has_images else auto_class

    def check_model_config(self, model_config: PretrainedConfig, config: ModelConfig) -> None:
        """Refuse a model like BART, of which only the decoder would train, or like BERT, whose tokens see later ones: for
        transformers both are causal models."""
        from transformers import AutoModelForMaskedLM

        is_decoder = getattr(model_config, "is_decoder", True)  # also False for GPT-NeoX, which does not use it
        is_masked = type(model_config) in private("_model_mapping", AutoModelForMaskedLM)
        what = f"model.name_or_path {config.name_or_path} is a {model_config.model_type} model"
        if model_config.is_encoder_decoder or (is_masked and not is_decoder):
            raise UserError(f"{what}, not {self.takes}")
        if getattr(model_config.get_text_config(), "use_bidirectional_attention", None) is True:  # PaliGemma's prompts
            why = "with use_bidirectional_attention in its config.json: its tokens see later ones, so it is not"
            raise UserError(f"{what} {why} {self.takes}")

    def check_model(self, sharded: ShardedModel, collator: Collator, config: RecipeConfig) -> None:
        check_causal_model(sharded, collator, packing=config.packs)

    def encode_prompts(
        self, tokenizer: PreTrainedTokenizerBase, texts: list[str], are_chats: list[bool], usage: Usage
    ) -> tuple[list[list[int]], list[int]]:
        return causal.encode_prompts(tokenizer, texts, are_chats), [0] * len(texts)

    def write_usage(self, config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, data: RunData | None) -> TextUsage:
        """Prompts before which padding goes, rendered if they are chats, without an end token."""
        if tokenizer.chat_template is not None and (data is None or data.has_chats):
            date = f', date_string="{DATE}"' if "date_string" in str(tokenizer.chat_template) else ""
            chat = '[{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False'
            prompts = f"[tokenizer.apply_chat_template({chat}{date}) for text in texts]"
            return TextUsage(prompts, f"add_special_tokens=False, {TextUsage().how}")
        num_after = [*tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"][::-1], 0].index(0)
        return TextUsage(end=f"[:, :-{num_after}]" if num_after else "")

    def list_commands(self, config: RecipeConfig, skeleton: PreTrainedModel, folder: Path, *, is_adapter: bool) -> list[str]:
        serve = vllm_command(config, skeleton, folder, is_adapter=is_adapter)
        base, place = shlex.quote(config.model.name_or_path), shlex.quote(str(folder))
        at = f",revision={config.model.revision}" if is_adapter and config.model.revision else ""
        pretrained = f"{base},peft={place},tokenizer={place}" if is_adapter else place
        score = f"score it: lm_eval --model hf --model_args pretrained={pretrained}{at} --tasks TASK"
        is_scored = self.loader(skeleton.config).__name__ == self.auto_class  # which lm_eval takes
        return [*([f"serve it: {serve}"] if serve else []), *([score] if is_scored else [])]

    def pipeline_tag(self, config: RecipeConfig) -> str:
        return "text-generation"

    def show_texts(self, example: Example, tokenizer: Any, config: Any, where: str) -> dict[str, str]:
        if example.messages is not None:
            return {"row": show(tokenizer, prepare_chat(tokenizer, example, config.loss_on, where).text)}
        return {"row": f"{example.prompt}{example.completion}"}
