"""Tiny base models with weights on disk, and adapters on them."""

from pathlib import Path
from unittest.mock import Mock

import torch
import transformers as hf

from toolkit.config.schema import AdapterConfig, ModelConfig
from toolkit.export.compare import check_logits
from toolkit.export.lora import write_adapter
from toolkit.models.lora import add_adapter
from toolkit.models.lora_files import base_name, hash_weight
from toolkit.models.tensor_reader import allocate, copy_on_meta, fill_parameters, state_readers
from toolkit.models.weights import complete_readers

LLAMA_SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BASES = {
    "llama_tied": (hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=True)),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA_SIZES, tie_word_embeddings=False)),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)),
    "t5": (
        hf.T5ForConditionalGeneration,
        hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0),
    ),
}


def save_base(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    model_class, config = BASES[name]
    model_class(config).save_pretrained(folder)
    return folder


def load_base(folder: Path, name: str) -> hf.PreTrainedModel:
    return BASES[name][0].from_pretrained(folder, dtype=torch.float32).eval()


def adapted(folder: Path, name: str, *, seed: int = 0, **settings) -> hf.PreTrainedModel:
    """The base with an adapter as a run makes it: B is still zero."""
    return with_adapter(load_base(folder, name), adapter_config(**settings), str(folder), seed).eval()


def with_adapter(model, config: AdapterConfig, base: str = "base", seed: int = 0):
    adapted, of_base = copy_on_meta(model), ModelConfig(name_or_path=base)
    add_adapter(adapted, config, of_base)
    readers = complete_readers(adapted, state_readers(model.state_dict()), config, of_base, seed)
    allocate(adapted, torch.device("cpu"))
    fill_parameters(adapted, readers)
    return adapted


def hash_base(model: torch.nn.Module) -> dict[str, str]:
    """The hash of each parameter of the base, by its name in the plain model."""
    named = ((base_name(name), parameter) for name, parameter in model.named_parameters())
    return {name: hash_weight(parameter) for name, parameter in named if name is not None}


def adapter_config(**settings) -> AdapterConfig:
    return AdapterConfig(**{"method": "lora", "rank": 4, "alpha": 8.0, **settings})


@torch.no_grad()
def randomize(model: hf.PreTrainedModel) -> None:
    """Stands for a training: every trainable parameter moves, B from zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def forward_inputs(model: hf.PreTrainedModel) -> dict[str, torch.Tensor]:
    tokens_BT = torch.arange(12).view(2, 6) + 2
    return {"input_ids": tokens_BT} | ({"decoder_input_ids": tokens_BT + 7} if model.config.is_encoder_decoder else {})


@torch.no_grad()
def logits(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.eval()(**inputs, use_cache=False).logits


def export_adapter(folder: Path, model: hf.PreTrainedModel) -> Path:
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    folder.mkdir()
    write_adapter(folder, model, weights, hash_base(model))
    return folder


def compare_logits(check: dict[str, torch.Tensor], reloaded, folder: Path, dtype: torch.dtype, why: str = "") -> None:
    """Compare them as an export does, and check that it does."""
    load, device = Mock(return_value=reloaded), torch.device("cpu")
    check_logits(folder, reloaded, load, check, device, dtype, why)
    load.assert_called_once_with(device)
