"""Manifests of other versions and of other shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_files import change_manifest, make_checkpoint, newest_folder
from toolkit.checkpoint.manifest import MANIFEST


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (3, "has checkpoint format 3; this version reads 4: export it with the version that wrote it, and give"),
        (5, "has checkpoint format 5; this version reads 4: update the toolkit"),
        ("3", "names no checkpoint format (format_version is '3')"),
        (None, "names no checkpoint format (format_version is None)"),
        (True, "names no checkpoint format (format_version is True)"),
    ],
)
def test_another_format_version_is_refused(tmp_path: Path, version: Any, sentence: str) -> None:
    change_manifest(make_checkpoint(tmp_path, 3), lambda manifest: manifest.update(format_version=version))
    found, (refused,) = newest_folder(tmp_path)
    assert found is None and refused.startswith(f"step-00000003 {sentence}")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(
            (lambda m, key=key: m.pop(key), f"{key} is missing")
            for key in ("step", "files", "identity", "state", "world_size", "metrics", "measured_on")
        ),
        *(
            (lambda m, key=key: m.update({key: "x"}), f"{key} is 'x', not a ")
            for key in ("step", "files", "identity", "state", "world_size", "metrics", "measured_on")
        ),
        (lambda m: m.update(world_size=True), "world_size is True, not a whole number"),
        (lambda m: m["identity"].pop("config"), "identity.config is missing"),
        (lambda m: m["identity"].update(frozen_hashes=[]), r"identity.frozen_hashes is [], not a mapping"),
        (lambda m: m["metrics"].update(loss="low"), "metrics['loss'] is 'low', not a number"),
        (lambda m: m["files"].clear(), "names no file"),
        (lambda m: m["files"].update(rng=7), "files['rng'] is 7, not a mapping"),
        (lambda m: m["files"]["rng-00000.safetensors"].pop("sha256"), "files['rng-00000.safetensors'].sha256 is missing"),
        (
            lambda m: m["files"]["rng-00000.safetensors"].update(bytes="15"),
            "files['rng-00000.safetensors'].bytes is '15', not a whole number",
        ),
    ],
)
def test_a_manifest_of_another_shape_is_reported_and_skipped(tmp_path: Path, change, sentence: str) -> None:
    older = make_checkpoint(tmp_path, 3)
    change_manifest(make_checkpoint(tmp_path, 12), change)
    found, (refused,) = newest_folder(tmp_path)
    assert found == older
    assert refused.startswith("step-00000012/manifest.json") and sentence in refused


@pytest.mark.parametrize("text", ["[]", "null", "7", "[" * 100_000, "\ufeff{}", '{"format_version": 3', ""])
def test_a_manifest_that_is_no_mapping_is_reported_and_skipped(tmp_path: Path, text: str) -> None:
    (make_checkpoint(tmp_path, 3) / MANIFEST).write_text(text)
    found, (refused,) = newest_folder(tmp_path)
    assert found is None and refused.startswith("step-00000003/manifest.json ")
