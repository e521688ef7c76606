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
from toolkit.models.lora_files import CONFIG_FILE, base_name
from toolkit.models.tensor_reader import TensorReaders, fill_buffers, hash_readers, state_readers

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


def open_checkpoint(model: PreTrainedModel, weights: TensorReaders, folder: Path) -> TensorReaders:
    """The readers of a model on the meta device: of what a checkpoint has, which every rank loads in full, and else those of
    `weights`. Fills the model's buffers. One of another model, or whose run froze weights that differ from the model's, is a
    `UserError` on every rank. Collective."""
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

    tensors = {name: torch.empty_like(state[name], device="cpu") for name in sorted(on_all_ranks(find_stored))}
    load_tensors(tensors, folder / "state", trouble)
    stored = state_readers({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    fill_buffers(model, stored)
    # It lacks its run's frozen weights.
    absent = {name: parameter.dtype for name, parameter in model.named_parameters() if name not in stored}
    if hash_readers(weights, absent) != read_manifest(folder)["identity"]["frozen_hashes"]:
        raise UserError(
            f"the weights that the run of model.init_from {folder} had frozen are not those of {model.name_or_path}: "
            "take that run's model.name_or_path, or its exported model"
        )
    return weights | stored
