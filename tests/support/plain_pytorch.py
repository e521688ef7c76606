"""The reference of the absolute test: fine-tuning in plain PyTorch and transformers, one row at a time.

In fp64, so that the rounding that shows is the run's. Nothing of what trains is imported here: schedule, clipping, AdamW, the
evaluation and its texts are written out anew; tokens, labels, the loss and LoRA in `toolkit/tools/verify/plain.py`. Which rows a
step takes is given.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load

from toolkit.tools.verify import plain

NUM_STEPS, WARMUP_STEPS = 16, 4
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = 3e-3, 0.8, 0.9, 1e-3, 0.1, 0.3
"""The large eps lets the size of a gradient count, to which Adam is blind without it."""
LORA_SCALE = 12 / 4
NUM_BEAMS, NO_REPEAT_NGRAM_SIZE, MAX_NEW_TOKENS = 3, 2, 12

Row = dict[str, str]


@dataclass
class Figures:
    """What a run must come to."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Trained ones, by name; of an adapter as `<module>.lora_A` and `<module>.lora_B`."""
    eval_losses: list[float] = field(default_factory=list)
    """Before the first step and after the last."""
    eval_accuracies: list[float] = field(default_factory=list)
    """Percent of label tokens that are ranked first, at the same times."""
    texts: list[list[str]] = field(default_factory=list)
    """Generated for the evaluation rows, at the same times."""


def train_plain(
    folder: Path, steps: list[list[Row]], eval_rows: list[Row], adapter: bytes | None, label_smoothing: float
) -> Figures:
    """Train the model of `folder` on the given rows, and evaluate before and after.

    Args:
        adapter: safetensors with the first weights of a LoRA on the frozen model, named as in `Figures.weights`; None: the whole
            model is trained.
        label_smoothing: share of a label's probability that goes to all tokens alike, in training.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float64).eval()  # no dropout
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    weights = dict(model.named_parameters()) if adapter is None else plain.add_lora(model, load(adapter), LORA_SCALE)
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    figures = Figures()
    _evaluate(model, tokenizer, eval_rows, config, figures)
    for step, rows in enumerate(steps, start=1):
        num_labels = sum(_num_labels(_row(tokenizer, row, config)) for row in rows)
        loss = 0.0
        for row in rows:
            row_loss = _loss_sum(model, tokenizer, row, config, label_smoothing) / num_labels
            row_loss.backward()
            loss += row_loss.item()
        norm = math.sqrt(sum(w.grad.square().sum().item() for w in weights.values()))
        clip = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
        rising, falling = step / WARMUP_STEPS, (NUM_STEPS + 1 - step) / (NUM_STEPS - WARMUP_STEPS)
        lr = LR * min(rising, falling) if step <= WARMUP_STEPS else LR * falling
        for name, weight in weights.items():
            is_decayed = weight.dim() > 1 and "relative_attention_bias" not in name
            gradient = weight.grad * clip
            first[name] = BETA1 * first[name] + (1 - BETA1) * gradient
            second[name] = BETA2 * second[name] + (1 - BETA2) * gradient**2
            update = first[name] / (1 - BETA1**step) / ((second[name] / (1 - BETA2**step)).sqrt() + EPS)
            weight.data = weight.data * (1 - lr * WEIGHT_DECAY * is_decayed) - lr * update
            weight.grad = None
        figures.losses.append(loss)
        figures.grad_norms.append(norm)
        figures.lrs.append(lr)
    figures.weights = {name: weight.detach() for name, weight in weights.items()}
    _evaluate(model, tokenizer, eval_rows, config, figures)
    return figures


@torch.no_grad()
def _evaluate(model: Any, tokenizer: Any, rows: list[Row], config: Any, figures: Figures) -> None:
    looked = [plain.label_logits(model, _row(tokenizer, row, config)) for row in rows]
    num_labels = sum(len(labels_N) for _, labels_N in looked)
    num_correct = sum(int((logits_NV.argmax(-1) == labels_N).sum()) for logits_NV, labels_N in looked)
    figures.eval_losses.append(sum(plain.summed_loss(*pair).item() for pair in looked) / num_labels)
    figures.eval_accuracies.append(100 * num_correct / num_labels)
    figures.texts.append([_generate(model, tokenizer, row, config) for row in rows])


def _row(tokenizer: Any, row: Row, config: Any) -> plain.Row:
    if config.is_encoder_decoder:
        return plain.seq2seq_row(tokenizer, row["source"], row["target"])
    pair = plain.causal_row(tokenizer, row["prompt"], row["completion"], 10**6)
    assert pair is not None, "a token spans the end of a prompt"
    return pair


def _num_labels(row: plain.Row) -> int:
    return len(row[1]) - row[1].count(plain.IGNORED)


def _loss_sum(model: Any, tokenizer: Any, row: Row, config: Any, label_smoothing: float = 0.0) -> torch.Tensor:
    return plain.summed_loss(*plain.label_logits(model, _row(tokenizer, row, config)), label_smoothing)


def _generate(model: Any, tokenizer: Any, row: Row, config: Any) -> str:
    ids, labels = _row(tokenizer, row, config)
    prompt = ids if config.is_encoder_decoder else ids[: labels.count(plain.IGNORED)]
    tokens = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        num_beams=NUM_BEAMS, no_repeat_ngram_size=NO_REPEAT_NGRAM_SIZE, max_new_tokens=MAX_NEW_TOKENS,
    )[0]  # fmt: skip
    return tokenizer.decode(tokens if config.is_encoder_decoder else tokens[len(prompt) :], skip_special_tokens=True)
