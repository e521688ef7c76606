"""Loads a model to generate with: a run's export, or any folder or id that transformers reads."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.config.schema import EvalConfig, ModelConfig
from toolkit.data.collate import CausalCollator, Collator, SummarizationCollator, move_to, own_label_shift
from toolkit.data.tokens.causal import encode_prompt
from toolkit.data.tokens.chat_template import render_chat
from toolkit.data.tokens.languages import set_languages
from toolkit.data.tokens.seq2seq import encode_texts
from toolkit.data.tokens.tokenizer import load_tokenizer
from toolkit.errors import UserError
from toolkit.export.usage import Usage, load_usage
from toolkit.launch.environment import asked_for_cpu
from toolkit.models.config import is_encoder_decoder, special_tokens
from toolkit.models.load import fastest_attention
from toolkit.models.lora_files import CONFIG_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEADROOM = 1.2
"""A device must have this multiple of the weights' bytes free: activations and the key-value cache need the rest."""


@dataclass(frozen=True)
class Generator:
    """A model on its device, with what makes tokens of texts."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    collator: Collator
    usage: Usage
    is_seq2seq: bool
    device: torch.device

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> dict[str, Any]:
        """A chat and the start of the answer as a row of `generate`.

        Raises:
            UserError: there is no chat template.
            One of `TEMPLATE_ERRORS`: the template cannot render these messages.
        """
        return self._prompt(render_chat(self.tokenizer, messages, tools, for_generation=True), is_chat=True)

    def encode_text(self, text: str) -> dict[str, Any]:
        """A text as a row of `generate`: an encoder-decoder's source, cut as in the run, or a causal model's prompt."""
        if not self.is_seq2seq:
            return self._prompt(text, is_chat=False)
        limit = self.usage.max_source_length_tokens
        [ids], [num_lost] = encode_texts(self.tokenizer, [self.usage.prefix + text], limit, "text")
        return {"input_ids": ids, "num_lost_tokens": num_lost}

    def _prompt(self, text: str, *, is_chat: bool) -> dict[str, Any]:
        ids = encode_prompt(self.tokenizer, text, is_chat=is_chat)
        return {"input_ids": ids, "prompt_length": len(ids), "num_lost_tokens": 0}

    @torch.no_grad()
    def generate(self, rows: list[dict[str, Any]]) -> list[str]:
        """A text for each row, by the model's generation config."""
        prompts = self.collator.prompts(rows)
        tokens_BT = self.model.generate(**move_to(self.device, prompts))
        return self.tokenizer.batch_decode(self.collator.new_tokens(tokens_BT, prompts), skip_special_tokens=True)


def find_folder(name: str) -> str:
    """The model of a run folder (`merged`, else `export`), or the name itself.

    Raises:
        UserError: a run folder without an export; a file.
    """
    run = Path(name)
    if run.is_file():
        raise UserError(f"{name} is a file: give a run folder, an export or a model folder")
    for kind in ("merged", "export"):
        if (run / kind).is_dir():
            return str(run / kind)
    if (run / "checkpoints").is_dir():
        export = f"python -m toolkit export {name}"
        raise UserError(f"{name} is a run folder without an export: let the run end, or give the folder that {export} writes")
    return name


def load_generator(name: str, dtype: str | None, settings: dict[str, Any]) -> Generator:
    """Load model and tokenizer.

    Args:
        dtype: `float32` or `bfloat16`; None: that of the run's forward passes.
        settings: of generation, that replace the model's own.

    Raises:
        UserError: no model can be read there, or it does not fit the device.
    """
    import transformers
    from transformers.utils.logging import disable_progress_bar

    folder = Path(find_folder(name))
    usage = load_usage(folder) or Usage()
    device = _choose_device()
    loaded_as = getattr(torch, dtype or usage.dtype)
    is_adapter = (folder / CONFIG_FILE).is_file()
    base = _base_of(folder) if is_adapter else str(folder)
    if not sys.stderr.isatty():  # bars are for terminals
        disable_progress_bar()
    try:
        is_seq2seq = is_encoder_decoder(base)
        auto_class: Any = transformers.AutoModelForSeq2SeqLM if is_seq2seq else transformers.AutoModelForCausalLM
        config = transformers.AutoConfig.from_pretrained(base)
        _check_room(auto_class, config, loaded_as, device)
        config._attn_implementation = fastest_attention(config, device.type)
        model = auto_class.from_pretrained(base, config=config, dtype=loaded_as, use_safetensors=True)
        if is_adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder)).get_base_model()
        if (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if is_adapter and not Path(base).is_dir():
            raise UserError(
                f"the adapter {folder} needs its base {base}, not found from here ({reason}): start where that path leads "
                "to it, or give a merged model, as `python -m toolkit export RUN_FOLDER --merge` writes it"
            ) from None
        if isinstance(error, UserError):
            raise
        raise UserError(f"no model can be read from {name} ({reason}): give a run folder, an export or a model folder") from None
    if model.generation_config.max_new_tokens is None:  # no export of ours; `generate` would stop after 20 tokens
        settings = {"max_new_tokens": EvalConfig().max_new_tokens, **settings}
    model.generation_config.update(use_cache=True, **settings)
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(folder)), model.get_input_embeddings().num_embeddings)
    if is_seq2seq:
        set_languages(tokenizer, name, usage.source_language, usage.target_language)
        collator: Collator = SummarizationCollator(*special_tokens(model.config, name), own_label_shift(model))
    else:
        collator = CausalCollator(tokenizer.pad_token_id)
    return Generator(model.to(device).eval(), tokenizer, collator, usage, is_seq2seq, device)


def _choose_device() -> torch.device:
    if not torch.cuda.is_available() or asked_for_cpu():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _base_of(folder: Path) -> str:
    from peft import PeftConfig

    return str(PeftConfig.from_pretrained(str(folder)).base_model_name_or_path)


def _check_room(auto_class: Any, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cuda":
        return
    with torch.device("meta"):
        num_bytes = sum(p.numel() for p in auto_class.from_config(config).parameters()) * dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    if HEADROOM * num_bytes > free:
        raise UserError(
            f"the model's weights take {num_bytes / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}, and {device} has "
            f"{free / 2**30:.1f} GiB free: try --dtype bfloat16, or serve it with a tool that splits a model over GPUs, as vLLM"
        )
