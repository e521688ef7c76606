"""Tensors on disk: what was saved comes back, and nothing in the files runs."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import pytest
import torch

from toolkit.tensor_files import load_tensors, save_tensors, stored_names


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"model.weight": torch.randn(5, 3), "optimizer.step": torch.tensor(7.0), "model.half": torch.randn(4).bfloat16()}


def test_round_trip(tmp_path: Path) -> None:
    tensors = some_tensors()
    names = save_tensors(tensors, tmp_path)
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(loaded, tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_tensors(some_tensors(), tmp_path)
    with pytest.raises(ValueError, match="holds no model.other"):
        load_tensors({"model.other": torch.zeros(1)}, tmp_path)
    with pytest.raises(ValueError, match=r"holds model.weight with shape \(5, 3\), not \(3, 5\)"):
        load_tensors({"model.weight": torch.zeros(3, 5)}, tmp_path)


def test_a_pickle_in_the_metadata_does_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Attack:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {canary}",)

    save_tensors(some_tensors(), tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ValueError, match=r"is no checkpoint metadata: posix.system is not allowed"):
        load_tensors(some_tensors(), tmp_path)
    assert not canary.exists()


def test_paths_of_python_3_13_are_read(tmp_path: Path) -> None:
    """3.13 pickles a path under the name of a module that other versions lack."""
    tensors = some_tensors()
    save_tensors(tensors, tmp_path)
    ours = pickle.dumps(pickle.loads((tmp_path / ".metadata").read_bytes()), protocol=2)
    theirs = re.sub(rb"cpathlib(\._local)?\nPosixPath\n", b"cpathlib._local\nPosixPath\n", ours)
    assert b"pathlib._local" in theirs
    (tmp_path / ".metadata").write_bytes(theirs)
    assert stored_names(tmp_path) == set(tensors)


def test_files_outside_the_folder_are_refused(tmp_path: Path) -> None:
    save_tensors(some_tensors(), tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="outside the checkpoint"):
        load_tensors(some_tensors(), tmp_path)


def test_entries_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    """DCP would read them with torch.load(weights_only=False)."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"model.weight": torch.zeros(1), "note": "text"}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(ValueError, match=r"is not a tensor|is not allowed"):
        load_tensors({"model.weight": torch.zeros(1)}, tmp_path)
