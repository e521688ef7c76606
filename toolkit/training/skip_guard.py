"""Updates that would do harm are not taken: decided on the device, alike on all ranks, without the host waiting.

An update is skipped where the loss or the gradient is not finite on any rank and, on demand, where the gradient norm spikes.
Weights, moments and their step counts then stay as they are (the fused AdamW kernel leaves out all its work where `found_inf` is
1), and so does the schedule of the steps to come, as learning rate and rows are functions of the step's number.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from toolkit.checkpoint.state import SkipHistory
from toolkit.config.schema import OptimConfig
from toolkit.distributed.comm import world_size


class SkipGuard:
    """Judges each step's loss and gradient norm; remembers the norms of the last `config.skip_window_steps`."""

    def __init__(self, config: OptimConfig, history: SkipHistory) -> None:
        self.num_sigmas = config.skip_beyond_sigmas
        norms = history.grad_norms or [None] * config.skip_window_steps
        self.window = torch.tensor([math.nan if norm is None else norm for norm in norms], dtype=torch.float32)
        self.num_seen = torch.tensor(history.num_grad_norms)

    def judge(self, loss_sum: torch.Tensor, grad_norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss over all ranks, and whether to skip the update (1.0 or 0.0): fp32 scalars where gradients are. Collective.

        Args:
            loss_sum: of this rank, fp32 scalar.
            grad_norm: of the whole gradient, equal on all ranks, fp32 scalar where the gradients are.
        """
        bad = ~grad_norm.isfinite()
        if self.num_sigmas is not None:
            bad = bad | self._spikes(grad_norm, self.num_sigmas)
        figures = torch.stack([loss_sum.to(grad_norm.device), bad.float()])
        if world_size() > 1:
            dist.all_reduce(figures)
        total, num_bad = figures.unbind()
        return total, ((num_bad > 0) | ~total.isfinite()).float()

    def remember(self, history: SkipHistory) -> None:
        """Write the window into `history`. Waits for the device."""
        if self.num_sigmas is not None:
            history.grad_norms = [None if math.isnan(norm) else norm for norm in self.window.tolist()]
            history.num_grad_norms = int(self.num_seen.item())

    def _spikes(self, grad_norm: torch.Tensor, num_sigmas: float) -> torch.Tensor:
        """Whether the norm is beyond the window's mean by so many of its standard deviations; the window then takes it in.

        Until the window is full its mean is NaN, and nothing is beyond NaN. A spike counts as high as was allowed, so that
        one of them does not blind the guard, and a lasting change is accepted in time. What is not finite does not count.
        """
        if self.window.device != grad_norm.device:
            self.window, self.num_seen = self.window.to(grad_norm.device), self.num_seen.to(grad_norm.device)
        highest = self.window.mean() + num_sigmas * self.window.std()
        place = self.num_seen.remainder(len(self.window)).view(1)
        # Not `window[place]`, which would read `place`.
        counted = torch.where(grad_norm.isfinite(), torch.fmin(grad_norm, highest), self.window.index_select(0, place))
        self.window.index_copy_(0, place, counted)
        self.num_seen += grad_norm.isfinite()
        return grad_norm > highest
