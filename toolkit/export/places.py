"""Where an export is written: its folders, whether they can be put in place, and how rank 0 writes one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.checkpoint.manifest import put_in_place
from toolkit.config.load import RecipeConfig
from toolkit.distributed.comm import on_rank_0, rank
from toolkit.errors import UserError, refusal_named
from toolkit.files.durable import fsync_tree, give_usual_mode
from toolkit.models.lora import is_enabled


@dataclass(frozen=True, kw_only=True)
class Places:
    """What an export writes, and where."""

    adapter: Path | None = None
    """Folder of the adapter."""
    model: Path | None = None
    """Folder of the full model, with the adapter, if there is one, merged into it."""
    check_file: Path | None = None
    """Gets a few tokens and the trained model's logits for them."""
    dtype: torch.dtype | None = None
    """Of the files' weights; None: as they are stored in training, a merged model as its base."""


def run_places(config: RecipeConfig, run_folder: Path) -> Places:
    """What a run itself exports."""
    has_adapter = is_enabled(config.adapter)
    return Places(
        adapter=run_folder / "export" if has_adapter else None,
        model=None if has_adapter and not config.export.merge else run_folder / ("merged" if has_adapter else "export"),
        check_file=run_folder / "export_check.safetensors",
    )


def check_place(place: Path, way_out: str) -> None:
    """Check that a folder can be renamed to `place`: a link, a mount point or a file there is a `UserError` that ends in
    `way_out`."""
    kinds = {"a link": place.is_symlink(), "a mount point": place.is_mount(), "a file": place.is_file()}
    if kind := next((kind for kind, is_it in kinds.items() if is_it), None):
        what = f"{place} is {kind}, and an export replaces a folder of the run's own file system"
        raise UserError(f"{what}: remove it, or {way_out}")


def check_export_places(config: RecipeConfig, run_folder: Path) -> None:
    """Check before the run, by `check_place`, that its export can be renamed into place."""
    if config.train.max_steps == 0 and not config.export.merge:
        return
    for name in ("export", *(("merged",) if config.export.merge else ())):
        for place in (run_folder / name, _unfinished(run_folder / name)):
            check_place(place, "give a place on the other disk as run.output_dir")


@contextlib.contextmanager
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
