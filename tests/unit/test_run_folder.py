"""The folder of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit import run_folder
from toolkit.errors import UserError
from toolkit.run_folder import open_run_folder


def test_a_folder_that_another_node_does_not_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(run=SimpleNamespace(output_dir=str(tmp_path), name="run"))
    monkeypatch.setattr(run_folder, "rank", lambda: 1)  # whose disk is another: rank 0 made the folder on its own
    with pytest.raises(UserError, match=f"^run.output_dir {tmp_path}: {tmp_path}/run of the first node is not there on .+: name"):
        open_run_folder(config)
    monkeypatch.undo()
    assert open_run_folder(config) == tmp_path / "run"
