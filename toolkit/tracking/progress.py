"""Shows the steps of a run."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from toolkit.distributed.comm import rank
from toolkit.distributed.progress import readable_duration

logger = logging.getLogger("toolkit")


class Progress:
    """The steps: a bar on a terminal; elsewhere a line of the log every `every_steps` and at the last one. For rank 0 only.

    Args:
        start_step: the step that a resumed run continues from.
    """

    def __init__(self, num_steps: int, start_step: int, every_steps: int) -> None:
        self._num_steps, self._start_step, self._every_steps = num_steps, start_step, every_steps
        self._start_s = time.monotonic()
        self._bar: Any = None
        if rank() == 0 and sys.stderr.isatty():
            from tqdm import tqdm

            # Without steps/s, so that 80 columns hold the figures.
            form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
            self._bar = tqdm(total=num_steps, initial=start_step, bar_format=form, dynamic_ncols=True, smoothing=0.1)

    def update(self, step: int, *, loss: float, learning_rate: float, tokens_per_s: float) -> None:
        """Report `step` as done. Loss in nats per label token; `tokens_per_s` without padding, over all ranks."""
        figures = f"loss {loss:.4f}, lr {learning_rate:.2e}, {tokens_per_s:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(step - self._bar.n)
        elif rank() == 0 and (step == self._num_steps or step % self._every_steps == 0):
            logger.info(f"step {step}/{self._num_steps}, {figures}{self._remaining(step)}")

    def close(self) -> None:
        """End the bar; it stays on the terminal."""
        if self._bar is not None:
            self._bar.close()

    def _remaining(self, step: int) -> str:
        """Time left at the mean pace since the start, evaluations and checkpoints included."""
        if step >= self._num_steps or step <= self._start_step:
            return ""
        pace_s = (time.monotonic() - self._start_s) / (step - self._start_step)
        return f", {readable_duration(pace_s * (self._num_steps - step))} left"
