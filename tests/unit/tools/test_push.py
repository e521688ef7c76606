"""`export --push-to-hub`: what is refused before the export, and the upload by the real client to a server of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest

from tests.support.hub_server import Hub, hub_server
from toolkit.config.python import load_config
from toolkit.config.schema import AdapterConfig
from toolkit.errors import UserError
from toolkit.export.push import prepare_push
from toolkit.tools.export import Options, _check_push, push

FILES = {"model.safetensors": b"\x01" * 5000, "config.json": b"{}", "README.md": b"---\nlicense: mit\n---\n"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An export, which no upload may change."""
    folder = tmp_path / "my export"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    yield folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


def test_an_export_is_uploaded_to_a_repository_that_is_new_or_there(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(folder, "mine/model", private=True)
    assert hub.repositories["mine/model"] == FILES and hub.private == {"mine/model"}
    assert f"uploaded to {hub.url}/mine/model\n" in capsys.readouterr().out
    push(folder, "mine/model", private=True)
    push(folder, "mine/public", private=False)
    assert hub.repositories["mine/public"] == FILES


@pytest.mark.parametrize(
    ("name", "private", "token", "fails_at", "sentence"),
    [
        ("theirs/model", False, "hf_good", "", "rights to create a model under the namespace"),
        ("mine/model", False, "hf_bad", "", "Invalid credentials"),
        ("mine/model", False, "hf_good", "/commit/", "the disk of the hub is full"),
        ("mine/model", True, "hf_good", "/commit/", "the disk of the hub is full"),
        ("mine/public", True, "hf_good", "", "which is public: make it private, or take another name"),
    ],
)
def test_a_refused_upload_is_one_sentence_with_the_command_that_repeats_it(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, private: bool, token: str, fails_at: str, sentence: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.fails_at = fails_at
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        push(folder, name, private=private)
    text = str(error.value)
    assert text.startswith(f"{folder} was not uploaded to {name}") and "\n" not in text
    assert name == "mine/public" or text.endswith(f"type hf upload {name} '{folder}'{' --private' * private}")
    assert not hub.repositories.get(name)


def test_a_network_that_is_away(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"was not uploaded to mine/model \(.+\): the folder is whole: check the name"):
        push(folder, "mine/model", private=False)


@pytest.mark.parametrize(
    ("name", "private", "adapter", "merge", "token", "sentence"),
    [
        (None, True, "none", False, "hf_good", "--private is given without --push-to-hub NAMESPACE/NAME: give both, or neither"),
        ("model", False, "none", False, "hf_good", "--push-to-hub is model: give NAMESPACE/NAME"),
        ("a/b/c", False, "none", False, "hf_good", "--push-to-hub is a/b/c: give NAMESPACE/NAME"),
        ("mine/model", False, "lora", False, "hf_good", "the adapter's base /models/base is a folder here: add --merge"),
        ("mine/model", False, "lora", True, None, "--push-to-hub is mine/model, but there is no token: type hf auth login"),
    ],
)
def test_what_is_refused_before_the_export(
    monkeypatch: pytest.MonkeyPatch, name: str | None, private: bool, adapter: Any, merge: bool, token: str | None, sentence: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    places: Any = {"run_folder": Path("runs/run"), "checkpoint": None, "dtype": None, "to": None, "flags": []}
    options = Options(**places, merge=merge, push_to_hub=name, private=private)
    config: Any = SimpleNamespace(adapter=AdapterConfig(method=adapter), model=SimpleNamespace(name_or_path="/models/base"))
    with pytest.raises(UserError, match=re.escape(sentence)):
        _check_push(options, config)


def test_a_hub_that_is_offline_by_its_variable_is_refused_before_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_good")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    options: Any = SimpleNamespace(push_to_hub="mine/model", private=False, merge=False)
    config: Any = SimpleNamespace(adapter=AdapterConfig(method="none"), model=SimpleNamespace(name_or_path="base"))
    with pytest.raises(UserError, match=r"^--push-to-hub is mine/model, but HF_HUB_OFFLINE is set: unset it$"):
        _check_push(options, config)


@pytest.mark.parametrize(
    ("name", "token", "changes", "sentence"),
    [
        ("mine/model", "hf_good", {}, None),
        ("mine/public", "hf_good", {}, None),
        ("mine/model", "hf_bad", {}, "where the hub does not let this token write (.*Invalid credentials.*): check the name"),
        (
            "theirs/model",
            "hf_good",
            {},
            "where the hub does not let this token write (.*rights to create a model under.*): check",
        ),
        ("model", "hf_good", {}, "export.push_to_hub is model: give NAMESPACE/NAME"),
        ("mine/model", "hf_good", {"train.max_steps": 0}, "a run with train.max_steps 0 exports nothing: leave it out"),
        (
            "mine/model",
            "hf_good",
            {"adapter.method": "lora"},
            "the adapter's base /models/base is a folder here: set export.merge",
        ),
    ],
)
def test_a_run_makes_its_repository_or_is_refused_before_it_trains(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    token: str,
    changes: Any,
    sentence: Any,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    given = {"model.name_or_path": "/models/base", "data.source": "x", "train.max_steps": 1, "export.push_to_hub": name}
    config = load_config("llm", overrides=given | changes)
    if sentence is None:
        prepare_push(config)
        kind = "public" if name == "mine/public" else "private"
        assert f"the export will be uploaded to {hub.url}/{name}, which is {kind}\n" in capsys.readouterr().out
        assert name in hub.repositories
        return
    with pytest.raises(UserError, match=re.escape(sentence).replace(r"\.\*", ".*")) as error:
        prepare_push(config)
    assert token not in str(error.value)
