"""Shows the progress of a run on the terminal."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

logger = logging.getLogger("toolkit")


class Progress:
    """A progress bar on a terminal; elsewhere a line of the log every `min_interval_s` seconds and at the last step.

    Silent unless `enabled`. Steps are optimizer updates, or rows, as `unit` says; `start_step` is the step that a resumed run
    continues from.
    """

    def __init__(self, total_steps: int, start_step: int, enabled: bool, *, unit: str = "step", min_interval_s: float = 10.0):
        self._total_steps, self._start_step, self._enabled = total_steps, start_step, enabled
        self._min_interval_s, self._unit = min_interval_s, unit
        self._start_s = self._last_line_s = time.monotonic()
        self._step = start_step
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_steps, initial=start_step, unit=unit, dynamic_ncols=True, smoothing=0.1)

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        learning_rate: float | None = None,
        tokens_per_s: float | None = None,
    ) -> None:
        """Report `step` as done. Loss in nats per label token; `tokens_per_s` without padding, over all ranks; None: not read."""
        if not self._enabled:
            return
        figures = _progress_figures(loss, learning_rate, tokens_per_s)
        if self._bar is not None:
            if figures:
                self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(step - self._step)
        elif step == self._total_steps or time.monotonic() - self._last_line_s >= self._min_interval_s:
            self._last_line_s = time.monotonic()
            parts = (f"{self._unit} {step}/{self._total_steps}", figures, self._remaining(step))
            logger.info(", ".join(part for part in parts if part))
        self._step = step

    def close(self) -> None:
        """End the bar; it stays on the terminal."""
        if self._bar is not None:
            self._bar.close()

    def _remaining(self, step: int) -> str:
        """Time left at the mean pace since the start, evaluations and checkpoints included."""
        if step >= self._total_steps or step <= self._start_step:
            return ""
        pace_s = (time.monotonic() - self._start_s) / (step - self._start_step)
        return f"{_readable_duration(pace_s * (self._total_steps - step))} left"


def _progress_figures(loss: float | None, learning_rate: float | None, tokens_per_s: float | None) -> str:
    parts = []
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if learning_rate is not None:
        parts.append(f"lr {learning_rate:.2e}")
    if tokens_per_s is not None:
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    return ", ".join(parts)


def _readable_duration(duration_s: float) -> str:
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
