"""What a run tells while it trains: `metrics.jsonl`, progress on the terminal, trackers.

`metrics.jsonl` is the record: one JSON object a line with `kind` (`train`, `eval`, `checkpoint`), `step` and figures whose
names carry their units. Everything else here is a view of it. Only the rank that is told to writes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolkit.config_sections import TrackingConfig
from toolkit.distributed import agreed
from toolkit.errors import UserError
from toolkit.json_lines import encode_json_line, load_json_lines

# Where each tracker of accelerate takes the name of a run; the others know a project only.
_RUN_NAME_OPTION = {
    "wandb": "name",
    "trackio": "name",
    "swanlab": "experiment_name",
    "clearml": "task_name",
    "mlflow": "run_name",
}


class MetricsLog:
    """`metrics.jsonl`, open for appending. A line is on its way to the disk when `write` returns.

    Only one rank writes, so a disk that refuses does not raise there: `error` is to be agreed on by all.
    """

    def __init__(self, path: Path, is_writer: bool):
        self.path = path
        self.error: UserError | None = None
        self._file = None
        if is_writer:
            with _told_as_user_error(path):
                _keep_lines(path, lambda line: True)
                self._file = path.open("ab", buffering=0)

    def write(self, kind: str, step: int, **figures: Any) -> None:
        """Append one line. JSON knows no NaN: such a figure is null, and `<name>_is` says "nan", "inf" or "-inf"."""
        if self._file is None or self.error is not None:
            return
        line: dict[str, Any] = {"kind": kind, "step": step}
        for name, value in figures.items():
            if isinstance(value, float) and not math.isfinite(value):
                line |= {name: None, f"{name}_is": str(value)}
            else:
                line[name] = value
        text = encode_json_line(line)
        try:
            if self._file.write(text) < len(text):  # the last bytes of a disk; the torn line is dropped by the next run
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.note_failure(self.path, error)

    def note_failure(self, path: Path, error: OSError) -> None:
        """Remember that a file of figures cannot be written, on whichever rank; the first one counts."""
        if self.error is None:
            reason = error.strerror or str(error)
            self.error = UserError(f"{path} cannot be written ({reason}): mend that, and run the same command again")

    def sync(self) -> None:
        """See to it that all lines so far outlive a power cut, as a checkpoint does."""
        if self._file is not None and self.error is None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.note_failure(self.path, error)

    def truncate_after(self, step: int, *, evaluation_due: bool = False) -> None:
        """Drop the lines of later steps, here and in every rank's `rows-<rank>.jsonl`: the run goes on after `step` and writes
        them again. Each file whole or not at all. Collective: no rank goes on before.

        Args:
            evaluation_due: the run goes on with the evaluation at `step`; a line of it, from a run between, goes too.

        Raises:
            UserError: a file cannot be read or written, or a line of it is broken; on every rank.
        """

        def stays(line: dict[str, Any]) -> bool:
            return line["step"] < step or (line["step"] == step and not (evaluation_due and line.get("kind") == "eval"))

        def truncate() -> None:
            if self._file is not None:
                self._file.close()
                for path in (self.path, *self.path.parent.glob("rows-*.jsonl")):
                    with _told_as_user_error(path):
                        _keep_lines(path, stays)
                self._file = self.path.open("ab", buffering=0)

        agreed(truncate)

    def close(self) -> None:
        """Close the file; nothing can be written after it."""
        if self._file is not None:
            self._file.close()


@contextlib.contextmanager
def _told_as_user_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be used ({error.strerror}): mend that, and run the same command again") from None
    except UserError as error:  # says file and line
        raise UserError(f"{error}, and run the same command again") from None


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, in order. A last line that a crash has torn is left out.

    Raises:
        UserError: any other line is not JSON; names the file and the line.
    """
    return load_json_lines(path, skip_torn_end=True)


def speed_unit(lines: list[dict[str, Any]]) -> str:
    """What `tokens_per_s` counts: rows where every row is one token, as images are."""
    steps = [line for line in lines if line["kind"] == "train"]
    return "rows/s" if all("num_rows" in line and line["num_rows"] == line["num_tokens"] for line in steps) else "tokens/s"


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite the file with its wanted whole lines only, if there are others; whole or not at all."""
    if not path.exists():
        return
    kept = b"".join(encode_json_line(figures) for figures in load_metrics(path) if wanted(figures))
    if kept == path.read_bytes():
        return
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Progress:
    """Where the run stands: a bar on a terminal, else a line every `min_interval_s` seconds and at the last step.

    Silent unless `enabled`. Steps count optimizer updates; `start_step` is the one a resumed run goes on from.
    """

    def __init__(self, total_steps: int, start_step: int, enabled: bool, *, min_interval_s: float = 10.0):
        self._total_steps, self._start_step, self._enabled = total_steps, start_step, enabled
        self._min_interval_s = min_interval_s
        self._start_s = self._last_line_s = time.monotonic()
        self._step = start_step
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True, smoothing=0.1)

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        learning_rate: float | None = None,
        tokens_per_s: float | None = None,
    ) -> None:
        """`step` is done. Loss in nats a label token, `tokens_per_s` without padding over all ranks; None where not read."""
        if not self._enabled:
            return
        figures = _progress_figures(loss, learning_rate, tokens_per_s)
        if self._bar is not None:
            if figures:
                self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(step - self._step)
        elif step == self._total_steps or time.monotonic() - self._last_line_s >= self._min_interval_s:
            self._last_line_s = time.monotonic()
            parts = (f"step {step}/{self._total_steps}", figures, self._remaining(step))
            print(", ".join(part for part in parts if part), flush=True)
        self._step = step

    def say(self, text: str) -> None:
        """Print a message of its own line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self._enabled:
            print(text, flush=True)

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


def check_trackers(config: TrackingConfig) -> None:
    """Refuse a tracker that accelerate does not know or that is not installed; accelerate would leave it out silently.

    Raises:
        UserError: names it and the trackers that would work.
    """
    if not config.log_with:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    built_in = {str(name) for name in LoggerType}
    usable = {str(name) for name in get_available_trackers()} | (set(LOGGER_TYPE_TO_CLASS) - built_in)
    for name in config.log_with:
        if name in usable:
            continue
        trouble = "is not installed" if name in LOGGER_TYPE_TO_CLASS else "is not a tracker that accelerate knows"
        choice = f"installed are {', '.join(sorted(usable))}" if usable else "none is installed"
        raise UserError(f"tracking.log_with: {name!r} {trouble}; {choice} (metrics.jsonl is written in any case)")


def start_trackers(accelerator: Any, config: TrackingConfig, run_name: str, flat_config: dict[str, Any]) -> None:
    """Start the trackers that the `Accelerator` was built with (`log_with`), and hand them the run's dotted config."""
    if not config.log_with:
        return
    # Trackers take numbers, strings and booleans only (accelerate's tensorboard fails on None and on lists).
    plain = {key: value if isinstance(value, int | float | str) else json.dumps(value) for key, value in flat_config.items()}
    names = {tracker: {_RUN_NAME_OPTION[tracker]: run_name} for tracker in config.log_with if tracker in _RUN_NAME_OPTION}
    accelerator.init_trackers(config.project_name, config=plain, init_kwargs=names)


def log_to_trackers(accelerator: Any, figures: dict[str, Any], step: int) -> None:
    """Send the numbers among `figures` to every tracker; does nothing where none was started."""
    numbers = {key: value for key, value in figures.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    if numbers:
        accelerator.log(numbers, step=step)
