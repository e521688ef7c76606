"""`shardtune init` and where recipes and presets are looked up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.refusals import refusal
from toolkit.tools.preset_runs import find_preset
from toolkit.tools.project import SHIPPED, find_shipped, init


def test_a_projects_own_file_comes_first_and_else_the_toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init(tmp_path, "t5")
    assert find_shipped("recipes", "t5.py") == tmp_path / "recipes" / "t5.py"
    assert find_shipped("recipes", "llm.py") == SHIPPED / "recipes" / "llm.py"
    (tmp_path / "accelerate_configs" / "ddp.yaml").unlink()
    assert find_preset("single") == tmp_path / "accelerate_configs" / "single.yaml"
    assert find_preset("ddp") == SHIPPED / "accelerate_configs" / "ddp.yaml"


def test_a_folder_that_cannot_be_made_is_one_sentence_and_a_link_to_nothing_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(init, tmp_path / "file", "t5").endswith("file cannot be made a project (Not a directory): name another folder")
    (tmp_path / "recipes").symlink_to(tmp_path / "gone")
    assert refusal(init, tmp_path, "t5").endswith("recipes exists already: name another folder, or remove it")
