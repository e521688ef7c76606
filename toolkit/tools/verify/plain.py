"""What plain transformers makes of rows, one at a time: the reference from outside, for `verify` and for tests.

Nothing of the toolkit is imported here: tokens, labels, the loss and LoRA are written out anew.

Shapes: `B` rows, `T` positions, `N` labels that count, `V` vocabulary.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IGNORED, LONGEST, SHORTEST, NUM_LOGITS = -100, 1024, 64, 8
"""Label of what does not count; most and fewest tokens of a long row, and its last positions, whose logits are compared."""
CPU_PRODUCTS = 10**11
"""Most parameters times tokens of a long row on a CPU: some 20 s."""

Row = tuple[list[int], list[int]]
"""Token ids and labels. Of a causal model they are aligned, and the first label never counts."""


def seq2seq_row(tokenizer: Any, source: str, target: str, max_source: int | None = None, max_target: int | None = None) -> Row:
    """A source and its target, cut by the tokenizer; its own end token is with both."""
    sides = (({"text": source}, max_source), ({"text_target": target}, max_target))
    ids, labels = (tokenizer(**side, truncation=most is not None, max_length=most)["input_ids"] for side, most in sides)
    return list(ids), list(labels)


def causal_row(tokenizer: Any, prompt: str, text: str, most: int, piece: int = 0, *, all_count: bool = False) -> Row | None:
    """The tokenizer's special tokens, prompt, text and end token, cut to `most` tokens.

    A further `piece` of a text starts with the special tokens and one more to predict from. None if a token spans the end of the
    prompt: what the model reads is then a rule of the toolkit's.
    """
    encoded = tokenizer("a", return_special_tokens_mask=True)
    prefix = encoded["input_ids"][: [*encoded["special_tokens_mask"], 0].index(0)]
    alone, ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, prompt + text))
    if ids[: len(alone)] != alone:
        return None
    num_ignored, ids = len(prefix) + len(alone) if alone and not all_count else 1, [*prefix, *ids, tokenizer.eos_token_id]
    if piece:
        first = most + (piece - 1) * (most - len(prefix) - 1)
        num_ignored, ids = len(prefix) + 1, [*prefix, *ids[first - 1 :]]
    return ids[:most], ([IGNORED] * num_ignored + ids[num_ignored:])[:most]


def label_logits(model: Any, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits NV that predict the labels N of a row, and these."""
    ids_1T, labels_1T = (torch.tensor([part], device=model.device) for part in row)
    if model.config.is_encoder_decoder:
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)  # a class of one's own may look at its inputs
        of_decoder = {"labels": labels_1T} if shift is None else {"decoder_input_ids": shift(labels_1T)}
        return model(input_ids=ids_1T, **of_decoder, use_cache=False).logits[0], labels_1T[0]
    counts_T = labels_1T[0, 1:] != IGNORED
    return model(input_ids=ids_1T, use_cache=False).logits[0, :-1][counts_T], labels_1T[0, 1:][counts_T]


def summed_loss(logits_NV: torch.Tensor, labels_N: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """-log p of each label, added up; of the smoothed labels, in which every token has a share of the probability."""
    wanted_NV = F.one_hot(labels_N, logits_NV.shape[1]) * (1 - label_smoothing) + label_smoothing / logits_NV.shape[1]
    return -(wanted_NV * torch.log_softmax(logits_NV, dim=-1)).sum()


def pair_loss(settings: Any, logps_2: torch.Tensor, reference_2: torch.Tensor, lengths_2: torch.Tensor) -> torch.Tensor:
    """The loss of a pair from log p of the chosen and the rejected answer; `objectives/preference_losses.py` names the papers."""
    beta, share, kind = settings.beta, settings.label_smoothing, settings.loss
    means_2, ratios_2 = logps_2 / lengths_2, logps_2 - reference_2

    def apart(values_2: torch.Tensor) -> torch.Tensor:
        return values_2[0] - values_2[1]

    if kind == "ipo":
        return (apart(ratios_2 / lengths_2) - 0.5 / beta) ** 2
    if kind == "orpo":
        odds_2 = means_2.exp() / -torch.expm1(means_2)
        return -means_2[0] + beta * F.softplus(-apart(odds_2.log()))
    margin = beta * apart(means_2) - settings.margin if kind == "simpo" else beta * apart(ratios_2)
    right, wrong = F.softplus(-margin), F.softplus(margin)
    return ((1 - share) * right - share * wrong) / (1 - 2 * share) if kind == "robust" else (1 - share) * right + share * wrong


def add_lora(model: Any, adapter: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The output of each adapted layer gets `scale * B A x` added, all else is frozen; returns what is trained, which is given as
    `<module>.lora_A…` and `<module>.lora_B…` by name."""
    model.requires_grad_(False)
    weights = {name: weight.to(model.device, model.dtype).requires_grad_() for name, weight in adapter.items()}
    pairs = {
        name.partition(".lora_A")[0]: (a, weights[name.replace(".lora_A", ".lora_B")])
        for name, a in weights.items()
        if ".lora_A" in name
    }
    for name, (a, b) in pairs.items():

        def add(_: nn.Module, args: Any, output: Any, a: Any = a, b: Any = b) -> Any:
            return output + scale * F.linear(F.linear(args[0], a), b)

        model.get_submodule(name).register_forward_hook(add)
    return weights


def long_rows(model: Any, device: str) -> dict[str, dict[str, torch.Tensor]]:
    """Arguments of forwards: of a `long` row, which fills the model's positions or has `LONGEST`, and of a `late` one at the last
    positions, if those are further and a causal model takes positions. `model` may be on the meta device."""
    config, ends = model.config, (model.get_input_embeddings(), model.get_output_embeddings())
    vocab_size = min(end.weight.shape[0] for end in ends if end is not None)
    most = LONGEST if device != "cpu" else CPU_PRODUCTS // sum(parameter.numel() for parameter in model.parameters())

    def tokens(limit: int | None) -> torch.Tensor:
        ids_1T = 3 + (torch.arange(min(limit or LONGEST, LONGEST, max(SHORTEST, most))) * 7919 % (vocab_size - 3))[None]
        padding = getattr(config, "pad_token_id", None)
        return torch.where(ids_1T == (-1 if padding is None else padding), 3 + (ids_1T == 3).long(), ids_1T)

    if config.is_encoder_decoder:
        both = getattr(config, "max_position_embeddings", None)
        sides = {"input_ids": "max_encoder_position_embeddings", "decoder_input_ids": "max_decoder_position_embeddings"}
        return {"long": {name: tokens(getattr(config, limit, both)) for name, limit in sides.items()}}
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    rows = {"long": {"input_ids": tokens(limit)}}
    if limit > rows["long"]["input_ids"].shape[1] and "position_ids" in inspect.signature(type(model).forward).parameters:
        rows["late"] = {"input_ids": tokens(SHORTEST), "position_ids": torch.arange(limit - SHORTEST, limit)[None]}
    return rows
