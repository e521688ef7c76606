"""What a rank of `verify` records in addition to the steps: which elements dropout drops, and `generate`'s inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.data.collate import move_to
from toolkit.distributed.rng import random_state_kept
from toolkit.loss import summed_loss
from toolkit.tools.verify import PROBED_STEPS
from toolkit.training import loop
from toolkit.training.run import Run


@dataclass
class Probes:
    """What this rank has seen."""

    run: Run | None = None
    """None before its first step. A generation before is only a trial of two tokens."""
    dropout: list[dict[str, Any]] = field(default_factory=list)
    """Losses of one row, each with the dropout of one micro-batch: `rank`, `step`, `micro_batch`, `loss`, `plain_loss` without
    dropout, and `mask`, torch's dropout applied to ones."""
    generated: list[dict[str, Any]] = field(default_factory=list)
    """`prompt` and `new` tokens of each text, with `eos` and `pad`."""


def watch_dropout(probes: Probes) -> None:
    """Wrap the call that seeds a micro-batch, for the rest of this process.

    After that call, in `PROBED_STEPS` of a run with dropout, the loss of the first training row is computed. Row and weights are
    the same on all ranks, so two losses are equal only if all masks are. LoRA's dropout has an effect from the second step on.
    Attention draws its masks in its own kernel, which would hide that other masks are equal, so torch's dropout is also
    applied alone.
    """
    seed_all = loop.seed_all

    def seed_and_look(*parts: Any) -> None:
        seed_all(*parts)
        _, _, step, rank, micro_batch = parts
        if (run := probes.run) is not None and run.config.model.dropout and step in PROBED_STEPS:
            place = {"rank": rank, "step": step, "micro_batch": micro_batch}
            losses = {"loss": _loss(run), "plain_loss": _loss(run, dropout=False)}
            probes.dropout.append(place | losses | {"mask": _mask(run.sharded.accelerator.device)})

    loop.seed_all = seed_and_look


def _loss(run: Run, *, dropout: bool = True) -> float:
    """Loss of the first training row with the current random state, which is kept. Collective under FSDP."""
    model = run.sharded.model
    batch = run.evaluation.collator.collate([[run.train_rows[0]]])
    with random_state_kept(), torch.no_grad():
        model.train(dropout)
        loss_sum, _ = summed_loss(model, move_to(run.sharded.accelerator.device, batch))
        model.train()
    return loss_sum.item()


def _mask(device: torch.device) -> list[bool]:
    with random_state_kept():
        return torch.nn.functional.dropout(torch.ones(64, device=device), 0.5).bool().tolist()


def watch_generation(probes: Probes) -> None:
    """Wrap transformers' `generate` for the rest of this process."""
    from transformers import GenerationMixin

    generate = GenerationMixin.generate

    def generate_and_note(self: Any, *args: Any, **settings: Any) -> Any:
        tokens_BT = generate(self, *args, **settings)
        if probes.run is None:
            return tokens_BT
        input_ids_BS, mask_BS = settings["input_ids"], settings["attention_mask"].bool()
        first = 0 if self.config.is_encoder_decoder else input_ids_BS.shape[1]
        for prompt, mask, tokens in zip(input_ids_BS, mask_BS, tokens_BT, strict=True):
            new = {"prompt": prompt[mask].tolist(), "new": tokens[first:].tolist()}
            probes.generated.append(new | {"eos": settings["eos_token_id"], "pad": settings["pad_token_id"]})
        return tokens_BT

    GenerationMixin.generate = generate_and_note  # type: ignore[method-assign]
