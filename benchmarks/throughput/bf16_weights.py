"""What a T5 and a Llama learn with weights in fp32, in bf16 rounded to nearest, and in bf16 rounded stochastically.

Each starts from the same model, which was trained on other rows, and computes in bf16 under autocast, in one process. The loss
is on rows that are not trained on.

    python -m benchmarks.throughput.bf16_weights
"""

import contextlib
import copy
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks.measuring import build_parser, format_table, write_report
from toolkit.config.schema import OptimConfig, TrainedDtype
from toolkit.models.freeze import cast_trained
from toolkit.optimizers.stepping import Rounding
from toolkit.training.optim import build_optimizer, clip_gradients

NUM_STEPS, EVERY_STEPS, ROWS, TOKENS, VOCAB = 500, 100, 8, 32, 128
LR, LR_BEFORE = 1e-4, 3e-3
RATES = {"adamw_8bit": LR, "adafactor": LR, "lion": LR / 3}
LLAMA = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 176, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
WEIGHTS: dict[str, TrainedDtype] = {
    "fp32": "float32",
    "bf16, to nearest": "bfloat16_stochastic",
    "bf16, stochastic": "bfloat16_stochastic",
}


def main() -> None:
    build_parser("Losses of weights in bf16.", repetitions=1).parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in ("T5", "Llama"):
        start = build_model(name)
        train(start, name, "adamw_8bit", LR_BEFORE, seed=1)
        for optimizer, lr in RATES.items():
            for title, dtype in WEIGHTS.items():
                model = copy.deepcopy(start)
                cast_trained(model, dtype)
                to_nearest = mock.patch.object(Rounding, "round", lambda _, values, start: values.to(torch.bfloat16))
                with to_nearest if "nearest" in title else contextlib.nullcontext():
                    losses = train(model, name, optimizer, lr, seed=2)
                rows.append([name, f"`{optimizer}`", title, *(f"{loss:.3f}" for loss in losses)])
    about = f"""; one process, one thread. Models of two layers and width 64, trained for {NUM_STEPS} steps in fp32 on one random
chain of tokens, then as the table says on another: {ROWS} rows of {TOKENS} tokens a step, a constant rate of {LR:g} (`lion`: a
third), clipped to 1.0. Each token has 4 successors, so that the least loss is 1.39. One run each."""
    header = ["model", "`optim.name`", "weights", *(f"loss at {step}" for step in range(0, NUM_STEPS + 1, EVERY_STEPS))]
    write_report("bf16_weights", "Weights in bf16", about, [format_table(header, rows)], packages=["torch", "transformers"])


def build_model(name: str) -> Any:
    torch.manual_seed(0)
    if name == "T5":
        return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **T5))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **LLAMA))


def train(model: Any, name: str, optimizer_name: Any, lr: float, seed: int) -> list[float]:
    """Train on the chain of this seed; the loss on unseen rows, before the first step and every `EVERY_STEPS`."""
    for parameter in model.parameters():
        parameter.grad_dtype = None
    optimizer: Any = build_optimizer(OptimConfig(name=optimizer_name, lr=lr), model)
    successors = torch.randint(1, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(seed))
    random, unseen = torch.Generator().manual_seed(3), draw(successors, torch.Generator().manual_seed(4), 16 * ROWS)
    found = []
    for step in range(NUM_STEPS + 1):
        if step % EVERY_STEPS == 0:
            with torch.no_grad():
                found.append(loss_of(model, name, unseen).item())
        loss_of(model, name, draw(successors, random, ROWS)).backward()
        clip_gradients(model, 1.0)
        optimizer.number = step + 1
        optimizer.step()
        optimizer.zero_grad()
    return found


def draw(successors: torch.Tensor, random: torch.Generator, num_rows: int) -> torch.Tensor:
    """Rows of the chain."""
    columns = [torch.randint(1, VOCAB, (num_rows,), generator=random)]
    for _ in range(TOKENS - 1):
        columns.append(successors[columns[-1], torch.randint(0, 4, (num_rows,), generator=random)])
    return torch.stack(columns, dim=1)


def loss_of(model: Any, name: str, tokens_BT: torch.Tensor) -> torch.Tensor:
    """A T5 continues the first half of a row."""
    source, target = (half.contiguous() for half in tokens_BT.chunk(2, dim=1))
    given = {"input_ids": source, "labels": target} if name == "T5" else {"input_ids": tokens_BT, "labels": tokens_BT}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(**given, use_cache=False).loss
    return loss


if __name__ == "__main__":
    main()
