"""Writes `nf4_golden.json`: what bitsandbytes makes of a weight, on a CPU.

python -m venv /tmp/golden && /tmp/golden/bin/pip install torch==2.13.0 bitsandbytes==0.50.2
PYTHONPATH=. /tmp/golden/bin/python tests/support/nf4_golden.py
"""

import json
from pathlib import Path

import torch

GOLDEN = Path(__file__).with_suffix(".json")


def build_weight() -> torch.Tensor:
    """A weight (4, 192), exact everywhere: blocks of many sizes, one of zeros, one with an outlier, one in even steps."""
    place = torch.arange(4 * 192)
    weight = ((place * 7919) % 2003 - 1001).float() / 977
    weight = (weight.view(-1, 64) * 2.0 ** (torch.arange(12) - 6).view(-1, 1)).view(4, 192)
    weight[1, :64] = 0
    weight[2, 70] = 1000.0
    weight[3, 64:128] = torch.linspace(-1, 1, 64).mul(1024).round() / 1024
    return weight


def main() -> None:
    import bitsandbytes
    from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit

    weight = build_weight()
    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    golden = {"bitsandbytes": bitsandbytes.__version__, "codes": codes.view(4, 96), "scales": state.absmax}
    golden["table"] = get_4bit_type("nf4", device="cpu")
    for dtype in (torch.float32, torch.bfloat16):
        state.dtype = dtype
        golden[str(dtype)] = dequantize_4bit(codes, state)
    text = {key: value if isinstance(value, str) else as_hex(value) for key, value in golden.items()}
    GOLDEN.write_text(json.dumps(text, indent=1) + "\n")


def as_hex(tensor: torch.Tensor) -> str:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes().hex()


if __name__ == "__main__":
    main()
