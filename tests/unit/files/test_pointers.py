"""git-lfs pointers in place of files: wherever one is opened, it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import refusal
from toolkit.checkpoint.manifest import check_files, read_manifest
from toolkit.config.data import LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.rows.load import load_rows
from toolkit.data.tokens.chat_template import read_chat_template
from toolkit.data.tokens.read_tokenizer import open_tokenizer
from toolkit.models.config import check_weight_files, load_model_config
from toolkit.models.lora_files import find_adapter
from toolkit.tasks import causal

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": "one.safetensors"}})


def rows(path: Path) -> Any:
    return load_rows(LLMDataConfig(files=str(path)))


def folder_of_rows(path: Path) -> Any:
    return load_rows(LLMDataConfig(source=str(path.parent)))


def model(path: Path) -> Any:
    return load_model_config(ModelConfig(name_or_path=str(path.parent), from_scratch=path.name == "config.json"), causal.TASK)


def checkpoint(path: Path) -> None:
    check_files(path.parent, {"world_size": 1, "files": {name: {} for name in (path.name, "state/.metadata")}})


OPENED: dict[str, tuple[Callable[[Path], Any], dict[str, str]]] = {
    **{f"rows.{ending}": (rows, {}) for ending in ("txt", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "csv.gz")},
    "train.txt": (folder_of_rows, {}),
    "train.parquet": (
        folder_of_rows,
        {"README.md": "---\nconfigs:\n- {config_name: a, drop_x: 1, data_files: '*.parquet'}\n---"},
    ),
    "config.json": (model, {}),
    "preprocessor_config.json": (model, {"config.json": "{}"}),
    "model.safetensors": (model, {"config.json": "{}"}),
    "model.safetensors.index.json": (lambda path: check_weight_files(path.parent, "it"), {}),
    "one.safetensors": (lambda path: check_weight_files(path.parent, "it"), {"model.safetensors.index.json": INDEX}),
    "adapter_model.safetensors": (lambda path: find_adapter(str(path.parent)), {"adapter_config.json": "{}"}),
    **{name: (lambda path: open_tokenizer(path.parent), {}) for name in ("tokenizer.json", "tokenizer.model", "vocab.txt")},
    "template.jinja": (lambda path: read_chat_template(str(path)), {}),
    "rng-00000.safetensors": (checkpoint, {}),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_pointer_is_named_where_it_is_opened(tmp_path: Path, name: str) -> None:
    load, beside = OPENED[name]
    for file, content in {name: POINTER, **beside}.items():
        (tmp_path / file).write_text(content)
    sentence = f"{tmp_path / name} is a git-lfs pointer, not the file itself: type git lfs pull where it was cloned"
    assert refusal(load, tmp_path / name) == sentence


def test_files_that_are_not_opened_may_be_pointers(tmp_path: Path) -> None:
    from tests.support.tokenizer_kinds import build_byte_level

    build_byte_level().save_pretrained(tmp_path)
    for name in ("tokenizer.model", "pytorch_model.bin", "consolidated.safetensors"):
        (tmp_path / name).write_text(POINTER)
    assert open_tokenizer(tmp_path)("a")["input_ids"]
    check_weight_files(tmp_path, "it")


def test_a_manifest_that_is_one_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(POINTER)
    with pytest.raises(ValueError, match="manifest.json cannot be read .*type git lfs pull where it was cloned"):
        partial(read_manifest, tmp_path)()
