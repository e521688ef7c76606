"""The toolkit's log: progress and remarks, as lines of one logger, `toolkit`. Tables and results are printed, not logged.

As a program, the toolkit prints INFO as bare lines on stdout, and warnings, marked, on stderr, where they do not get into results
or a config that somebody redirects. As a library it adds no handler where the program has one.
"""

from __future__ import annotations

import logging
import os
import sys

from toolkit.errors import UserError, escape_controls

LEVEL_VARIABLE = "TOOLKIT_LOG_LEVEL"
LEVELS = ("INFO", "WARNING", "ERROR")

logger = logging.getLogger("toolkit")


def start_logging() -> None:
    """Log on rank 0 only, and print the lines, unless the program has handlers of its own for them.

    Commands and runs call it first; calling it again changes nothing. `TOOLKIT_LOG_LEVEL` sets the level, by default INFO.
    A record with `extra={"concerns_this_rank": True}` is logged on any rank, and names it.

    Raises:
        UserError: the variable names no level.
    """
    level = os.environ.get(LEVEL_VARIABLE)
    if level and level.upper() not in LEVELS:
        raise UserError(f"{LEVEL_VARIABLE} is {level}, which is no level: set one of {', '.join(LEVELS)}, or unset it")
    logger.addFilter(_is_for_this_rank)
    is_program = not logger.hasHandlers()
    if is_program:
        logger.addHandler(_Lines())
        logger.propagate = False  # a library may add a handler to the root later, which would print each line again
    if level or is_program:
        logger.setLevel((level or "INFO").upper())


def _is_for_this_rank(record: logging.LogRecord) -> bool:
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        return True
    record.msg = f"rank {rank}: {record.msg}"
    return hasattr(record, "concerns_this_rank")


class _Lines(logging.Handler):
    """Prints a record as a line with control characters escaped, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        text = escape_controls(f"{record.levelname}: {record.getMessage()}" if is_warning else record.getMessage())
        stream = sys.stderr if is_warning else sys.stdout
        # Bars are tqdm's, ours as those of datasets and transformers. Without one, tqdm need not be imported.
        if tqdm := sys.modules.get("tqdm"):
            tqdm.tqdm.write(text, file=stream)
        else:
            stream.write(f"{text}\n")
        stream.flush()
