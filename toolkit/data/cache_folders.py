"""Cache folders. Like checkpoints they are written beside, hashed, fsynced and renamed; they are verified before they are read.

    <name>/                complete, with hashes in `about.json`; or damaged
    unfinished-<random>/   being written, or left behind by a killed process

Processes on several machines may share a cache. They may read, build or rebuild the same folder at the same time.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, refusal_named, refused
from toolkit.files.durable import denials_named, describe_files, fsync_path, fsync_tree, hash_file, list_files, save_json, seal

logger = logging.getLogger("toolkit")

ABOUT = "about.json"
UNFINISHED = "unfinished-"
IDLE_S = 24 * 3600
"""An unfinished folder without writes for this long counts as left behind. No lock says so earlier: some file systems show locks
only to processes of the same machine."""


def cache_folder(cache_dir: str | None) -> Path:
    """The folder for cached rows and tokens: `data.cache_dir`, or a folder in the Hugging Face cache."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "toolkit"


def find_or_build(what: str, folder: Path, build: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return the description of a cache folder, in messages `what`, as "the token cache". If it is missing or damaged, `build`
    gets `arguments` and a folder, which it fills, and returns the description as JSON values. A cache that cannot be written or
    read, or a damaged folder of another user, is a `UserError`; so are those of `build`."""
    _remove_left_overs(folder.parent)
    if (about := _load_about(what, folder)) is not None:
        return about
    beside = folder.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
    try:
        with refusal_named(f"the cache folder {folder.parent} cannot be written", "set data.cache_dir"):
            beside.mkdir(parents=True)
        if os.path.lexists(folder):
            logger.warning(f"{what} {folder} is damaged: it is built again", extra={"concerns_this_rank": True})
        unfinished = beside / "content"
        unfinished.mkdir()
        about = build(*arguments, unfinished)
        about = seal({**about, "files": describe_files(unfinished, list_files(unfinished))})
        save_json(unfinished / ABOUT, about)
        fsync_tree(unfinished)
        return _put_in_place(what, unfinished, folder) or about
    except UserError:
        raise
    except Exception as error:
        if (found := refused(error)) is None:
            raise
        raise UserError(
            f"{what} cannot be written to {folder.parent} ({found.strerror}): make room there, or set data.cache_dir"
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def name_folder(identity: dict[str, Any]) -> str:
    """The name of a cache folder: sha256 of everything that decides its content, as JSON values."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _put_in_place(what: str, unfinished: Path, folder: Path) -> dict[str, Any] | None:
    """Rename the finished folder to its name. If another run was faster and its folder is valid, return its description."""
    try:
        seen = os.lstat(folder)
        if (about := _load_about(what, folder)) is not None:
            return about
        if os.path.samestat(seen, os.lstat(folder)):  # no other run has replaced it meanwhile
            folder.rename(unfinished.with_name("damaged"))
    except FileNotFoundError:  # there is none, or another run has moved it away
        pass
    except OSError as error:
        raise UserError(
            f"{what} {folder} is damaged and cannot be replaced ({error.strerror}): ask its owner, or set data.cache_dir to "
            "a folder of your own"
        ) from None
    try:
        unfinished.rename(folder)
    except OSError:
        if (about := _load_about(what, folder)) is None:
            raise
        return about
    fsync_path(folder.parent)
    return None


def _load_about(what: str, folder: Path) -> dict[str, Any] | None:
    """Verify a folder and return its description; None if it is missing or damaged, a `UserError` if that cannot be seen."""
    try:
        with denials_named("data.cache_dir"):
            about: dict[str, Any] = json.loads((folder / ABOUT).read_bytes())
            if about.get("sha256") != seal(about)["sha256"]:
                return None
            for name, expected in about["files"].items():
                path = folder / name
                if path.stat().st_size != expected["bytes"] or hash_file(path) != expected["sha256"]:
                    return None
            # A tokenizer may load any file in its folder, so an extra one counts as damage; but no hidden one, as file browsers
            # and network file systems leave.
            visible = [path for path in folder.glob("tokenizer/*") if not path.name.startswith(".")]
            unnamed = {str(path.relative_to(folder)) for path in visible} - about["files"].keys()
            return None if unnamed else about
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{what} {folder} cannot be read ({error.strerror}): fix that, or set data.cache_dir") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # not JSON, or of another form
        return None


def _remove_left_overs(cache: Path) -> None:
    """Remove the unfinished folders of dead processes, and print which."""
    with suppress(OSError):  # what may not be read is reported by whoever reads the cache
        for folder in cache.glob(f"{UNFINISHED}*"):
            with suppress(OSError):  # its process, or another run, is removing it
                if time.time() - max(os.lstat(path).st_mtime for path in [folder, *folder.rglob("*")]) > IDLE_S:
                    shutil.rmtree(folder)
                    logger.info(f"removed {folder}, left behind by a killed run", extra={"concerns_this_rank": True})
