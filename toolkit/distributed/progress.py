"""Shows how far the steps and a long phase have come, on rank 0: as a bar on a terminal, elsewhere as lines of the log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

from toolkit.distributed.comm import rank

logger = logging.getLogger("toolkit")

LINE_INTERVAL_S = 10.0
"""Time to the first line of a phase, and between two: a shorter phase prints none."""
BAR_DELAY_S = 2.0
"""Time after which a phase on a terminal has a bar."""


class Phase:
    """The progress of work such as reading rows, until `total` is reached or the `with` ends. Silent on other ranks than 0.

    The bar vanishes at the end. It may be shown while the bar of the steps is: it stands below it. A `total` of None is not
    known; `unit` is in the plural, or "B" for bytes; an earlier process has `done` so many.
    """

    def __init__(self, name: str, total: int | None, unit: str, *, done: int = 0, enabled: bool = True) -> None:
        self.total, self._name, self._unit = total, name, unit
        self._done = self._done_before = done
        self._enabled = enabled and rank() == 0
        self._is_on_terminal = sys.stderr.isatty()
        self._start_s = self._line_s = time.monotonic()
        self._num_logged: int | None = None
        self._bar: Any = None  # made at the first `add`, so that a phase can be sent to another process

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None and self._num_logged not in (None, self._done):
            self._log()

    def add(self, number: int) -> None:
        """Report so much more as done, at most `total`."""
        if not self._enabled:
            return
        self._done = self._done + number if self.total is None else min(self._done + number, self.total)
        if self._is_on_terminal:
            if self._bar is None:  # a bar without a total has no truth value
                unit = {"unit": "B", "unit_scale": True} if self._unit == "B" else {"unit": f" {self._unit}"}
                look = {"delay": BAR_DELAY_S, "leave": False, "dynamic_ncols": True, **unit}
                self._bar = tqdm(desc=self._name, total=self.total, initial=self._done_before, **look)
            self._bar.update(self._done - self._bar.n)
        elif time.monotonic() - self._line_s >= LINE_INTERVAL_S:
            self._log()
        if self._done == self.total:
            self.__exit__(None)

    def _log(self) -> None:
        self._line_s, self._num_logged = time.monotonic(), self._done
        numbers = [number for number in (self._done, self.total) if number is not None]
        shown = [f"{number / 1e9:.2f}" if self._unit == "B" else f"{number:,}" for number in numbers]
        left = _time_left(self._start_s, self._done_before, self._done, self.total or 0)
        logger.info(f"{self._name}: {' of '.join(shown)} {'GB' if self._unit == 'B' else self._unit}{left}")


class Progress:
    """The steps after `start_step`: a bar on a terminal; elsewhere a line of the log every `every_steps` and at the last one.
    Silent on other ranks than 0."""

    def __init__(self, num_steps: int, start_step: int, every_steps: int) -> None:
        self._num_steps, self._every_steps = num_steps, every_steps
        self._first: tuple[float, int] | None = None  # time and step of the first update: an evaluation came before, maybe
        self._bar: Any = None
        if rank() == 0 and sys.stderr.isatty():
            # Without steps/s, so that 80 columns hold the figures.
            form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
            self._bar = tqdm(total=num_steps, initial=start_step, bar_format=form, dynamic_ncols=True, smoothing=0.1)

    def update(self, step: int, *, loss: float, learning_rate: float, speed: dict[str, float]) -> None:
        """Report `step` as done. Loss in nats per label token; speed by its names in `metrics.jsonl`, without padding."""
        if self._first is None:
            self._first = time.monotonic(), step
            if self._bar is not None:
                self._bar.unpause()  # restarts its clock
        num, of_rank = (f"{speed[name]:,.0f}" for name in ("tokens_per_s", "tokens_per_s_per_rank"))
        figures = f"loss {loss:.4f}, lr {learning_rate:.2e}, {num} tokens/s" + (f" ({of_rank} a rank)" if of_rank != num else "")
        figures += f", MFU {speed['mfu_percent']:.1f} %" if "mfu_percent" in speed else ""
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(step - self._bar.n)
        elif rank() == 0 and (step == self._num_steps or step % self._every_steps == 0):
            logger.info(f"step {step}/{self._num_steps}, {figures}{_time_left(*self._first, step, self._num_steps)}")

    def close(self) -> None:
        """End the bar; it stays on the terminal."""
        if self._bar is not None:
            self._bar.close()


def _time_left(start_s: float, done_before: int, done: int, total: int) -> str:
    """At the mean pace since `start_s`, whatever else was done meanwhile; empty where there is none."""
    if not done_before < done < total:
        return ""
    pace_s = (time.monotonic() - start_s) / (done - done_before)
    return f", {readable_duration(pace_s * (total - done))} left"


def readable_duration(duration_s: float) -> str:
    """As in `2 h 05 min`, `3 min 20 s`, `7 s`."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
