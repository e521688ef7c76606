"""Faults of a step. Each changes the toolkit as a mistake in it would, or a library as a broken release or kernel would."""

from typing import Any

from pytest import MonkeyPatch

from tests.planting.plant import after_sharding


def same_masks_on_all_ranks(patch: MonkeyPatch) -> None:
    """Dropout is seeded without the rank."""
    from toolkit.training import loop

    seed_all = loop.seed_all
    patch.setattr(loop, "seed_all", lambda what, seed, step, rank, micro_batch: seed_all(what, seed, step, 0, micro_batch))


def same_masks_in_all_micro_batches(patch: MonkeyPatch) -> None:
    """Dropout is seeded without the micro-batch."""
    from toolkit.training import loop

    seed_all = loop.seed_all
    patch.setattr(loop, "seed_all", lambda what, seed, step, rank, micro_batch: seed_all(what, seed, step, rank, 0))


def dropout_ignores_the_seed(patch: MonkeyPatch) -> None:
    """The kernel of dropout draws from a generator that begins anew with each call."""
    import torch
    import torch.nn.functional as F

    dropout = F.dropout

    def unseeded(values: Any, *args: Any, **settings: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return dropout(values, *args, **settings)

    patch.setattr(F, "dropout", unseeded)


def windows_one_too_wide(patch: MonkeyPatch) -> None:
    """Attention by document counts the token itself beside its window."""
    import dataclasses

    from toolkit.models.patches import documents

    attend = documents._varlen

    def attend_wider(query: Any, key: Any, value: Any, located: documents.Documents, scaling: float | None) -> Any:
        window = None if located.window is None else located.window + 1
        return attend(query, key, value, dataclasses.replace(located, window=window), scaling)

    patch.setattr(documents, "_varlen", attend_wider)


def smoothed_labels(patch: MonkeyPatch) -> None:
    """The kernel of the cross-entropy smooths labels by 0.01."""
    import torch.nn.functional as F

    cross_entropy = F.cross_entropy
    patch.setattr(F, "cross_entropy", lambda *args, **settings: cross_entropy(*args, **settings | {"label_smoothing": 0.01}))


def missing_gradient_average(patch: MonkeyPatch) -> None:
    """FSDP adds up the gradients of its ranks, where DDP still averages them."""
    from torch.distributed.fsdp import FSDPModule

    def add_up(sharded: Any) -> None:
        for module in sharded.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    after_sharding(patch, add_up)


def wrong_loss_divisor(patch: MonkeyPatch) -> None:
    """Each micro-batch is divided by its own label tokens and not by its share of the global batch's."""
    from toolkit.objectives.objective import Objective
    from toolkit.training import loop

    compute = Objective.loss
    counted: list[int] = []

    def counting(objective: Any, model: Any, batch: Any, *args: Any) -> Any:
        counted.append(int((batch["labels"] != -100).sum()))
        return compute(objective, model, batch, *args)

    patch.setattr(Objective, "loss", counting)
    patch.setattr(loop, "scale_to_global_mean", lambda loss_sum, num_label_tokens, world_size: loss_sum / max(1, counted[-1]))


def no_clipping(patch: MonkeyPatch) -> None:
    """The norm is measured, and no gradient is scaled."""
    from toolkit.training import loop

    clip = loop.clip_gradients
    patch.setattr(loop, "clip_gradients", lambda model, max_norm, *rest: clip(model, None))


def clipping_by_the_local_norm(patch: MonkeyPatch) -> None:
    """Each rank scales its shards by their own norm; the norm that is logged is the whole one."""
    import torch

    from toolkit.parallel.units import local_tensor
    from toolkit.training import loop

    clip = loop.clip_gradients

    def clip_locally(model: Any, max_norm: float | None, *_: Any) -> Any:
        norm = clip(model, None)
        gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        local_norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients if max_norm is not None else []:
            gradient.mul_((max_norm / (local_norm + 1e-6)).clamp(max=1.0))
        return norm

    patch.setattr(loop, "clip_gradients", clip_locally)


def beta2_fixed(patch: MonkeyPatch) -> None:
    """AdamW takes its default beta2, whatever it is given."""
    _replace_setting(patch, "betas", lambda betas: (betas[0], 0.999))


def eps_fixed(patch: MonkeyPatch) -> None:
    """AdamW takes its default eps, whatever it is given."""
    _replace_setting(patch, "eps", lambda eps: 1e-8)


def _replace_setting(patch: MonkeyPatch, name: str, replace: Any) -> None:
    from torch.optim import AdamW

    build = AdamW.__init__

    def build_with(self: Any, *args: Any, **settings: Any) -> None:
        build(self, *args, **(settings | {name: replace(settings[name])} if name in settings else settings))

    patch.setattr(AdamW, "__init__", build_with)


def lr_in_the_first_group_only(patch: MonkeyPatch) -> None:
    """Norms and biases are updated with the peak learning rate."""
    from torch.optim import AdamW

    step = AdamW.step

    def step_with(self: Any, *args: Any) -> Any:
        for group in self.param_groups[1:]:
            group["lr"] = self.defaults["lr"]
        return step(self, *args)

    patch.setattr(AdamW, "step", step_with)


def lr_one_step_late(patch: MonkeyPatch) -> None:
    """The learning rate that the loop sets counts from the next update on."""
    from torch.optim import AdamW

    step = AdamW.step

    def step_with(self: Any, *args: Any) -> Any:
        set_now = self.param_groups[0]["lr"]
        for group in self.param_groups:
            group["lr"] = getattr(self, "set_before", set_now)
        self.set_before = set_now
        return step(self, *args)

    patch.setattr(AdamW, "step", step_with)
