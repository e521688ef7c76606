"""Manifests of other versions, and files that are none."""

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


@pytest.mark.parametrize("text", ["[]", "null", "7", "[" * 100_000, "\ufeff{}", '{"format_version": 3', ""])
def test_a_manifest_that_is_no_mapping_is_reported_and_skipped(tmp_path: Path, text: str) -> None:
    (make_checkpoint(tmp_path, 3) / MANIFEST).write_text(text)
    found, (refused,) = newest_folder(tmp_path)
    assert found is None and refused.startswith("step-00000003/manifest.json ")
