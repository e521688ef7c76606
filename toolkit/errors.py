"""`UserError`, which users see as one sentence without a traceback, and the code that prints it.

A `UserError` names the offending value, where it stands and how to fix it. Before the process group exists, one process of each
node prints it. Afterwards the ranks agree on an error (`distributed.comm.on_all_ranks`, or `raise_together` for one that was
noted before), and one of them prints it.
"""

import atexit
import errno
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal

from toolkit.variables import elastic_error_file, in_utf8, is_first_node, is_rank_0, local_rank, local_world_size


class UserError(ValueError):
    """A user's mistake: one clear sentence, no traceback, exit code 2. Ranks that agree on one raise the same, of its class. It
    is printed by one rank of each `node`; one of the `run`, where all ranks raise it; or every `rank`, where none knows which
    others are there."""

    def __init__(self, sentence: str, printed_by: Literal["node", "run", "rank"] = "node") -> None:
        super().__init__(sentence)
        self.printed_by = printed_by


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there"),
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "mount it writable",
    **dict.fromkeys((errno.EIO, errno.ESTALE), "check that disk or network file system"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files (ulimit -n)"),
    errno.ENOMEM: "free memory on this machine, or take one that has more",
}
_SHARED_MEMORY = "/dev/shm"
LOADER_WORKER = re.compile(r"DataLoader worker \(pid.*\d\)* (is killed by signal: \w[\w ]*|exited unexpectedly)")
"""What torch raises of a loader worker that is gone."""
_ERROR_OF_RUST = re.compile(r"\(os error (\d+)\)")


def refused(error: BaseException | None) -> OSError | None:
    """What the operating system refused, if that caused `error`: a full or failing disk, too many open files, no memory.

    Libraries raise errors of their own. torch's zip writer raises a RuntimeError that has the OSError in its context; the errors
    of `tokenizers`, safetensors, gloo, torch's allocator and loader workers have it only in their text.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
        if number is None and not isinstance(error, UserError):
            found = _ERROR_OF_RUST.search(str(error))
            number = int(found[1]) if found else next((n for n in _REMEDIES if os.strerror(n) in str(error)), None)
        if number in _REMEDIES or (isinstance(error, OSError) and number == errno.ENOENT and _lost_its_folder(error.filename)):
            return error if isinstance(error, OSError) and error.errno else OSError(number, os.strerror(number))
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


def _lost_its_folder(path: str | None) -> bool:
    """Whether that is a temporary file whose folder is gone, or a socket, whose error names no path."""
    return path is None or (str(path).startswith(tempfile.gettempdir()) and not Path(path).parent.is_dir())


def as_user_error(error: BaseException) -> UserError | None:
    """A `UserError` itself, or one about what the operating system `refused` or does not permit; None for any other error."""
    if isinstance(error, UserError):
        return error
    if lost := LOADER_WORKER.search(str(error)):
        remedy = "free memory, where the system ends processes because it runs out, or set data.num_loader_workers 0"
        return UserError(f"a process that collates batches {lost[1]}: {remedy}, and start the same command again", "rank")
    denied = error if isinstance(error, PermissionError) and error.filename else None
    if (found := denied or refused(error)) is None:
        return None
    where = f" ({found.filename})" if found.filename else ""
    otherwise = "ask its owner, or chmod" if denied else "do not clean the folder of temporary files (TMPDIR) while this runs"
    remedy = _REMEDIES.get(found.errno or 0, otherwise)
    if found.errno == errno.ENOSPC and str(found.filename or _SHARED_MEMORY).startswith(_SHARED_MEMORY):
        remedy = f"make room on the disk, or in {_SHARED_MEMORY} (docker run --shm-size 1g, or data.num_loader_workers 0)"
    return UserError(f"the system refuses: {found.strerror}{where}; {remedy}, and start the same command again", "rank")


@contextmanager
def refusal_named(what: str, remedy: str) -> Iterator[None]:
    """Turn an `OSError`, or what the system `refused`, into a `UserError`: `what`, in brackets the reason, and the way out."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        found = refused(error) or error
        if not isinstance(found, OSError):
            raise
        raise UserError(f"{what} ({found.strerror or found}): {remedy}") from None


EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
"""A signal stopped the run after a checkpoint; the same command resumes it (EX_TEMPFAIL of sysexits.h)."""
EXIT_HANG = 124
"""No progress for `run.timeout_s` (the exit code of coreutils' `timeout`)."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""They stop a run, with a checkpoint of the last step."""

REFUSED = "user_error_printed"
"""A file in the launch's folder. It exists once a rank has printed why all ranks end."""
LEAVE_TOGETHER_S = 5.0
"""How long a rank waits for the others of its node before it exits. A rank without this error never gets there."""


# Terminals execute the C0 and C1 controls, and reorder the text after a bidirectional override. No encoding has half a surrogate
# pair, which stands in JSON strings, and in Python for a byte of a file name that is not UTF-8.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """`text` for a terminal: control characters, except line breaks and tabs, become Python escapes (`\\x1b` for ESC).

    Use it for every printed text that contains rows, templates or model output: a row could set the terminal's title or hide
    part of a message. Text written to files stays as it is.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


_INVISIBLE = re.compile("[\u00ad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u2060-\u2064\ufeff\ufff9-\ufffb]")
"""Marks of direction and others that show nothing; those that join letters and emoji stay."""


def visible(text: str) -> str:
    """`escape_controls`, with invisible marks as escapes too: where a text is looked at, as in a preview or a report."""
    return _INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], escape_controls(text))


def one_line(text: str) -> str:
    """A sentence or cell for a terminal, with line breaks escaped too: a name of a file or column cannot add a line of its own.

    Log records and a `UserError` get it where they are printed.
    """
    return escape_controls(text).replace("\n", "\\n")


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), gap: str = "  ") -> list[str]:
    """The rows of a table as lines: columns of `left` are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if column in left else ">" for column in range(len(widths))]
    return [
        gap.join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip() for row in rows
    ]


def first_of(names: Iterable[object], most: int = 8) -> str:
    """The first names, separated by commas, and how many more there are."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def first_line(error: BaseException) -> str:
    """What an error says first, without a full stop; its class if it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def plural(num: int, what: str) -> str:
    """1 row, 2 rows, 1,000 micro-batches."""
    return f"{num:,} {what}{'' if num == 1 else 'es' if what.endswith(('ch', 's')) else 's'}"


class Stopped(SystemExit):
    """Ends a run that a signal stopped, on every rank."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


class RankLost(SystemExit):
    """Ends a rank that has lost another one, with exit code 1. Its argument is the sentence, on the rank that prints it."""


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2 on every rank, and so what the system `refused`.

    Other exceptions keep their traceback, unless another rank has printed such a line: they follow from its end.
    Where the locale lets Python read names of files in another encoding than UTF-8, the program starts again in UTF-8 mode: it
    would hold other letters than ASCII as halves of surrogate pairs, which libraries refuse.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, in_utf8())
    launch = _launch_folder()
    if launch is not None:
        signal.signal(signal.SIGTERM, partial(_end_with_the_launch, launch))
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGUSR1, _end_for_another_start) if in_main_thread else None
    try:
        yield
        if in_main_thread:
            signal.signal(signal.SIGUSR1, before)
    except Exception as error:
        user_error = as_user_error(error)
        if user_error is None and launch is not None and (launch / REFUSED).exists():
            os._exit(EXIT_USER_ERROR)
        if user_error is None:
            raise
        if _speaks_for_this_error(user_error):
            print(f"error: {one_line(str(user_error))}", file=sys.stderr, flush=True)
        if launch is not None:
            _save_error_file(user_error)
            _wait_for_local_ranks(launch)
        _leave(EXIT_USER_ERROR)
        raise SystemExit(EXIT_USER_ERROR) from None
    except (Stopped, RankLost) as end:
        for number in SIGNALS:  # one more would only change the exit code
            signal.signal(number, signal.SIG_IGN)
        if isinstance(end, RankLost) and launch is not None and (launch / REFUSED).exists():
            end.code = EXIT_USER_ERROR  # the other rank has printed why it left
        elif isinstance(end.code, str):
            print(escape_controls(end.code), file=sys.stderr, flush=True)
            end.code = 1
        _leave(int(end.code or 0))
        raise


def _launch_folder() -> Path | None:
    """The folder that torch elastic creates for one attempt of this node's processes; None without torch elastic."""
    error_file = elastic_error_file()
    return error_file and error_file.parents[1]


def _speaks_for_this_error(error: UserError) -> bool:
    """Whether this rank prints the error. Torch elastic's summary has the errors of all ranks, so one of each node is enough."""
    launch = _launch_folder()
    if launch is None:
        return error.printed_by == "rank" or (is_rank_0() if error.printed_by == "run" else local_rank() == 0)
    if error.printed_by == "run" and not is_first_node():
        (launch / REFUSED).touch()
        return False
    launch.mkdir(parents=True, exist_ok=True)  # TMPDIR may have been cleaned
    # torch elastic ends a node's processes a tenth of a second after one has failed. Local rank 0 may not have reached the error
    # by then, so the first rank that does prints it.
    try:
        (launch / REFUSED).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _end_with_the_launch(launch: Path, number: int, frame: FrameType | None) -> None:
    """Handle torch elastic's SIGTERM: if another rank has printed a `UserError`, exit with its code."""
    if (launch / REFUSED).exists():
        os._exit(EXIT_USER_ERROR)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _end_for_another_start(number: int, frame: FrameType | None) -> None:
    """Handle the signal ahead of a time limit where no step is trained: at the start, and in the export at the end."""
    if is_rank_0():
        os.write(2, b"stopped by SIGUSR1 outside of the training steps: the same command goes on\n")
    os._exit(EXIT_STOPPED)


def _save_error_file(error: UserError) -> None:
    """Write the error for the launcher's summary of failed ranks, in the format of torch elastic's `ErrorHandler`."""
    file, sentence = elastic_error_file(), one_line(str(error))
    assert file is not None, "torch elastic has started this process"
    extra = {"py_callstack": f"error: {sentence}", "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the disk may be full; the sentence is on stderr anyway
        content = json.dumps({"message": {"message": f"UserError: {sentence}", "extraInfo": extra}})
        file.write_text(content, encoding="utf-8")


def _wait_for_local_ranks(launch: Path) -> None:
    """Wait until every rank of this node is about to exit: after the first exit, torch elastic ends the others by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + LEAVE_TOGETHER_S
    with suppress(OSError):
        (launch / f"leaving_{local_rank()}").touch()
        while time.monotonic() < deadline and len(list(launch.glob("leaving_*"))) < local_world_size():
            time.sleep(0.02)


def _leave(exit_code: int) -> None:
    """Exit without finalizing the interpreter; returns if there is no process group.

    A thread may still be inside torch, such as the watchdog's when the store of rank 0 no longer answers. When torch then asks
    for the GIL, a finalizing Python calls `pthread_exit`, and unwinding through a C++ destructor aborts the process after the
    sentence: "terminate called without an active exception" (python/cpython#87135, until 3.14).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
