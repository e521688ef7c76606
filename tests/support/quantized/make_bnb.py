"""Writes the model folders beside it with bitsandbytes, on a CPU, and the hashes of the values that it dequantizes them to.

bitsandbytes is not a dependency. In an environment with the versions of `constraints.txt`, and in the repository's root:

    pip install bitsandbytes==0.50.2
    python tests/support/quantized/make_bnb.py

`bnb_nested` has double quantization; `bnb_plain` has not, and keeps its bytes as bf16 (`bnb_4bit_quant_storage`). Rows of 72
and 232 values end inside blocks of 64. The largest weights have more than 256 blocks, so more than one nested scale.
"""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

KINDS = {
    "bnb_nested": {"bnb_4bit_use_double_quant": True},
    "bnb_plain": {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": torch.bfloat16},
}
SIZES = {
    "vocab_size": 256, "hidden_size": 72, "intermediate_size": 232, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 18, "max_position_embeddings": 128, "tie_word_embeddings": True, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def make(folder: Path, plain: Path, settings: dict) -> None:
    """Quantize the `plain` model into a folder, and hash what the files are dequantized to."""
    from bitsandbytes.functional import dequantize_4bit

    about = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, **settings)
    LlamaForCausalLM.from_pretrained(plain, quantization_config=about, dtype=torch.bfloat16).save_pretrained(folder)
    saved = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    hashes = {}
    for name, parameter in saved.named_parameters():
        is_quantized = hasattr(parameter, "quant_state")
        values = dequantize_4bit(parameter.data, parameter.quant_state) if is_quantized else parameter.data
        assert values.dtype == torch.bfloat16
        hashes[name] = hashlib.sha256(values.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
    (folder / "hashes_of_values.json").write_text(json.dumps(hashes, indent=2) + "\n")


if __name__ == "__main__":
    here = Path(__file__).parent
    torch.manual_seed(0)
    with TemporaryDirectory() as plain:
        LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().save_pretrained(plain)
        for kind, settings in KINDS.items():
            make(here / kind, Path(plain), settings)
