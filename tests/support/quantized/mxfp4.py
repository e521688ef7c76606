"""A model folder whose experts are in MXFP4, as gpt-oss's are."""

from __future__ import annotations

import json
from pathlib import Path

import torch

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def save_mxfp4_model(folder: Path) -> Path:
    """A tiny gpt-oss with drawn codes; scales give experts' weights of about 0.02."""
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES)).bfloat16()
    model.config.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = dict(model.state_dict())
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 3]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(119, 122, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
