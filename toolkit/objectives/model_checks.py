"""Checks on the real, sharded model before training: its loss is ours, and tokens see only what they may see."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from toolkit.config.schema import EvalConfig
from toolkit.data.collate import Batch, Collator, SummarizationCollator, labels_at_positions, move_to
from toolkit.distributed.rendezvous import is_connection_error
from toolkit.distributed.rng import random_state_kept
from toolkit.distributed.watchdog import enter_phase
from toolkit.errors import UserError, first_line, refused
from toolkit.evaluation.generate import encoder_output_kept
from toolkit.launch.accelerator import compute_dtype
from toolkit.loss import summed_cross_entropy
from toolkit.models.patches.chunked_loss import has_own_forward, summed_loss
from toolkit.models.patches.experts import experts_by_token
from toolkit.parallel.float8 import no_float8
from toolkit.parallel.gather import evaluation_model, generation_ready
from toolkit.parallel.wrap import ShardedModel

if TYPE_CHECKING:
    from toolkit.objectives.objective import Objective

NUM_TOKENS = 6
"""Length of each test text."""
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference between our loss and the model's: by chunks and by all logits, or an encoder-decoder's own. By the
dtype that the model computes in."""


@torch.no_grad()
def check_causal_model(sharded: ShardedModel, collator: Collator, *, packing: bool) -> None:
    """Check a causal model on two texts of six tokens. Collective.

    - No token sees a later one, and packed texts do not see each other (bit for bit: only the last token of one text changes
      between two equal computations, neither of which multiplies in float8, or by groups of tokens).
    - The loss by chunks of hidden states, packed as the run packs, equals the loss of the model's own logits of each text.

    It takes three forwards; FSDP2 gathers the model for the first alone, if it fits unsharded. If one of these fails, that is a
    `UserError`, with the setting that helps, if there is one.
    """
    # Two texts from different parts of the vocabulary, and the first with another last token, whose label does not count.
    name = type(sharded.unwrapped).__name__.removeprefix("FSDP")
    vocab_size = sharded.unwrapped.config.get_text_config().vocab_size
    texts = [[(start + place) % vocab_size for place in range(NUM_TOKENS)] for start in (3, vocab_size // 2)]
    first, second = ({"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in texts)
    earlier = [-100, *first["input_ids"][1:-1], -100]
    heads = [{**first, "labels": earlier}, {"input_ids": [*first["input_ids"][:-1], second["input_ids"][0]], "labels": earlier}]
    with (
        torch.compiler.set_stance("force_eager"),
        no_float8(sharded.unwrapped),
        experts_by_token(sharded.unwrapped),
        evaluation_model(sharded, "once") as (model, _),
    ):
        # Nothing but the last token changes, so the loss must not.
        # Two packs, because transformers' flash attention treats a batch of several rows as unpacked.
        actual, other = (_loss(sharded, model, collator, [[head, second], [second]] if packing else [[head]]) for head in heads)
        is_leaking = packing and actual != other and not math.isnan(actual)
        if is_leaking:  # what is wrong without packing too comes first
            actual, other = (_loss(sharded, model, collator, [[head]]) for head in heads)
        if actual != other and not math.isnan(actual):
            raise UserError(f"{name} cannot be trained here: its tokens see later ones, so it is not a causal language model")
        # The chunked loss equals that of the model's logits.
        inputs, is_packed = _on_device(sharded, collator.model_inputs([first, second])), packing and not is_leaking
        logits_BTV, ids_BT = model(**inputs, use_cache=False).logits, inputs["input_ids"]
        expected = summed_cross_entropy(logits_BTV[:1, :-2], ids_BT[:1, 1:-1])
        if is_packed:
            expected += 2 * summed_cross_entropy(logits_BTV[1:, :-1], ids_BT[1:, 1:])
        if not _is_close(sharded, actual, expected.item()):
            hint = " (packed: try data.packing false)" if is_packed else ""
            raise UserError(
                f"{name} cannot be trained: its loss by hidden states is {actual:.6f}, by its logits {expected:.6f}{hint}"
            )
        if is_leaking:
            raise UserError(f"{name} lets packed rows see each other: set data.packing to false")


@torch.no_grad()
def check_seq2seq_model(sharded: ShardedModel, collator: SummarizationCollator, config: EvalConfig) -> None:
    """Check an encoder-decoder on two short rows. Collective.

    - Our loss equals the model's own for the same labels, so decoder inputs are right and it has no extra term. A forward of the
      user's may change the logits after that loss was made.
    - An evaluation as `config` asks for runs through, instead of failing after training.

    If one of these fails, that is a `UserError`.
    """
    # Two rows of different lengths, so that padding is part of the check.
    name = type(sharded.unwrapped).__name__.removeprefix("FSDP")
    tokens = [token for token in range(3, 5 + NUM_TOKENS) if token != collator.pad_token_id]
    rows = [{"input_ids": tokens[:length], "labels": tokens[-length:]} for length in (NUM_TOKENS, NUM_TOKENS - 2)]
    batch = _on_device(sharded, collator.collate([[row] for row in rows]))
    prompts = _on_device(sharded, collator.prompts(rows))
    # As transformers' DataCollatorForSeq2Seq does: decoder inputs only if the model says how to make them.
    shifted = {} if collator.own_shift is None else {"decoder_input_ids": batch["decoder_input_ids"]}
    num_labels = sum(len(row["labels"]) for row in rows)
    with torch.compiler.set_stance("force_eager"), random_state_kept():
        # Our loss equals the model's.
        ways_out = "try mixed_precision no in the accelerate YAML, or FSDP2 where it is FSDP1"
        with _failing_as(f"{name} cannot be trained here", ways_out), evaluation_model(sharded, unshard="once") as (model, _):
            output = model(**prompts, **shifted, labels=labels_at_positions(batch, batch["decoder_input_ids"]), use_cache=False)
            expected = output.loss.item()
            actual, again = (summed_loss(model, batch)[0].item() / num_labels for _ in range(2))
        if again != actual and not _is_close(sharded, again, actual):
            raise UserError(
                f"{name} cannot be evaluated: the same two rows have a loss of {actual:.6f} and then of {again:.6f}, so its "
                "forward draws random numbers in evaluation, as dropout does that is not switched off"
            )
        if not has_own_forward(sharded.unwrapped) and not _is_close(sharded, actual, expected):
            raise UserError(
                f"{name} cannot be trained: its own loss is {expected:.6f}, the mean over its label tokens {actual:.6f}, so it "
                "has a term of its own or makes decoder inputs in a way that it does not say"
            )
        # A short evaluation works, generation included.
        ways_out = (
            "try eval.unshard never or eval.generate false, or mixed_precision no in the accelerate YAML; if it is a setting of "
            "the base's generation_config.json, take it out there"
        )
        with (
            _failing_as(f"{name} cannot be evaluated here", ways_out),
            evaluation_model(sharded, config.unshard) as (model, in_step),
        ):
            with encoder_output_kept(model) as encoded:
                summed_loss(model, batch)
            if config.generate:
                with generation_ready(sharded, model):
                    model.generate(  # type: ignore[operator]
                        **prompts,
                        **encoded,
                        max_new_tokens=2,
                        min_length=0,
                        min_new_tokens=0,
                        pad_token_id=collator.pad_token_id,
                        num_beams=config.num_beams or 1,
                        synced_gpus=in_step,
                    )


@torch.no_grad()
def check_loss(sharded: ShardedModel, objective: Objective, collator: Collator, row: dict, label_smoothing: float) -> None:
    """Check on a row that the loss of an objective of the user's is a sum over labels, as the step and an evaluation divide it by
    their number, whatever the micro-batches; one that is not two scalars on the device, a mean, not 0 of a dummy, or without
    `label_smoothing` is a `UserError`. Collective."""
    what, device = f"the loss of objective {objective.name}", sharded.accelerator.device
    with (
        torch.compiler.set_stance("force_eager"),
        no_float8(sharded.unwrapped),
        random_state_kept(),
        evaluation_model(sharded, "once") as (model, _),
    ):

        def loss(num_rows: int = 1, smoothing: float = 0.0, *, is_dummy: bool = False) -> float:
            batch = _on_device(sharded, collator.collate([[row]] * num_rows, is_dummy=is_dummy))
            sums = objective.loss(model, batch, smoothing)
            pair = [each for each in sums if isinstance(each, torch.Tensor)] if isinstance(sums, (tuple, list)) else []
            shapes = [(), () if objective.num_second_sums == 1 else (objective.num_second_sums,)]
            if [(each.shape, each.device.type) for each in pair] != [(shape, device.type) for shape in shapes]:
                raise UserError(f"{what} is not two scalar tensors on {device}: return the sum over labels, and a second sum")
            return sums[0].item()

        once, twice, of_dummy = loss(), loss(2), loss(is_dummy=True)
        smoothed = loss(smoothing=label_smoothing) if label_smoothing else None
    if abs(twice - once) < abs(twice - 2 * once):
        raise UserError(
            f"{what} is {once:.6g} of a row and {twice:.6g} of that row twice: return the sum over labels, not a mean"
        )
    if of_dummy != 0:
        raise UserError(f"{what} is {of_dummy:.6g} of a dummy batch, not 0: let labels with is_dummy not count")
    if smoothed == once:
        raise UserError(f"optim.label_smoothing is {label_smoothing}, and {what} is the same without it: leave it out")


@contextlib.contextmanager
def _failing_as(what: str, ways_out: str) -> Iterator[None]:
    """Turn an error of the model's code into a UserError; out-of-memory and lost connections pass through."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if is_connection_error(error) or refused(error):
            raise
        raise UserError(f"{what} ({first_line(error)}): {ways_out}") from error


def _is_close(sharded: ShardedModel, actual: float, expected: float) -> bool:
    """Whether two losses are equal within `LOSS_TOLERANCE`; False if one is NaN."""
    return abs(actual - expected) <= LOSS_TOLERANCE[compute_dtype(sharded.accelerator)] * abs(expected)


def _loss(sharded: ShardedModel, model: torch.nn.Module, collator: Collator, packs: list[list[dict]]) -> float:
    return summed_loss(model, _on_device(sharded, collator.collate(packs)))[0].item()


def _on_device(sharded: ShardedModel, batch: Batch) -> Batch:
    """Also reports progress: each batch of the check is one."""
    enter_phase("checking the model")
    return move_to(sharded.accelerator.device, batch)
