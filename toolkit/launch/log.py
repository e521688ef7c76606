"""The toolkit's log: progress and remarks, as lines of one logger, `toolkit`. Tables and results are printed, not logged.

As a program, the toolkit prints INFO as bare lines on stdout, and warnings, marked, on stderr, where they do not get into results
or a config that somebody redirects. As a library it adds no handler where the program has one.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from toolkit.errors import UserError, one_line
from toolkit.variables import LOG_LEVEL, find_launchers, given, is_rank_0

LEVELS = ("INFO", "WARNING", "ERROR")

logger = logging.getLogger("toolkit")


def start_logging() -> None:
    """Log on rank 0 only, and print the lines, unless the program has handlers of its own for them.

    `sys.stdout` and `sys.stderr` become `Output`s, which raise nothing.
    Commands and runs call it first, so it finds their launcher too; calling it again changes nothing. `TOOLKIT_LOG_LEVEL` sets
    the level, by default INFO; what is not a level is a `UserError`. A record with `extra={"concerns_this_rank": True}` is logged
    on any rank, and names it.
    """
    find_launchers()
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), Output):  # None: it was closed as Python started
            setattr(sys, name, Output(stream or open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115
    level = given(LOG_LEVEL)
    if level and level.upper() not in LEVELS:
        raise UserError(f"{LOG_LEVEL} is {level}, which is not a level: set one of {', '.join(LEVELS)}, or unset it")
    logger.addFilter(_is_for_this_rank)
    is_program = not logger.hasHandlers()
    if is_program:
        logger.addHandler(_Lines())
        logger.propagate = False  # a library may add a handler to the root later, which would print each line again
    if level or is_program:
        logger.setLevel((level or "INFO").upper())


class Output:
    """A standard stream that never raises, whoever prints: this log, `print`, bars, libraries, Python at its exit.

    What its encoding lacks becomes Python escapes. After the first failure (a full disk, a pipe that nobody reads, a closed
    terminal), `lost` says why, and its file descriptor leads to the null device, for what C code and child processes still write.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.lost = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._attempt(self._stream.write, text)
        except UnicodeEncodeError:
            self._attempt(self._stream.write, text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, do: Callable[..., object], *arguments: str) -> None:
        try:
            if not self.lost:
                with suppress(BlockingIOError):  # its reader is slow
                    do(*arguments)
        except UnicodeEncodeError:
            raise
        except (OSError, ValueError) as error:  # ValueError: somebody has closed it
            self.lost = getattr(error, "strerror", None) or str(error)
            with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())


def lost_outputs() -> dict[str, str]:
    """Why standard streams of this process cannot be written any more, by name."""
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    return {name: stream.lost for name, stream in streams.items() if isinstance(stream, Output) and stream.lost}


def _is_for_this_rank(record: logging.LogRecord) -> bool:
    if is_rank_0():
        return True
    record.msg = f"rank {given('RANK')}: {record.msg}"
    return hasattr(record, "concerns_this_rank")


class _Lines(logging.Handler):
    """Prints a record as one line with control characters escaped, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        text = one_line(f"{record.levelname}: {record.getMessage()}" if is_warning else record.getMessage())
        stream = sys.stderr if is_warning else sys.stdout
        # Bars are tqdm's, ours as those of datasets and transformers. Without one, tqdm need not be imported.
        if tqdm := sys.modules.get("tqdm"):
            tqdm.tqdm.write(text, file=stream)
        else:
            stream.write(f"{text}\n")
        stream.flush()
