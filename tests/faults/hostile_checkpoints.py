"""Checkpoints that somebody has tampered with, and knows how to make their manifests match."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from toolkit.files.durable import seal


class Attack:
    """Whoever unpickles it makes a folder."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def run_by_metadata(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "state/.metadata").write_bytes(pickle.dumps(Attack(canary)))


def run_by_tensor(checkpoint: Path, canary: Path) -> None:
    put(checkpoint, "model.shared.weight", saved(Attack(canary)))


def run_by_random_state(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "rng-00001.safetensors").write_bytes(pickle.dumps(Attack(canary)))


def run_by_manifest(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(pickle.dumps(Attack(canary)))


def link_outside(checkpoint: Path, canary: Path) -> None:
    shard = checkpoint / "state/__0_0.distcp"
    shard.symlink_to(shard.rename(checkpoint.parent / "linked.distcp"))


def put(checkpoint: Path, name: str, content: bytes) -> None:
    """Have the metadata name other bytes for rank 0's part of a tensor."""
    metadata = pickle.loads((checkpoint / "state/.metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex(name, metadata.state_dict_metadata[name].chunks[0].offsets)]
    with (checkpoint / "state" / info.relative_path).open("ab") as file:
        info.offset, info.length = file.tell(), file.write(content)
    (checkpoint / "state/.metadata").write_bytes(pickle.dumps(metadata))


def saved(value: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def make_the_manifest_match(checkpoint: Path) -> None:
    """As an attacker would, who has changed files and knows what is compared."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name, about in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        about |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(seal(manifest)))


LOADING = "checkpoint {run}/checkpoints/step-00000002 cannot be loaded: "
METADATA = LOADING + "{run}/checkpoints/step-00000002/state/.metadata is not a checkpoint metadata: "
SHARD = LOADING.replace("{run}", "{{run}}") + "{{run}}/checkpoints/step-00000002/state/__{}_0.distcp holds "
CHECKPOINTS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "code in the metadata": (run_by_metadata, METADATA + "posix.mkdir is not allowed"),
    "code in a tensor": (run_by_tensor, SHARD.format(0) + "no tensor for model.shared.weight (UnpicklingError)"),
    "code in a random state": (
        run_by_random_state,
        "the random state {run}/checkpoints/step-00000002/rng-00001.safetensors cannot be restored (…): resume from another "
        "checkpoint",
    ),
    "code in the manifest": (
        run_by_manifest,
        "no checkpoint in {run}/checkpoints is valid (step-00000002/manifest.json cannot be read (…)): move them away …",
    ),
    "a link that leads outside": (
        link_outside,
        "no checkpoint in {run}/checkpoints is valid (… outside the checkpoint: state/__0_0.distcp is a link): …",
    ),
}
"""What is done to a checkpoint, given the canary too, and the sentence; `{run}` is the run folder, `…` stands for anything."""
