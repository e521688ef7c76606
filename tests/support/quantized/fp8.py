"""Model folders in fp8 with a scale for each block of 128 x 128, as DeepSeek's and Qwen's are."""

from __future__ import annotations

import json
from pathlib import Path

import torch

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "tie_word_embeddings": True, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
BLOCK = 128


def quantize_fp8(weight: torch.Tensor, scales_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in e4m3, and the scale of each block; the blocks at the edges are smaller."""
    grid = [-(-size // BLOCK) for size in weight.shape]
    scales = torch.empty(grid)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(grid[0]):
        for column in range(grid[1]):
            block = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            scale = weight[block].abs().max() / 448  # differs from block to block
            scale = scale.log2().ceil().exp2() if scales_dtype == torch.float8_e8m0fnu else scale.to(scales_dtype).float()
            scales[row, column] = scale
            codes[block] = (weight[block] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales.to(scales_dtype)


def save_fp8_model(folder: Path, scales_dtype: torch.dtype = torch.float32) -> Path:
    """A tiny Qwen3 whose linear layers, except the head, are in fp8."""
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).bfloat16()
    model.config.save_pretrained(folder)
    about = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": about, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8(tensor.float(), scales_dtype)
        elif name != "lm_head.weight":
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
