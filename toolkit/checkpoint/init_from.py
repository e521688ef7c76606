"""`model.init_from`: starts a new run from another run's weights, or from an exported model's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.checkpoint.dcp import load_tensors, stored_names
from toolkit.checkpoint.find import newest_valid
from toolkit.checkpoint.manifest import Unread, read_checkpoint, read_manifest
from toolkit.distributed.comm import on_all_ranks, on_rank_0
from toolkit.errors import UserError
from toolkit.files.modes import denials_named
from toolkit.models.config import check_weight_files
from toolkit.models.freeze import hash_parameters
from toolkit.models.load import from_files
from toolkit.models.lora_files import CONFIG_FILE, base_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_weights(path: str) -> Path:
    """The folder that `path` names: an exported model, a checkpoint, or a run folder's newest valid checkpoint; a `UserError` if
    rank 0 finds none, or may not read it, on every rank. Collective."""
    folder = Path(path)

    @denials_named(f"model.init_from {path}")
    def find() -> Path:
        if (folder / "config.json").is_file():
            check_weight_files(folder, f"model.init_from {folder}")
            return folder
        if (folder / CONFIG_FILE).is_file():
            raise UserError(f"model.init_from {folder} is an adapter: give it as adapter.name_or_path, with its adapter.method")
        if (folder / "manifest.json").is_file():
            try:
                return read_checkpoint(folder).folder
            except ValueError as error:
                way_out = "" if isinstance(error, Unread) else ": give a whole checkpoint, or its run folder"
                raise UserError(f"model.init_from {folder}: {error}{way_out}") from None
        found, refused = newest_valid(folder)
        if found is None:
            why = f" ({'; '.join(refused)})" if refused else ""
            raise UserError(
                f"model.init_from {folder} holds no valid checkpoint{why}: "
                "give a run folder that has one, the checkpoint itself, or an exported model"
            )
        return found.folder

    return on_rank_0(find)


def load_into(model: PreTrainedModel, folder: Path) -> None:
    """Overwrite an unsharded model's weights with those in the folder from `find_weights`; a `UserError` if they belong to
    another model, or the checkpoint's run froze weights that differ from the model's. Collective."""
    if (folder / "config.json").is_file():
        on_all_ranks(lambda: _load_exported(model, folder))
    else:
        _load_checkpoint(model, folder)


def _load_exported(model: PreTrainedModel, folder: Path) -> None:
    options = {"config": model.config, "dtype": torch.float32}
    other, about = from_files(type(model), str(folder), f"model.init_from {folder}", options, lambda: model)
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape of"), ("unexpected_keys", "also has")):
        if about[kind]:
            name = min(key if isinstance(key, str) else key[0] for key in about[kind])
            raise UserError(f"model.init_from {folder} does not fit {model.name_or_path}: it {what} {name}")
    model.load_state_dict(other.state_dict())


def _load_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Load a checkpoint. It lacks its run's frozen weights, which must equal the model's own. Collective."""
    trouble = f"model.init_from {folder} does not fit {model.name_or_path}"
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}

    def find_stored() -> set[str]:
        try:
            stored = {name for name in stored_names(folder / "state") if name.startswith("model.")}
        except (ValueError, OSError) as error:
            raise UserError(f"model.init_from {folder} cannot be read: {' '.join(str(error).split())}") from None
        unknown = sorted(stored - state.keys())
        if unknown and base_name(unknown[0]) is None:
            raise UserError(
                f"model.init_from {folder} is of a run that trained an adapter: give its export as adapter.name_or_path, or its "
                "merged model (export.merge) as model.name_or_path"
            )
        if unknown:
            raise UserError(f"{trouble}: it also has {unknown[0].removeprefix('model.')}")
        return stored

    stored = on_all_ranks(find_stored)
    load_tensors({name: state[name] for name in sorted(stored)}, folder / "state", trouble)
    absent = {name for name, _ in model.named_parameters() if f"model.{name}" not in stored}
    if hash_parameters(model, absent) != read_manifest(folder)["identity"]["frozen_hashes"]:
        raise UserError(
            f"the weights that the run of model.init_from {folder} had frozen are not those of {model.name_or_path}: "
            "take that run's model.name_or_path, or its exported model"
        )
