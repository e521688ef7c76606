"""Skips harmful updates: the device decides, alike on all ranks, without a host sync.

An update is skipped if the loss or the gradient is not finite on any rank and, with `optim.skip_beyond_sigmas`, if the
gradient norm spikes. Weights, moments and their step counts then stay unchanged: the optimizer does nothing where
its `found_inf` is 1. The schedule does not shift, because learning rate and rows are functions of the step number.
"""

import math

import torch
import torch.distributed as dist

from toolkit.checkpoint.state import SkipHistory
from toolkit.config.schema import OptimConfig


class SkipGuard:
    """Judges each step's loss and gradient norm; keeps the norms of the last `config.skip_window_steps`."""

    def __init__(self, config: OptimConfig, history: SkipHistory, groups: list[dist.ProcessGroup]) -> None:
        """`groups` as of `wrap.reduction_groups`."""
        self.groups = groups
        self.num_sigmas = config.skip_beyond_sigmas
        norms = history.grad_norms or [None] * config.skip_window_steps
        self.window = torch.tensor([math.nan if norm is None else norm for norm in norms], dtype=torch.float32)
        self.num_seen = torch.tensor(history.num_grad_norms)

    def should_skip(self, loss_sum: torch.Tensor, grad_norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss summed over all ranks, and 1.0 to skip the update or 0.0, of this rank's `loss_sum` and the global norm, which
        is equal on all ranks: fp32 scalars, all but `loss_sum` on the gradients' device. Collective."""
        bad = ~grad_norm.isfinite()
        if self.num_sigmas is not None:
            # Until the window is full its mean is NaN, and no norm exceeds NaN. A spike enters the window clamped to the limit,
            # so that one spike does not blind the guard, yet a lasting change is accepted in time. Non-finite norms do not enter.
            if self.window.device != grad_norm.device:
                self.window, self.num_seen = self.window.to(grad_norm.device), self.num_seen.to(grad_norm.device)
            highest = self.window.mean() + self.num_sigmas * self.window.std()
            place = self.num_seen.remainder(len(self.window)).view(1)
            # Not `window[place]`: it would read `place` on the host.
            counted = torch.where(bad, self.window.index_select(0, place), torch.fmin(grad_norm, highest))
            self.window.index_copy_(0, place, counted)
            self.num_seen += ~bad
            bad = bad | (grad_norm > highest)
        figures = torch.stack([loss_sum.to(grad_norm.device), bad.float()])
        total, num_bad = self.reduced(figures).unbind()
        return total, ((num_bad > 0) | ~total.isfinite()).float()

    def reduced(self, sums: torch.Tensor) -> torch.Tensor:
        """The same tensor, summed over all ranks. Collective."""
        for group in self.groups:
            dist.all_reduce(sums, group=group)
        return sums

    def save_to(self, history: SkipHistory) -> None:
        """Write the window into `history`. Host sync."""
        if self.num_sigmas is not None:
            history.grad_norms = [None if math.isnan(norm) else norm for norm in self.window.tolist()]
            history.num_grad_norms = int(self.num_seen.item())
