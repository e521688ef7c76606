"""Where an export goes: its folders, whether they can be put in place, and how rank 0 writes one; a repository of the hub, and
what would fail there after the work."""

import logging
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.checkpoint.manifest import put_in_place
from toolkit.config.load import RecipeConfig
from toolkit.distributed.comm import on_rank_0, rank
from toolkit.errors import UserError, refusal_named
from toolkit.export.card import is_hub_id
from toolkit.files.durable import fsync_tree, give_usual_mode
from toolkit.models.lora import is_enabled

logger = logging.getLogger("toolkit")


@dataclass(frozen=True, kw_only=True)
class ExportPaths:
    """What an export writes, and where."""

    adapter: Path | None = None
    """Folder of the adapter."""
    model: Path | None = None
    """Folder of the full model, with the adapter, if there is one, merged into it."""
    check_file: Path | None = None
    """Gets a few tokens and the trained model's logits for them."""
    dtype: torch.dtype | None = None
    """Of the files' weights; None: as they are stored in training, a merged model as its base."""


def export_paths_of_run(config: RecipeConfig, run_folder: Path) -> ExportPaths:
    """What a run itself exports."""
    has_adapter = is_enabled(config.adapter)
    return ExportPaths(
        adapter=run_folder / "export" if has_adapter else None,
        model=None if has_adapter and not config.export.merge else run_folder / ("merged" if has_adapter else "export"),
        check_file=run_folder / "export_check.safetensors",
    )


def check_place(place: Path, remedy: str) -> None:
    """Check that a folder can be renamed to `place`: a link, a mount point or a file there is a `UserError` that ends in
    `remedy`."""
    kinds = {"a link": place.is_symlink(), "a mount point": place.is_mount(), "a file": place.is_file()}
    if kind := next((kind for kind, is_it in kinds.items() if is_it), None):
        what = f"{place} is {kind}, and an export replaces a folder of the run's own file system"
        raise UserError(f"{what}: remove it, or {remedy}")


def check_export_places(config: RecipeConfig, run_folder: Path) -> None:
    """Check before the run, by `check_place`, that its export can be renamed into place."""
    if config.train.max_steps == 0 and not config.export.merge:
        return
    for name in ("export", *(("merged",) if config.export.merge else ())):
        for place in (run_folder / name, _unfinished(run_folder / name)):
            check_place(place, "give a place on the other disk as run.output_dir")


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which replaces the older one on success, and is removed if it cannot be written. Collective."""
    unfinished = _unfinished(folder)

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def put() -> None:
        give_usual_mode(unfinished)
        fsync_tree(unfinished)
        put_in_place(unfinished, folder)

    try:
        write_on_rank_0(folder, begin)
        yield unfinished
        write_on_rank_0(folder, put)
    except UserError:
        if rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_on_rank_0(folder: Path, work: Callable[[], None]) -> None:
    """Call `work` on rank 0. If the file system refuses it, raise a `UserError` on every rank. Collective."""
    on_rank_0(refusal_named(f"the export {folder} could not be written", "fix that, and start the same command again")(work))


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tmp")


def check_push(config: RecipeConfig, name: str, key: str, *, merge: bool, remedy: str) -> None:
    """Check without network the repository's name, which `key` gives, the adapter's base, `HF_HUB_OFFLINE` and the token;
    `remedy` merges the adapter."""
    from huggingface_hub import constants, get_token

    base = config.model.name_or_path
    if not ("/" in name and is_hub_id(name)):
        raise UserError(f"{key} is {name}: give NAMESPACE/NAME, as in my_name/my_model")
    if is_enabled(config.adapter) and not merge and not is_hub_id(base):
        raise UserError(f"{key} is given, but the adapter's base {base} is a folder here: {remedy}")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{key} is {name}, but HF_HUB_OFFLINE is set: unset it")
    if get_token() is None:
        raise UserError(f"{key} is {name}, but there is no token: type hf auth login, or set HF_TOKEN")


def prepare_push(config: RecipeConfig) -> None:
    """Make the repository of `export.push_to_hub`, a private one, unless it is there; one that this token may not write, or a run
    that exports nothing, is a `UserError`. For one rank."""
    from huggingface_hub import HfApi

    if (name := config.export.push_to_hub) is None:
        return
    check_push(config, name, "export.push_to_hub", merge=config.export.merge, remedy="set export.merge true")
    if config.train.max_steps == 0 and not config.export.merge:
        raise UserError(f"export.push_to_hub is {name}, but a run with train.max_steps 0 exports nothing: leave it out")
    with _refusal_named(f"export.push_to_hub is {name}, where the hub does not let this token write"):
        url = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().auth_check(name, write=True)
        kind = "private" if HfApi().model_info(name).private else "public"
    logger.info(f"the export will be uploaded to {url}, which is {kind}")


def push(folder: Path, name: str, *, private: bool, may_be_public: bool = False) -> None:
    """Upload an export to a repository of the hub, which is made if it is not there. If the hub does not take it, or the
    repository is public, which it may not be, that is a `UserError`, and the folder is as it was."""
    from huggingface_hub import HfApi

    what = f"{folder} was not uploaded to {name}"
    command = f", and type hf upload {name} {shlex.quote(str(folder))}{' --private' * private}"
    with _refusal_named(what, "the folder is whole: ", command):
        url = HfApi().create_repo(name, private=private or None, exist_ok=True)
        if private and not may_be_public and not HfApi().model_info(name).private:
            raise UserError(f"{what}, which is public: make it private, or take another name")
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    logger.info(f"uploaded to {url}")


@contextmanager
def _refusal_named(what: str, state: str = "", next_step: str = "") -> Iterator[None]:
    from huggingface_hub import get_token

    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the client, its transport, or the network
        reason = " ".join(str(error).split()).replace(get_token() or "\n", "the token")
        raise UserError(f"{what} ({reason}): {state}check the name, the token's rights and the network{next_step}") from None
