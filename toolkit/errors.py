"""The one exception that users see as one sentence, and the place where it is printed.

A `UserError` names the offending value, where it stands and how to fix it. Before the process group exists one process of every
node prints it; afterwards ranks agree on an error first (`distributed.raise_together`) and one of the first node prints it.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType


class UserError(ValueError):
    """A mistake in what the user gave us: one clear sentence, no traceback, exit code 2."""


EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
"""A signal asked for the end; there is a checkpoint, and the same command goes on (EX_TEMPFAIL of sysexits.h)."""
EXIT_HANG = 124
"""No progress for `run.timeout_s` (as `timeout` of coreutils exits)."""

REFUSED = "user_error_printed"
"""A file in the launch's folder, from when one of its ranks has printed why all of them end."""
LEAVE_TOGETHER_S = 5.0
"""How long a rank waits for the others of its node before it leaves: one that the error does not concern never comes."""


# A terminal acts on the C0 and C1 controls, and prints what follows a bidirectional override in another order than it is read.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """`text` for a terminal: control characters but line breaks and tabs as Python escapes them, `\\x1b` for ESC.

    For whatever is printed with text of rows, templates, files or models in it: a row could set the terminal's title, or hide
    what a sentence says. Files get the text as it is.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


class Stopped(SystemExit):
    """The end of a run that a signal asked for, on every rank."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2 of every rank; any other exception keeps its traceback."""
    launch = _launch_folder()
    if launch is not None:
        signal.signal(signal.SIGTERM, partial(_end_with_the_launch, launch))
    try:
        yield
    except UserError as error:
        if _speaks_for_this_error(error):
            print(f"error: {escape_controls(str(error))}", file=sys.stderr, flush=True)
        if launch is not None:
            _save_error_file(error)
            _wait_for_local_ranks(launch)
        _leave(EXIT_USER_ERROR)
        raise SystemExit(EXIT_USER_ERROR) from None
    except Stopped:
        _leave(EXIT_STOPPED)
        raise


def _launch_folder() -> Path | None:
    """The folder that torch elastic makes for one attempt of the processes of this node; None without it."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] if error_file else None


def _speaks_for_this_error(error: UserError) -> bool:
    """One printer a job where all ranks agreed on the error, one a node where they could not agree yet; each that met nobody."""
    agreed = getattr(error, "agreed_by_all_ranks", False)
    launch = _launch_folder()
    if launch is None and getattr(error, "told_by_every_rank", False):
        return True
    if launch is None:
        return os.environ.get("RANK" if agreed else "LOCAL_RANK", "0") == "0"
    if agreed and os.environ.get("GROUP_RANK", "0") != "0":
        (launch / REFUSED).touch()
        return False
    # torch elastic ends a node's processes a tenth of a second after one has failed, and the first of them may not have come
    # as far as the error by then: whoever is there first speaks.
    try:
        (launch / REFUSED).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _end_with_the_launch(launch: Path, number: int, frame: FrameType | None) -> None:
    """Handle torch elastic's SIGTERM: a rank that is slower than the one that printed the error was refused too."""
    if (launch / REFUSED).exists():
        os._exit(EXIT_USER_ERROR)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _save_error_file(error: UserError) -> None:
    """Write what the launcher prints of this rank in its last lines, in the form of torch elastic's `ErrorHandler`."""
    sentence = escape_controls(str(error))
    extra = {"py_callstack": f"error: {sentence}", "timestamp": str(int(time.time()))}
    with suppress(OSError):  # a full disk: the sentence is on stderr all the same
        content = json.dumps({"message": {"message": f"UserError: {sentence}", "extraInfo": extra}})
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(content, encoding="utf-8")


def _wait_for_local_ranks(launch: Path) -> None:
    """Stay until every rank of this node is about to leave, as the first exit makes torch elastic end the others by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + LEAVE_TOGETHER_S
    with suppress(OSError):
        (launch / f"leaving_{os.environ['LOCAL_RANK']}").touch()
        while time.monotonic() < deadline and len(list(launch.glob("leaving_*"))) < int(os.environ["LOCAL_WORLD_SIZE"]):
            time.sleep(0.02)


def _leave(exit_code: int) -> None:
    """End a process that has met others without finalizing the interpreter; returns where there is no process group.

    A thread may still be inside torch: the watchdog's, where the store of rank 0 no longer answers. When torch comes back and
    asks for the interpreter's lock, a finalizing Python answers with `pthread_exit`, and unwinding through a C++ destructor
    aborts the process after the sentence: "terminate called without an active exception" (python/cpython#87135, until 3.14).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
