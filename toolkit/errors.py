"""The one exception that users see as one sentence, and the place where it is printed.

A `UserError` names the offending value, where it stands and how to fix it. Before the process group exists one process of every
node prints it; afterwards ranks agree on an error first (`distributed.raise_together`) and one of the first node prints it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """A mistake in what the user gave us: one clear sentence, no traceback, exit code 2."""


EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
"""A signal asked for the end; there is a checkpoint, and the same command goes on (EX_TEMPFAIL of sysexits.h)."""
EXIT_HANG = 124
"""No progress for `run.timeout_s` (as `timeout` of coreutils exits)."""


class Stopped(SystemExit):
    """The end of a run that a signal asked for, on every rank."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2; any other exception keeps its traceback."""
    try:
        yield
    except UserError as error:
        if _speaks_for_this_error(error):
            print(f"error: {error}", file=sys.stderr, flush=True)
        # os._exit would skip flushing; SystemExit lets the process group and files close in order.
        raise SystemExit(EXIT_USER_ERROR) from None


def _speaks_for_this_error(error: UserError) -> bool:
    """One printer a job where all ranks agreed on the error, one a node where they could not agree yet; each that met nobody."""
    agreed = getattr(error, "agreed_by_all_ranks", False)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file and getattr(error, "told_by_every_rank", False):
        return True
    if not error_file:
        return os.environ.get("RANK" if agreed else "LOCAL_RANK", "0") == "0"
    if agreed and os.environ.get("GROUP_RANK", "0") != "0":
        return False
    # torch elastic ends a node's processes a tenth of a second after one has failed, and the first of them may not have come
    # as far as the error by then: whoever is there first speaks. The folder is this launch's own, one for each attempt.
    try:
        (Path(error_file).parents[1] / "user_error_told").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
