"""Memory of one forward and backward of a causal model, the loss taken in one of three ways: prints one JSON line of figures.

`python -m benchmarks.memory.loss_memory plain 131072 4096`: the loss, the vocabulary, the tokens (all of them labels but
the first of each row). A process of its own, since a process never tells how much less it would have needed.
"""

import json
import resource
import sys
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.measuring import memory_gib

ROW_LENGTH_TOKENS = 512
SHAPE = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
"""Small, so that the logits are what is measured."""


def main() -> None:
    how, vocab_size, num_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, vocab_size=vocab_size, tie_word_embeddings=True))
    num_rows = max(1, num_tokens // ROW_LENGTH_TOKENS)
    input_ids_BT = torch.randint(vocab_size, (num_rows, num_tokens // num_rows))
    mean_loss = {"plain": plain_loss, "chunked": chunked_loss, "trl": trl_loss}[how](model, input_ids_BT)
    before_gib = memory_gib("VmRSS")
    start_s = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_loss()
    loss.backward()
    seconds = time.perf_counter() - start_s
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    print(
        json.dumps(
            {
                "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,  # kB on Linux
                "before_gib": before_gib,
                "seconds": seconds,
                "loss": loss.item(),
                "grad_norm": norm.item(),
            }
        )
    )


def plain_loss(model: PreTrainedModel, input_ids_BT: torch.Tensor) -> Callable[[], torch.Tensor]:
    """transformers' own: cross entropy on the whole logits."""
    return lambda: model(input_ids=input_ids_BT, labels=input_ids_BT, use_cache=False).loss


def chunked_loss(model: PreTrainedModel, input_ids_BT: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Ours."""
    from toolkit.data.collate import CausalCollator
    from toolkit.models.patches.chunked_loss import install, summed_loss

    install(model)
    rows = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in input_ids_BT.tolist()]
    batch = CausalCollator(pad_token_id=0).collate([[row] for row in rows])
    return lambda: summed_loss(model, batch)[0] / len(batch["labels"])


def trl_loss(model: PreTrainedModel, input_ids_BT: torch.Tensor) -> Callable[[], torch.Tensor]:
    """TRL's chunks, with what its SFTTrainer computes beside the loss."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))

    def loss() -> torch.Tensor:
        outputs = model(input_ids=input_ids_BT, labels=input_ids_BT, use_cache=False, fused_lm_head=True)
        return -outputs.log_probs.sum() / outputs.label_mask.sum()

    return loss


if __name__ == "__main__":
    main()
