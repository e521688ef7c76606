"""The loss of a few tokens by each model folder, and the token ids of a text, as JSON: `python read_losses.py FOLDER...`.

It runs under transformers 5, and under 4.57 where `PYTHONPATH` has that.
"""

import json
import sys

IDS = [5, 40, 9, 130, 77, 12, 200, 33, 61, 8, 90, 151, 17, 3, 222, 45, 6, 118, 73, 29, 11, 99, 54, 180]
TEXT = "alpha beta <tag> Gamma 123, delta\n epsilon </s> zeta"


def read(folder: str) -> dict:
    """The loss, and the ids; of the ids what transformers says instead, if it cannot load the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids_BT = torch.tensor([IDS])
    with torch.no_grad():
        loss = model(input_ids=ids_BT, labels=ids_BT.flip(1) if config.is_encoder_decoder else ids_BT).loss
    return {"loss": float(loss), "ids": AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]}


if __name__ == "__main__":
    import transformers

    print(json.dumps({"version": transformers.__version__, **{folder: read(folder) for folder in sys.argv[1:]}}))
