"""Looks at a real, sharded causal model before it trains: what every later figure rests on."""

from __future__ import annotations

import torch

from toolkit.data.collate import Collator
from toolkit.errors import UserError
from toolkit.losses import summed_cross_entropy, summed_loss
from toolkit.sharding import ShardedModel, evaluation_model

NUM_TOKENS = 6
"""Of each of the two texts that are tried; enough to see the one before."""
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between the loss by chunks and by whole logits, as a share of it."""


@torch.no_grad()
def check_causal_model(sharded: ShardedModel, collator: Collator, *, packing: bool) -> None:
    """Try the model on two texts of six tokens. Collective.

    - the loss taken by chunks of hidden states is that of the model's own logits;
    - no token sees a later one;
    - packed texts do not see each other (bit for bit: only one text's tokens change between two equal calculations).

    Raises:
        UserError: the model is not made so; names the setting that helps, if there is one.
    """
    name = type(sharded.plain).__name__.removeprefix("FSDP")
    vocab_size = sharded.plain.config.get_text_config().vocab_size
    first, second = (_row([(start + place) % vocab_size for place in range(NUM_TOKENS)]) for start in (3, vocab_size // 2))
    with torch.compiler.set_stance("force_eager"), evaluation_model(sharded, unshard="never") as (model, _):
        inputs = _on_device(sharded, collator.model_inputs([first]))
        logits_BTV = model(**inputs, use_cache=False).logits
        expected = summed_cross_entropy(logits_BTV[:, :-1], inputs["input_ids"][:, 1:]).item()
        try:
            actual = _loss(sharded, model, collator, [[first]])
        except (AttributeError, TypeError):
            raise UserError(f"{name} cannot be trained: its logits cannot be made from its hidden states alone") from None
        tolerance = LOSS_TOLERANCE[torch.float32 if logits_BTV.dtype == torch.float32 else torch.bfloat16]
        if not abs(actual - expected) <= tolerance * abs(expected):
            raise UserError(f"{name} cannot be trained: its loss by hidden states is {actual:.6f}, by its logits {expected:.6f}")
        changed = _row([*first["input_ids"][:-1], second["input_ids"][0]])
        seen = {_loss(sharded, model, collator, [[_without_last_label(other)]]) for other in (first, changed)}
        if len(seen) > 1:
            raise UserError(f"{name} cannot be trained here: its tokens see later ones, so it is no causal language model")
        # Two packs: transformers' flash attention takes several rows of a tensor for unpacked ones.
        packed = [[[_unlabelled(other), second], [second]] for other in (first, changed)]
        if packing and len({_loss(sharded, model, collator, packs) for packs in packed}) > 1:
            raise UserError(f"{name} lets packed rows see each other: set data.packing to false")


def _loss(sharded: ShardedModel, model: torch.nn.Module, collator: Collator, packs: list[list[dict]]) -> float:
    return summed_loss(model, _on_device(sharded, collator.collate(packs)))[0].item()


def _on_device(sharded: ShardedModel, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(sharded.accelerator.device) for name, tensor in batch.items()}


def _row(token_ids: list[int]) -> dict[str, list[int]]:
    return {"input_ids": token_ids, "labels": [-100, *token_ids[1:]]}


def _without_last_label(row: dict[str, list[int]]) -> dict[str, list[int]]:
    return {**row, "labels": [*row["labels"][:-1], -100]}


def _unlabelled(row: dict[str, list[int]]) -> dict[str, list[int]]:
    return {**row, "labels": [-100] * len(row["labels"])}
