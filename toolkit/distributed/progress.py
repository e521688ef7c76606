"""Shows how far a long phase has come, on rank 0: as a bar on a terminal, elsewhere as lines of the log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from toolkit.distributed.comm import rank

logger = logging.getLogger("toolkit")

LINE_INTERVAL_S = 10.0
"""Time to the first line of a phase, and between two: a shorter phase prints none."""
BAR_DELAY_S = 2.0
"""Time after which a phase on a terminal has a bar."""


class Phase:
    """The progress of work such as reading rows, until `total` is reached or the `with` ends. Silent on other ranks than 0.

    The bar vanishes at the end. It may be shown while the bar of the steps is: it stands below it.

    Args:
        total: None: not known.
        unit: in the plural; "B" for bytes.
        done: what an earlier process has done.
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
                self._bar = self._build_bar()
            self._bar.update(self._done - self._bar.n)
        elif time.monotonic() - self._line_s >= LINE_INTERVAL_S:
            self._log()
        if self._done == self.total:
            self.__exit__(None)

    def _build_bar(self) -> Any:
        from tqdm import tqdm

        is_bytes = self._unit == "B"
        look = {"delay": BAR_DELAY_S, "leave": False, "dynamic_ncols": True, "unit_scale": is_bytes}
        unit = "B" if is_bytes else f" {self._unit}"
        return tqdm(desc=self._name, total=self.total, initial=self._done_before, unit=unit, **look)

    def _log(self) -> None:
        self._line_s, self._num_logged = time.monotonic(), self._done
        numbers = [number for number in (self._done, self.total) if number is not None]
        shown = [f"{number / 1e9:.2f}" if self._unit == "B" else f"{number:,}" for number in numbers]
        left = ""
        if self.total is not None and self._done_before < self._done < self.total:
            pace_s = (self._line_s - self._start_s) / (self._done - self._done_before)
            left = f", {readable_duration(pace_s * (self.total - self._done))} left"
        logger.info(f"{self._name}: {' of '.join(shown)} {'GB' if self._unit == 'B' else self._unit}{left}")


def readable_duration(duration_s: float) -> str:
    """As in `2 h 05 min`, `3 min 20 s`, `7 s`."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
