"""The folder of a run: `output_dir/name`, on a file system that all nodes share, with the resolved config in it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import IO, Any

from toolkit.config.load import dotted_keys, save_config
from toolkit.distributed.comm import broadcast_object, on_all_ranks, rank
from toolkit.errors import UserError

PROBE_TIMEOUT_S = 5.0
"""How long a rank waits for what rank 0 wrote to show: a network file system answers from a cache for a while."""
LOCK_TIMEOUT_S = 10.0
"""How long ranks of an earlier run may take to end."""
_PROBE_RETRY_S = 0.1
_NUM_TRIES = 10
_EMPTY_UNTIL_BEGUN = {".lock", "metrics.jsonl"}
_held_locks: dict[Path, IO[bytes]] = {}
_saved_configs: dict[Path, Any] = {}
_SECRET_IN_URL = re.compile(r"https?://[^/\s@]+@|://[^/\s@:]*:[^/\s@]+@")
"""A token before the host, or a password after a user name; the `@` of abfs://container@host is neither."""


def open_run_folder(config: Any) -> Path:
    """Create the run's folder, or find it; returns it. Nothing in it is changed yet: the run may still be refused. Collective.

    Folders that were made here go at the end of the process where nothing has come into them.

    Raises:
        UserError: `run.name` leads out of `run.output_dir`, a URL in the config holds a secret, the folder cannot be written,
            or a node does not see what the first one writes there; on every rank.
    """
    on_all_ranks(lambda: _check_secrets(config))
    folder = on_all_ranks(lambda: _find_folder(config.run.output_dir, config.run.name))
    # Unguessable, so that what a rank reads can only be what rank 0 has just written.
    probe, content = broadcast_object((f".probe-{secrets.token_hex(16)}", secrets.token_hex(16)))
    try:
        on_all_ranks(lambda: _write_probe(folder, probe, content, config.run.output_dir) if rank() == 0 else None)
        first_node = broadcast_object(socket.gethostname())
        on_all_ranks(lambda: _read_probe(folder, probe, content, config.run.output_dir, first_node))
    finally:
        if rank() == 0:
            with contextlib.suppress(OSError):  # never written, and why is on its way up
                (folder / probe).unlink()
    return folder


def lock_run_folder(folder: Path) -> None:
    """Keep other runs out of the folder as long as this process lives. For rank 0.

    A record lock: children do not hold on to it, a kill releases it. Ranks of a run that was just killed may need some seconds
    to end, so it is waited for.

    Raises:
        UserError: another run is writing into the folder.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    file = _open_lock(folder)
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, folder / ".lock"):
                break
            file.close()  # another run, which was refused, has removed the folder meanwhile
            file = _open_lock(folder)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                raise UserError(f"another run is writing into {folder}: wait for its end, or take another run.name") from None
            time.sleep(_PROBE_RETRY_S)
        except OSError:  # a file system without locks
            break
    _held_locks[folder] = file


def save_run_config(config: Any, folder: Path) -> None:
    """Write the resolved config into the run's folder, once nothing speaks against the run. Collective.

    Raises:
        UserError: it cannot be written; on every rank.
    """

    def save() -> None:
        try:
            if rank() == 0:
                save_config(config, folder / "config.yaml")
                _saved_configs[folder] = config
        except OSError as error:
            raise UserError(f"{folder / 'config.yaml'} cannot be written ({error.strerror}): mend that first") from None

    on_all_ranks(save)


def restore_run_folder(folder: Path) -> str:
    """Make a folder that was removed under the run again, with its lock and its config; returns what to say of it, if anything.
    For rank 0.

    Raises:
        UserError: another run writes into it by now.
        OSError: it cannot be written.
    """
    _make_folder(folder)
    restored = []
    if folder in _held_locks and not _is_at(_held_locks[folder], folder / ".lock"):
        lock_run_folder(folder)
        restored.append("its lock")
    if folder in _saved_configs and not (folder / "config.yaml").exists():
        save_config(_saved_configs[folder], folder / "config.yaml")
        restored.append("config.yaml")
    said = f"; so are {' and '.join(restored)}, and what else was in the folder is lost" if restored else ""
    return said + ("" if any((folder / "checkpoints").glob("step-*")) else "; there is no checkpoint before the next save")


def open_inside(folder: Path, name: str, mode: str) -> IO[Any]:
    """Open a file in the folder, which somebody may just be removing: another run that is refused at this moment, or the user.

    Raises:
        OSError: it cannot be made.
    """
    for _ in range(_NUM_TRIES):
        _make_folder(folder)
        with contextlib.suppress(FileNotFoundError):
            return (folder / name).open(mode)
    return (folder / name).open(mode)


def _check_secrets(config: Any) -> None:
    """Refuse a secret before the config is shown to trackers, or written into the run folder and every checkpoint."""
    for key, value in dotted_keys(config).items():
        if _SECRET_IN_URL.search(str(value)):  # lists and their entries too; the value itself is not told
            raise UserError(
                f"{key} holds a URL with a password or token, which would be written into the run folder: take it out of the "
                "URL, and give it by the environment (HF_TOKEN) or ~/.netrc"
            )


def _find_folder(output_dir: str, name: str) -> Path:
    """`output_dir/name`, if that is a place inside `output_dir` once links are followed."""
    folder = Path(output_dir, name)
    try:
        parent, resolved = Path(output_dir).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a NUL character
        raise UserError(
            f"run.output_dir {output_dir!r} with run.name {name!r} is no folder ({error}): take other names"
        ) from None
    if parent not in resolved.parents:
        raise UserError(
            f"run.name {name} leads to {resolved}, out of run.output_dir {output_dir}: give that place as run.output_dir, or "
            "take another run.name"
        )
    return folder


def _write_probe(folder: Path, probe: str, content: str, output_dir: str) -> None:
    """Create the folder and a file in it: permissions alone do not tell a read-only or a full file system."""
    try:
        with open_inside(folder, probe, "x") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"run.output_dir {output_dir}: {folder} cannot be written ({error.strerror}): name a folder that you can write to"
        ) from None


def _open_lock(folder: Path) -> IO[bytes]:
    return open_inside(folder, ".lock", "ab")  # stays empty: a run that is refused changes nothing of the run before


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _make_folder(folder: Path) -> None:
    for place in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        with contextlib.suppress(FileExistsError):  # another run's, made meanwhile
            place.mkdir()
            atexit.register(_remove_unused, place, os.getpid())
    folder.mkdir(parents=True, exist_ok=True)  # refuses what is no folder


def _remove_unused(folder: Path, process_id: int) -> None:
    """Remove a folder that this process made, if it holds nothing, or of a run of its own only what is made before it begins."""
    if os.getpid() != process_id:  # a fork
        return
    with contextlib.suppress(OSError):  # another run has written into it meanwhile
        names = os.listdir(folder)
        if folder in _held_locks and set(names) <= _EMPTY_UNTIL_BEGUN and not any((folder / n).stat().st_size for n in names):
            for name in sorted(names, reverse=True):  # the lock last
                (folder / name).unlink()
        folder.rmdir()


def _read_probe(folder: Path, probe: str, content: str, output_dir: str, first_node: str) -> None:
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    while not _holds(folder / probe, content):
        if time.monotonic() >= deadline:
            raise UserError(
                f"run.output_dir {output_dir}: what {first_node} writes into {folder} is not there in {folder.absolute()} on "
                f"{socket.gethostname()}: name a folder on a file system that all nodes share"
            )
        time.sleep(_PROBE_RETRY_S)


def _holds(path: Path, content: str) -> bool:
    try:
        return path.read_text(encoding="ascii", errors="replace") == content
    except OSError:  # not there yet, or a stale handle of a network file system
        return False
