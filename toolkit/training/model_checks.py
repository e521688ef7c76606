"""Looks at a real, sharded model before it trains: what every later figure rests on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from toolkit.config.schema import EvalConfig
from toolkit.data.collate import Collator, SummarizationCollator
from toolkit.distributed.rendezvous import is_connection_error
from toolkit.distributed.rng import random_state_kept
from toolkit.distributed.watchdog import at
from toolkit.errors import UserError
from toolkit.loss import summed_cross_entropy, summed_loss
from toolkit.parallel.gather import evaluation_model, generation_ready
from toolkit.parallel.wrap import ShardedModel

NUM_TOKENS = 6
"""Of each of the texts that are tried; enough to see the one before."""
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between the loss by chunks and by whole logits, or ours and an encoder-decoder's, as a share of it."""


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


@torch.no_grad()
def check_seq2seq_model(sharded: ShardedModel, collator: SummarizationCollator, config: EvalConfig) -> None:
    """Try an encoder-decoder on two short rows. Collective.

    - the loss is the model's own of the same labels: decoder inputs are what it takes, and it has no further term;
    - an evaluation as `config` asks for comes to its end, which a run would else find out after it has trained.

    Raises:
        UserError: either is not so.
    """
    name = type(sharded.plain).__name__.removeprefix("FSDP")
    tokens = [token for token in range(3, 5 + NUM_TOKENS) if token != collator.pad_token_id]
    rows = [{"input_ids": tokens[:length], "labels": tokens[-length:]} for length in (NUM_TOKENS, NUM_TOKENS - 2)]
    batch = _on_device(sharded, collator.collate([[row] for row in rows]))
    prompts = _on_device(sharded, collator.prompts(rows))
    # What transformers' DataCollatorForSeq2Seq gives a model: decoder inputs where it says how they are made.
    shifted = {} if collator.own_shift is None else {"decoder_input_ids": batch["decoder_input_ids"]}
    num_labels = sum(len(row["labels"]) for row in rows)
    with torch.compiler.set_stance("force_eager"), random_state_kept():
        ways_out = "try mixed_precision no in the accelerate YAML, or FSDP2 where it is FSDP1"
        with _failing_as(f"{name} cannot be trained here", ways_out), evaluation_model(sharded, unshard="never") as (model, _):
            output = model(**prompts, **shifted, labels=batch["labels"], use_cache=False)
            expected, actual = output.loss.item(), summed_loss(model, batch)[0].item() / num_labels
        tolerance = LOSS_TOLERANCE[torch.float32 if output.logits.dtype == torch.float32 else torch.bfloat16]
        if not abs(actual - expected) <= tolerance * abs(expected):
            raise UserError(
                f"{name} cannot be trained: its own loss is {expected:.6f}, the mean over its label tokens {actual:.6f}, so it "
                "has a term of its own or makes decoder inputs in a way that it does not say"
            )
        ways_out = "try eval.unshard never or eval.generate false, or mixed_precision no in the accelerate YAML"
        with (
            _failing_as(f"{name} cannot be evaluated here", ways_out),
            evaluation_model(sharded, config.unshard) as (model, in_step),
        ):
            summed_loss(model, batch)
            if config.generate:
                with generation_ready(sharded, model):
                    model.generate(  # type: ignore[operator]
                        **prompts,
                        max_new_tokens=2,
                        pad_token_id=collator.pad_token_id,
                        num_beams=config.num_beams,
                        synced_gpus=in_step,
                    )


@contextlib.contextmanager
def _failing_as(what: str, ways_out: str) -> Iterator[None]:
    """An error of the model's own code as a sentence; a lack of memory and a rank that has died say so themselves."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if is_connection_error(error):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{what} ({reason}): {ways_out}") from error


def _loss(sharded: ShardedModel, model: torch.nn.Module, collator: Collator, packs: list[list[dict]]) -> float:
    return summed_loss(model, _on_device(sharded, collator.collate(packs)))[0].item()


def _on_device(sharded: ShardedModel, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    at("checking the model")
    return {name: tensor.to(sharded.accelerator.device) for name, tensor in batch.items()}


def _row(token_ids: list[int]) -> dict[str, list[int]]:
    return {"input_ids": token_ids, "labels": [-100, *token_ids[1:]]}


def _without_last_label(row: dict[str, list[int]]) -> dict[str, list[int]]:
    return {**row, "labels": [*row["labels"][:-1], -100]}


def _unlabelled(row: dict[str, list[int]]) -> dict[str, list[int]]:
    return {**row, "labels": [-100] * len(row["labels"])}
