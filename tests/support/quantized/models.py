"""Folders of tiny models that are quantized already, or that a run quantizes."""

import json
from pathlib import Path

import torch

SIZES = {
    "vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
FP8_SIZES = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "tie_word_embeddings": True}
MXFP4_SIZES = SIZES | {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2
}  # fmt: skip
BLOCK = 128


def quantize_fp8(weight: torch.Tensor, scales_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in e4m3, and the scale of each block of 128 x 128, as DeepSeek's and Qwen's; the blocks at the edges are smaller."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    scales = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3)) / 448
    scales = scales.log2().ceil().exp2() if scales_dtype == torch.float8_e8m0fnu else scales.to(scales_dtype).float()
    of_weights = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return (weight / of_weights).clamp(-448, 448).to(torch.float8_e4m3fn), scales.to(scales_dtype)


def save_fp8_model(folder: Path, scales_dtype: torch.dtype = torch.float32) -> Path:
    """A Qwen3 whose linear layers, except the head, are in fp8."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**FP8_SIZES)).bfloat16()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8(tensor.float(), scales_dtype)
        elif name != "lm_head.weight":
            tensors[name] = tensor
    about = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return _save(folder, model.config, about, tensors)


def save_mxfp4_model(folder: Path) -> Path:
    """A gpt-oss with drawn codes; scales give experts' weights of about 0.02."""
    import transformers

    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**MXFP4_SIZES)).bfloat16()
    tensors = dict(model.state_dict())
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 3]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(119, 122, shape, dtype=torch.uint8)
    return _save(folder, model.config, {"quant_method": "mxfp4"}, tensors)


def _save(folder: Path, config, about: dict, tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    config.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | {"quantization_config": about, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_quantizable_models(parent: Path) -> None:
    """Models with rows that 64 divides, and the same with weights that were quantized and dequantized, a folder each."""
    import transformers
    from safetensors.torch import load_file, save_file

    from tests.support.model_folders import _build_tokenizer
    from toolkit.models.quantized import dequantize, find_scales, quantize

    sizes = {"vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes_of_qwen = {"hidden_size": 64, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256}
    qwen = transformers.Qwen3Config(**sizes, **sizes_of_qwen, intermediate_size=128)
    moe = transformers.Qwen3MoeConfig(**sizes, **sizes_of_qwen, moe_intermediate_size=64, num_experts=3, num_experts_per_tok=2)
    t5 = transformers.T5Config(
        vocab_size=256, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    for name, config in {"llm": qwen, "moe": moe, "t5": t5}.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
        model.from_config(config, dtype=torch.float32).save_pretrained(parent / name)
        for kind in ("nf4", "int8"):
            model.from_pretrained(parent / name).save_pretrained(parent / f"{name}-{kind}")
            tensors = load_file(parent / f"{name}-{kind}" / "model.safetensors")
            for key, weight in tensors.items():
                if weight.ndim == 2 and not any(
                    end in key for end in ("embed", "shared", "lm_head", "relative_attention_bias", "mlp.gate.")
                ):
                    tensors[key] = dequantize(quantize(weight, kind), find_scales(weight))
            save_file(tensors, parent / f"{name}-{kind}" / "model.safetensors", metadata={"format": "pt"})
        for place in (name, f"{name}-nf4", f"{name}-int8"):
            _build_tokenizer(("<pad>", "</s>")).save_pretrained(parent / place)
