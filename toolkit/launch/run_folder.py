"""The run folder `output_dir/name`, on a file system that all nodes share: creating, probing and locking it."""

import contextlib
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from toolkit.config.load import dotted_keys, save_config
from toolkit.distributed.comm import broadcast_object, on_all_ranks, on_rank_0, rank
from toolkit.errors import UserError, refusal_named
from toolkit.files.lock import take_lock

PROBE_TIMEOUT_S = 5.0
"""How long a rank waits to see what rank 0 wrote: a network file system answers from a cache for a while."""
LOCK_TIMEOUT_S = 10.0
"""How long the ranks of an earlier run get to end."""
_PROBE_RETRY_S = 0.1
_LOCK = ".lock"
SECRET_IN_URL = re.compile(r"https?://[^/\s@]+@|://[^/\s@:]*:[^/\s@]+@")
"""Matches a token before the host, or a password after a user name, but not the `@` of abfs://container@host."""


def open_run_folder(config: Any) -> Path:
    """Create or find the run's folder and return it. Nothing in it changes yet: the run may still be refused. Collective.

    A `run.name` that leads out of `run.output_dir`, a secret in a URL of the config, a folder that cannot be written, or in which
    a node does not see what the first one writes, is a `UserError` on every rank.
    """
    folder = on_all_ranks(lambda: _find_folder(config))
    # Random, so that a rank can read only what rank 0 has just written.
    names = f".probe-{secrets.token_hex(16)}", secrets.token_hex(16), socket.gethostname()
    probe, content, first_node = broadcast_object(names)
    try:
        on_rank_0(lambda: _write_probe(folder, probe, content, config.run.output_dir))
        on_all_ranks(lambda: _read_probe(folder, probe, content, config.run.output_dir, first_node))
    finally:
        if rank() == 0:
            with contextlib.suppress(OSError):  # it was never written, and that error is being raised
                (folder / probe).unlink()
    return folder


def lock_run_folder(folder: Path) -> None:
    """Keep other runs out of the folder as long as this process lives. For rank 0 only.

    The ranks of a run that was just killed may need some seconds to end, so this waits for the lock before a `UserError`.
    """
    refusal = f"another run is writing into {folder}: wait for its end, or take another run.name"
    with refusal_named(f"{folder / _LOCK} cannot be opened", "fix that, or take another run.name"):
        folder.mkdir(parents=True, exist_ok=True)
        take_lock(folder / _LOCK, refusal, LOCK_TIMEOUT_S)


def save_run_config(config: Any, folder: Path) -> None:
    """Write the resolved config into the run's folder, after all checks of the run have passed; what the system refuses is a
    `UserError` on every rank. Collective."""
    path = folder / "config.yaml"
    save = refusal_named(f"{path} cannot be written", "fix that first")(save_config)
    on_rank_0(lambda: save(config, path))


def restore_run_folder(config: Any, folder: Path) -> None:
    """Make a folder that was removed during the run again, with its lock and its config. If another run is writing into it by
    now, that is a `UserError`. For rank 0 only."""
    lock_run_folder(folder)
    if not (folder / "config.yaml").exists():
        save_config(config, folder / "config.yaml")


def _find_folder(config: Any) -> Path:
    """`run.name` in `run.output_dir`, if it is inside after links are resolved. A secret is refused here, before the config goes
    to trackers, into the run folder and into every checkpoint."""
    for key, value in dotted_keys(config).items():
        if SECRET_IN_URL.search(str(value)):  # str() covers lists and their entries; the message omits the secret value
            raise UserError(
                f"{key} holds a URL with a password or token, which would be written into the run folder: take it out of the "
                "URL, and give it by the environment (HF_TOKEN) or ~/.netrc"
            )
    output_dir, name = config.run.output_dir, config.run.name
    folder = Path(output_dir, name)
    try:
        parent, resolved = Path(output_dir).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a NUL character
        what = f"run.output_dir {output_dir!r} with run.name {name!r} is not a folder ({error})"
        raise UserError(f"{what}: take other names") from None
    if parent not in resolved.parents:
        raise UserError(
            f"run.name {name} leads to {resolved}, out of run.output_dir {output_dir}: give that place as run.output_dir, or "
            "take another run.name"
        )
    return folder


def _write_probe(folder: Path, probe: str, content: str, output_dir: str) -> None:
    """Create the folder and a file in it: permissions alone do not reveal a read-only or full file system."""
    with refusal_named(f"run.output_dir {output_dir}: {folder} cannot be written", "name a folder that you can write to"):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / probe).open("x") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _read_probe(folder: Path, probe: str, content: str, output_dir: str, first_node: str) -> None:
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):  # it is not there yet, or a network file system has a stale handle
            if (folder / probe).read_text(encoding="ascii", errors="replace") == content:
                return
        if time.monotonic() >= deadline:
            raise UserError(
                f"run.output_dir {output_dir}: what {first_node} writes into {folder} is not there in {folder.absolute()} on "
                f"{socket.gethostname()}: name a folder on a file system that all nodes share"
            )
        time.sleep(_PROBE_RETRY_S)
