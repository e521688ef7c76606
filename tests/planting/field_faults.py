"""Faults of bugs that other trainers had, with their mechanism in our lines; README.md has the table."""

from dataclasses import replace
from typing import Any

from pytest import MonkeyPatch

from tests.planting.plant import after_sharding

# --- Loss and labels.


def two_starts(patch: MonkeyPatch) -> None:
    """The tokenizer's special tokens before a text are there twice; the tests' Llama has none, so a token of its own is."""
    from toolkit.data.tokens import causal

    prefix = causal._get_prefix
    patch.setattr(causal, "_get_prefix", lambda tokenizer: [*prefix(tokenizer), *(prefix(tokenizer) or [tokenizer.eos_token_id])])


def autocast_whatever_the_config(patch: MonkeyPatch) -> None:
    """Training computes in bf16 where the preset says fp32."""
    import torch

    from toolkit.objectives.objective import Objective

    compute = Objective.loss

    def casting(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_grad_enabled()):
            return compute(*args)

    patch.setattr(Objective, "loss", casting)


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


def dropout_zero_after_an_evaluation(patch: MonkeyPatch) -> None:
    """An evaluation sets the probabilities of dropout to 0 and leaves them so."""
    import torch
    from torch import nn

    from toolkit.objectives.objective import Objective

    compute = Objective.loss

    def forgetting(objective: Any, model: Any, *args: Any) -> Any:
        for module in model.modules() if not torch.is_grad_enabled() else ():
            module.p = 0.0 if isinstance(module, nn.Dropout) else getattr(module, "p", None)
        return compute(objective, model, *args)

    patch.setattr(Objective, "loss", forgetting)


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


# --- Weights, buffers, positions.


def state_matched_by_position(patch: MonkeyPatch) -> None:
    """Two weights of one shape change places under FSDP."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    def swap(sharded: Any) -> None:
        first, second = [p for name, p in sharded.model.named_parameters() if name.endswith(("k_proj.weight", ".k.weight"))][:2]
        if isinstance(sharded.model, FSDPModule):
            with torch.no_grad():
                kept = first.detach().clone()
                first.copy_(second)
                second.copy_(kept)

    after_sharding(patch, swap)


def weights_drawn_again(patch: MonkeyPatch) -> None:
    """What the files have for one weight is skipped, everywhere alike: it stays as it was drawn."""

    def skip(sharded: Any) -> None:
        output = next(p for name, p in sharded.model.named_parameters() if name.endswith(("o_proj.weight", ".o.weight")))
        output.data.fill_(0.01)

    after_sharding(patch, skip)


def buffers_in_bf16(patch: MonkeyPatch) -> None:
    """Rotary frequencies are rounded to bf16, as by `model.to(bf16)`: far positions then have other angles."""

    def round_all(sharded: Any) -> None:
        for buffer in sharded.unwrapped.buffers():
            if buffer.is_floating_point():
                buffer.copy_(buffer.bfloat16())

    after_sharding(patch, round_all)


def frozen_trains(patch: MonkeyPatch) -> None:
    """Sharding makes frozen parameters trainable."""
    after_sharding(patch, lambda sharded: sharded.model.requires_grad_(True))


def adapter_lost_in_a_merge(patch: MonkeyPatch) -> None:
    """A merge leaves out the last layer's adapter."""
    from toolkit.export.lora import Merge

    merged = Merge.merged

    def losing(self: Any, name: str, weight: Any) -> Any:
        named = merged(self, name, weight)
        return (named[0], weight) if named and ".layers.1." in name and named[1].shape == weight.shape else named

    patch.setattr(Merge, "merged", losing)


# --- The order of rows, and resumes.


def later_epochs_in_another_order_after_a_resume(patch: MonkeyPatch) -> None:
    """From the second epoch on, a resumed run shuffles by another seed."""
    from toolkit.data import batch_plan

    draw = batch_plan.BatchPlan._draw_batches

    def draw_others(plan: Any, _: int) -> None:
        plan._draw_batches = lambda epoch: draw(plan, epoch + 7 * (epoch > 0))

    _after_resumes(patch, 1, draw_others)


def second_resume_starts_the_data_again(patch: MonkeyPatch) -> None:
    """A run that is resumed from a resumed one begins with the rows of step 1."""
    _after_resumes(patch, 2, lambda plan, first: _take_rows_of(plan, first, lambda step: step - first + 1))


def resume_at_an_epochs_end_repeats_it(patch: MonkeyPatch) -> None:
    """A run that is resumed between two epochs takes the rows of the last one again."""

    def repeat(plan: Any, first: int) -> None:
        length = plan.steps_per_epoch
        _take_rows_of(plan, first, lambda step: step - length if (first - 1) % length == 0 else step)

    _after_resumes(patch, 1, repeat)


def _take_rows_of(plan: Any, first: int, source: Any) -> None:
    """The steps of a plan take the rows of other steps, from the `first` on."""
    step = plan.step
    plan.step = lambda number: replace(step(source(number) if number >= first else number), step=number)


def _after_resumes(patch: MonkeyPatch, least: int, change_plan: Any) -> None:
    """Change the batch plan of a run that has been resumed so often."""
    from toolkit.training import loop

    load = loop._load_micro_batches

    def load_after(run: Any, first_step: int) -> Any:
        if (first_step > 1) + ("/runs/resumed/" in str(run.config.checkpoint.resume)) >= least:
            change_plan(run.plan, first_step)
        return load(run, first_step)

    patch.setattr(loop, "_load_micro_batches", load_after)


def resume_never_read(patch: MonkeyPatch) -> None:
    """A run that should resume begins anew."""
    from toolkit.training import run

    resume = run.resume
    patch.setattr(run, "resume", lambda of, checkpoint: resume(of, None))


def evaluations_without_gain_forgotten(patch: MonkeyPatch) -> None:
    """A resume counts evaluations without gain anew, so that an early stop comes late."""
    from toolkit.checkpoint.state import TrainState

    from_manifest = TrainState.from_manifest

    def forget(manifest: dict[str, Any]) -> TrainState:
        return replace(from_manifest(manifest), num_evaluations_without_gain=0)

    patch.setattr(TrainState, "from_manifest", staticmethod(forget))


def moments_not_loaded(patch: MonkeyPatch) -> None:
    """A checkpoint's optimizer state is left out when it is loaded."""
    from toolkit.checkpoint import load

    tensors = load.load_tensors
    patch.setattr(
        load,
        "load_tensors",
        lambda wanted, *rest: tensors({name: t for name, t in wanted.items() if not name.startswith("optimizer.")}, *rest),
    )
