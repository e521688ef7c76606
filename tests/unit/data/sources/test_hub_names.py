"""Names and files that `datasets` would take for more than the user named: no file is opened that nobody named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from mnist_config import ImageDataConfig
from mnist_images import load_images

from tests.support.refusals import refusal
from toolkit.config.data import DataConfig, LLMDataConfig, MixEntry
from toolkit.data.rows.load import load_rows

NAMES = sorted(_PACKAGED_DATASETS_MODULES)
_opened: list[str] = []
_is_watching = False


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Files opened by Python in a working directory that holds a secret in every form; it begins with the test."""
    global _is_watching
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    here = tmp_path / "here"
    (here / "fold").mkdir(parents=True)
    (here / "secrets.txt").write_text("password: swordfish\n")
    (here / "secrets.json").write_text('{"text": "swordfish"}\n')
    (here / "secrets.csv").write_text("text\nswordfish\n")
    monkeypatch.chdir(here)
    if not _opened:  # a hook stays for good
        _opened.append("")
        sys.addaudithook(lambda event, args: _opened.append(str(args[0])) if _is_watching and event == "open" else None)
    _opened[1:], _is_watching = [], True
    yield _opened
    _is_watching = False


def llm(tmp_path: Path, **settings: Any) -> list[str]:
    return load_rows(LLMDataConfig(cache_dir=str(tmp_path / "rows"), eval_fraction=0.0, **settings)).train["text"][:]


@pytest.mark.parametrize("name", ["", " ", *NAMES, "Text", "JSON"])
def test_a_kind_of_file_is_no_dataset(tmp_path: Path, opened: list[str], name: str) -> None:
    loads = [
        lambda: llm(tmp_path, source=name),
        lambda: llm(tmp_path, mix=[MixEntry(source="jsonl", files="rows.json"), MixEntry(source=name)]),
        lambda: load_rows(DataConfig(source=name, source_column="text", target_column="text2")),
        lambda: load_images(ImageDataConfig(source=name), 1),
    ]
    for load in loads[
        2 * (name in ("csv", "json", "parquet", "arrow")) :
    ]:  # our own names, which the check of the config wants files for
        assert refusal(load)
    assert not [path for path in opened if "secrets" in path]


def test_the_sentence_names_what_there_is(tmp_path: Path, opened: list[str]) -> None:
    Path("text").mkdir()
    sources = "csv, tsv, json, jsonl, parquet, arrow, txt"
    for setting, name, load in (
        ("data.mix[0].source", "Parquet", lambda: llm(tmp_path, mix=[MixEntry(source="Parquet")])),
        ("data.source", "text", lambda: llm(tmp_path, source="text")),
    ):
        assert refusal(load) == (
            f"{setting} {name} is a kind of file, not a dataset: give one of {sources}, a hub id as in user/{name}, or ./{name} "
            "for a folder"
        )
    assert refusal(lambda: load_images(ImageDataConfig(source="imagefolder"), 1)) == (
        "data.source imagefolder is a kind of file, not a dataset: give one of digits, idx, a hub id as in user/imagefolder, or "
        "./imagefolder for a folder"
    )
    assert refusal(lambda: llm(tmp_path, source="")) == f"data.source is empty: give one of {sources}, a hub id, or a folder"


@pytest.mark.parametrize("source", ["./text", "text/", "{here}/text"])
def test_a_folder_with_such_a_name_is_read_and_nothing_beside_it(tmp_path: Path, opened: list[str], source: str) -> None:
    Path("text").mkdir()
    Path("text", "rows.csv").write_text("text\nnamed by the user\n")
    assert llm(tmp_path, source=source.format(here=Path.cwd())) == ["named by the user"]
    assert any("rows.csv" in path for path in opened) and not [path for path in opened if "secrets" in path]
