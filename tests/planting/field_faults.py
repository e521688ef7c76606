"""Faults of bugs that other trainers had, with their mechanism in our lines; docs/verify.md has the table."""

from __future__ import annotations

from typing import Any

from pytest import MonkeyPatch

from tests.planting.plant import change

PAD_TOKEN = 1
"""The end token of the tests' Llama: it may be the padding token too."""

# --- Loss and labels.


def divisor_counts_first_labels(patch: MonkeyPatch) -> None:
    """The loss is divided by one more token a row, the first, which nothing predicts."""
    from toolkit.data.batch_plan import BatchPlan

    change(
        patch, BatchPlan.step, ("int(self.num_label_tokens[rows].sum())", "int(self.num_label_tokens[rows].sum()) + len(rows)")
    )


def labels_shifted_twice(patch: MonkeyPatch) -> None:
    """Each position predicts the token after the next."""
    from toolkit.data.collate import CausalCollator

    change(patch, CausalCollator.collate, (".roll(-1, dims=1)", ".roll(-2, dims=1)"))


def padding_tokens_never_labels(patch: MonkeyPatch) -> None:
    """Labels that are the padding token do not count: where that is the end token, no text learns to end."""
    from toolkit.data.tokens import causal

    right = "labels[:1] = IGNORED_LABEL"
    change(patch, causal._mask, (right, f"labels[labels == {PAD_TOKEN}] = {right}"))


def padding_tokens_masked_in_batches(patch: MonkeyPatch) -> None:
    """As above, where a batch is made: the batch plan counts them."""
    from toolkit.data import collate

    right, also = "(labels_BT.flatten() != IGNORED_LABEL)", f"(labels_BT.flatten() != {PAD_TOKEN})"
    change(patch, collate._counted_labels, (right, f"({right} & {also})"))


def mask_off_by_one(patch: MonkeyPatch) -> None:
    """The first token of an answer does not count."""
    from toolkit.data.tokens import causal

    right = "labels[first:last] = input_ids[first:last]"
    change(patch, causal._mask, (right, "labels[first + 1 : last] = input_ids[first + 1 : last]"))


def two_starts(patch: MonkeyPatch) -> None:
    """The tokenizer's special tokens before a text are there twice; the tests' Llama has none, so a token of its own is."""
    from toolkit.data.tokens import causal

    prefix = causal._get_prefix
    patch.setattr(causal, "_get_prefix", lambda tokenizer: [*prefix(tokenizer), *(prefix(tokenizer) or [tokenizer.eos_token_id])])


def gradient_of_the_head_doubled(patch: MonkeyPatch) -> None:
    """The loss is right, its gradient twice as large."""
    from toolkit import loss

    change(patch, loss._chunk_loss, ("logits_nV = head(hidden_nD)", "logits_nV = 2 * (part := head(hidden_nD)) - part.detach()"))


def autocast_whatever_the_config(patch: MonkeyPatch) -> None:
    """Training computes in bf16 where the preset says fp32."""
    import torch

    from toolkit.training import loop

    compute = loop._summed_loss

    def casting(run: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return compute(run, batch)

    patch.setattr(loop, "_summed_loss", casting)


def gradients_not_synchronized(patch: MonkeyPatch) -> None:
    """DDP never reduces, so that each rank goes its own way."""
    from toolkit.parallel import wrap

    change(
        patch,
        wrap.accumulating.__wrapped__,
        ("isinstance(model, DistributedDataParallel) and not is_last", "isinstance(model, DistributedDataParallel)"),
    )


def gradients_of_the_first_layer_only(patch: MonkeyPatch) -> None:
    """Adapters of other layers get none but zeros."""
    from toolkit.training import loop

    clip = loop.clip_gradients

    def clip_first(model: Any, *rest: Any) -> Any:
        for name, parameter in model.named_parameters():
            if ".layers.1." in name and parameter.grad is not None:
                parameter.grad.zero_()
        return clip(model, *rest)

    patch.setattr(loop, "clip_gradients", clip_first)


# --- Modes and evaluation.


def dropout_off_after_an_evaluation(patch: MonkeyPatch) -> None:
    """Under DDP, only the wrapper goes back to training."""
    from toolkit.parallel import gather

    right = "        sharded.model.train()\n"
    wrong = "        sharded.model.training = True\n        is_sharded or sharded.plain.eval()\n"
    change(patch, gather.evaluation_model.__wrapped__, (right, wrong))


def dropout_zero_after_an_evaluation(patch: MonkeyPatch) -> None:
    """An evaluation sets the probabilities of dropout to 0 and leaves them so."""
    from torch import nn

    from toolkit.evaluation import loop

    compute = loop.summed_loss

    def forgetting(model: Any, batch: Any) -> Any:
        for module in model.modules():
            module.p = 0.0 if isinstance(module, nn.Dropout) else getattr(module, "p", None)
        return compute(model, batch)

    patch.setattr(loop, "summed_loss", forgetting)


def evaluation_with_dropout(patch: MonkeyPatch) -> None:
    """The model stays in training mode."""
    from toolkit.parallel import gather

    change(patch, gather.evaluation_model.__wrapped__, ("    sharded.model.eval()\n    try", "    try"))


def accuracy_of_the_ranks_averaged(patch: MonkeyPatch) -> None:
    """Accuracy is the mean of the ranks' own, whatever their tokens."""
    from toolkit.distributed.comm import gather_objects
    from toolkit.evaluation.loop import _LossSums

    figures = _LossSums.figures

    def averaging(self: Any) -> dict[str, float]:
        own = self.sums.sum(0).tolist()
        of_ranks = gather_objects(100 * own[1] / max(1.0, own[2]))
        return figures(self) | {"token_accuracy": sum(of_ranks) / len(of_ranks)}

    patch.setattr(_LossSums, "figures", averaging)


def evaluation_loss_divided_twice(patch: MonkeyPatch) -> None:
    """Once by the tokens, once by the ranks; with one process by two all the same."""
    from toolkit.evaluation import loop

    change(patch, loop.figures_of, ("loss = total_loss / total_tokens", "loss = total_loss / total_tokens / 2"))


def last_rows_counted_twice(patch: MonkeyPatch) -> None:
    """Ranks without a batch evaluate rows that others have."""
    from toolkit.evaluation import rows

    change(patch, rows.plan_evaluation, ("batches += [[]] *", "batches += [batches[0]] *"))


# --- Weights, buffers, positions.


def state_matched_by_position(patch: MonkeyPatch) -> None:
    """Two weights of one shape change places under FSDP."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from toolkit.training import model as setup

    shard_model = setup.shard_model

    def swapping(*args: Any, **more: Any) -> Any:
        sharded = shard_model(*args, **more)
        first, second = [p for name, p in sharded.model.named_parameters() if name.endswith(("k_proj.weight", ".k.weight"))][:2]
        if isinstance(sharded.model, FSDPModule):
            with torch.no_grad():
                kept = first.detach().clone()
                first.copy_(second)
                second.copy_(kept)
        return sharded

    patch.setattr(setup, "shard_model", swapping)


def weights_drawn_again(patch: MonkeyPatch) -> None:
    """What the files have for one weight is skipped, everywhere alike: it stays as it was drawn."""
    import torch

    from toolkit.training import model as setup

    shard_model = setup.shard_model

    def skipping(*args: Any, **more: Any) -> Any:
        sharded = shard_model(*args, **more)
        with torch.no_grad():
            next(p for name, p in sharded.model.named_parameters() if name.endswith(("o_proj.weight", ".o.weight"))).fill_(0.01)
        return sharded

    patch.setattr(setup, "shard_model", skipping)


def buffers_in_bf16(patch: MonkeyPatch) -> None:
    """Rotary frequencies are rounded to bf16, as by `model.to(bf16)`: far positions then have other angles."""
    import torch

    from toolkit.training import model as setup

    shard_model = setup.shard_model

    def rounding(*args: Any, **more: Any) -> Any:
        sharded = shard_model(*args, **more)
        for buffer in sharded.plain.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.to(torch.bfloat16))
        return sharded

    patch.setattr(setup, "shard_model", rounding)


def frozen_trains(patch: MonkeyPatch) -> None:
    """Sharding makes frozen parameters trainable."""
    from toolkit.training import model as setup

    shard_model = setup.shard_model

    def thawing(*args: Any, **more: Any) -> Any:
        sharded = shard_model(*args, **more)
        sharded.model.requires_grad_(True)
        return sharded

    patch.setattr(setup, "shard_model", thawing)


def adapter_lost_in_a_merge(patch: MonkeyPatch) -> None:
    """A merge leaves out the last layer's adapter."""
    from toolkit.export.lora import Merge

    merged = Merge.merged

    def losing(self: Any, name: str, weight: Any) -> Any:
        named = merged(self, name, weight)
        return (named[0], weight) if named and ".layers.1." in name and named[1].shape == weight.shape else named

    patch.setattr(Merge, "merged", losing)
