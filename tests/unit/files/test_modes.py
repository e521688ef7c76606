"""Who may read what a run writes, and what is said where a file may not be read."""

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub.file_download  # noqa: F401  (another user may not be able to import)
import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoint_files import found_folder, make_checkpoint, names
from tests.support.refusals import refusal
from tests.support.rows import load_rows
from toolkit.checkpoint.load import find_weights
from toolkit.checkpoint.manifest import check_files, checkpoints_folder, read_manifest
from toolkit.config.data import LLMDataConfig
from toolkit.config.schema import ModelConfig
from toolkit.data.cache_folders import find_or_build
from toolkit.data.tokens.chat_template import read_chat_template
from toolkit.data.tokens.tokenizer import open_tokenizer
from toolkit.files.durable import give_usual_mode
from toolkit.models.config import check_weight_files, load_model_config
from toolkit.models.lora_files import CONFIG_FILE, WEIGHTS_FILE, find_adapter
from toolkit.objectives.causal import Causal
from toolkit.tools.checkpoints import show_checkpoints


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can enter; pytest's own are closed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """The process as a user who owns nothing. Root may read everything; for others a file without modes is enough."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("umask", "usual"), [(0o002, "0o664"), (0o077, "0o600")])
def test_files_of_safetensors_get_the_mode_of_any_other_file(tmp_path, umask, usual):
    """All files of a run do: tests/faults/test_run_folders.py."""
    file = tmp_path / "inner" / "model.safetensors"
    file.parent.mkdir()
    save_file({"a": torch.zeros(2)}, file)
    before = os.umask(umask)
    try:
        give_usual_mode(tmp_path)
    finally:
        os.umask(before)
    assert oct(stat.S_IMODE(file.stat().st_mode)) == usual


def test_a_file_system_without_modes_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=PermissionError))
    give_usual_mode(tmp_path)


DENIAL = "cannot be read (Permission denied): ask its owner, or chmod"


@pytest.mark.parametrize("closed", ["rng-00000.safetensors", "manifest.json", "state", ""])
def test_a_checkpoint_that_may_not_be_read_stops_the_resume_and_is_not_called_damaged(shared, capsys, closed):
    make_checkpoint(shared, 3)
    newest = make_checkpoint(shared, 6)
    (newest / closed).chmod(0)
    unread = {"state": "state/.metadata", "": "manifest.json"}.get(closed, closed)
    denial = f"{unread} {DENIAL}"
    with another_user():
        assert refusal(found_folder, shared, "auto") == f"{newest}/{denial}"
        assert refusal(found_folder, shared, str(newest)) == f"checkpoint.resume is {newest}, but {newest.name}/{denial}"
        if closed:
            assert refusal(find_weights, str(newest)) == f"model.init_from {newest}: {newest.name}/{denial}"
        assert not show_checkpoints(shared, verify=True, as_json=False)
    assert f"NOT READ: {denial}" in capsys.readouterr().out
    assert names(shared) == ["step-00000003", "step-00000006"]


def test_checkpoints_that_may_not_be_listed_are_not_none(shared):
    newest = make_checkpoint(shared, 6)
    folder = checkpoints_folder(shared)
    folder.chmod(0)
    with another_user():
        assert refusal(found_folder, shared, "auto") == f"checkpoints: {folder} {DENIAL}"
        assert refusal(found_folder, shared, str(newest)) == f"checkpoint.resume: {newest} {DENIAL}"
        assert refusal(find_weights, str(newest)).endswith(DENIAL)


def test_an_export_that_may_not_be_read_is_not_said_to_be_absent(shared):
    for name in ("config.json", "model.safetensors"):
        (shared / name).write_text("{}")
    (shared / "model.safetensors").chmod(0)
    with another_user():
        assert refusal(find_weights, str(shared)).endswith(f"model.safetensors {DENIAL}")
    (shared / "model.safetensors").rename(shared / WEIGHTS_FILE)
    (shared / CONFIG_FILE).touch()
    with another_user():
        sentence = refusal(find_adapter, str(shared))
    assert sentence.startswith("adapter.name_or_path") and f"{WEIGHTS_FILE} cannot be read" in sentence


def write_rows(folder: Path) -> dict[str, str]:
    (folder / "train").mkdir()
    (folder / "train" / "data.arrow").write_text("text")
    return {}


@pytest.mark.parametrize("closed", ["train/data.arrow", "train", ""])
def test_a_token_cache_that_may_not_be_read_is_not_built_again(shared, closed):
    folder = shared / "cache" / "tokens"
    find_or_build("the token cache", folder, write_rows)
    folder.parent.chmod(0o777)
    (folder / closed).chmod(0)
    with another_user():
        sentence = refusal(find_or_build, "the token cache", folder, write_rows)
    assert sentence.startswith(f"data.cache_dir: {folder}") and "ask its owner, or" in sentence


def test_a_damaged_cache_of_another_user_is_one_sentence(shared):
    folder = shared / "cache" / "a"
    find_or_build("the cache", folder, write_rows)
    (folder / "train" / "data.arrow").write_text("test")
    # As /tmp: nobody moves what is not theirs. Who is not root owns it all, and moves no folder that is not writable.
    (folder if os.geteuid() else folder.parent).chmod(0o555 if os.geteuid() else 0o1777)
    with another_user():
        sentence = refusal(find_or_build, "the cache", folder, write_rows)
    assert sentence.startswith(f"the cache {folder} is damaged and cannot be replaced ")
    assert ": ask its owner, or set data.cache_dir to a folder of" in sentence
    assert (folder / "train" / "data.arrow").read_text() == "test" and os.listdir(folder.parent) == ["a"]


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": "one.safetensors"}})


def rows(path: Path):
    return load_rows(LLMDataConfig(files=str(path)))


def folder_of_rows(path: Path):
    return load_rows(LLMDataConfig(source=str(path.parent)))


def model(path: Path):
    return load_model_config(ModelConfig(name_or_path=str(path.parent), from_scratch=path.name == "config.json"), Causal())


def checkpoint(path: Path) -> None:
    check_files(path.parent, {"world_size": 1, "files": {name: {} for name in (path.name, "state/.metadata")}})


OPENED = {
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
def test_a_pointer_is_named_where_it_is_opened(tmp_path, name):
    load, beside = OPENED[name]
    for file, content in {name: POINTER, **beside}.items():
        (tmp_path / file).write_text(content)
    sentence = f"{tmp_path / name} is a git-lfs pointer, not the file itself: type git lfs pull where it was cloned"
    assert refusal(load, tmp_path / name) == sentence


def test_files_that_are_not_opened_may_be_pointers(tmp_path):
    from tests.support.tokenizer_kinds import build_byte_level

    build_byte_level().save_pretrained(tmp_path)
    for name in ("tokenizer.model", "pytorch_model.bin", "consolidated.safetensors"):
        (tmp_path / name).write_text(POINTER)
    assert open_tokenizer(tmp_path)("a")["input_ids"]
    check_weight_files(tmp_path, "it")


def test_a_manifest_that_is_one_is_a_reason(tmp_path):
    (tmp_path / "manifest.json").write_text(POINTER)
    with pytest.raises(ValueError, match="manifest.json cannot be read .*type git lfs pull where it was cloned"):
        read_manifest(tmp_path)
