"""`export` takes the checkpoint that is asked for, and each kind of export goes into a folder of its own. `--push-to-hub`:
what is refused before the export, and the upload by the real client to a server of our own. And `checkpoints`, which lists
them."""

import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from tests.support.checkpoint_files import change_manifest, make_checkpoint
from tests.support.hub_server import Hub, hub_server
from tests.support.refusals import refusal
from tests.support.workbench import call_toolkit
from toolkit.checkpoint.manifest import MANIFEST
from toolkit.config.python import load_config
from toolkit.export.paths import ExportPaths, prepare_push
from toolkit.tools import checkpoints as checkpoint_table
from toolkit.tools.export import Options, choose_checkpoint, choose_export_paths, load_run_config, push

LORA = {"adapter.method": "lora"}
REQUIRED = {"model.name_or_path": "m", "data.source": "x", "train.max_steps": 9, "checkpoint.keep_best": 1}


def options(run_folder: Path, **given) -> Options:
    defaults = {"checkpoint": None, "merge": False, "dtype": None, "to": None, "flags": []}
    defaults |= {"push_to_hub": None, "private": False}
    return Options(run_folder=run_folder, **defaults | given)


@pytest.mark.parametrize(("metric", "best"), [("rougeL", 2), ("loss", 3)])
def test_the_flag_goes_before_the_setting_and_best_knows_which_value_is_better(tmp_path, metric, best):
    for step, rougeL, loss in ((1, 10.0, 3.0), (2, 30.0, 2.0), (3, 5.0, 1.0), (4, 20.0, 4.0)):
        figures = {"metrics": {"rougeL": rougeL, "loss": loss}}
        change_manifest(make_checkpoint(tmp_path, step), lambda manifest, figures=figures: manifest.update(figures))
    asked: dict[str, list[tuple[str | None, int]]] = {
        "last": [(None, 4), ("best", best), ("step-00000002", 2)],
        "best": [(None, best), ("last", 4), ("1", 1)],
    }
    for weights, cases in asked.items():
        config = load_config("t5", overrides={**REQUIRED, "eval.best_metric": metric, "export.weights": weights})
        for checkpoint, step in cases:
            assert choose_checkpoint(options(tmp_path, checkpoint=checkpoint), config).step == step


def test_each_kind_of_export_has_a_folder_of_its_own(tmp_path):
    plain, lora = (load_config("llm", overrides=REQUIRED | method) for method in ({}, LORA))
    for config, given, expected in (
        (plain, {}, ExportPaths(model=tmp_path / "export-3")),
        (plain, {"dtype": "float16"}, ExportPaths(model=tmp_path / "export-3-float16", dtype=torch.float16)),
        (plain, {"to": tmp_path / "here"}, ExportPaths(model=tmp_path / "here")),
        (lora, {}, ExportPaths(adapter=tmp_path / "export-3")),
        (lora, {"merge": True}, ExportPaths(model=tmp_path / "export-3-merged")),
    ):
        assert choose_export_paths(options(tmp_path, **given), config, 3) == expected


@pytest.mark.parametrize(("named", "taken"), [("flash_attention_2", None), ("eager", "eager"), ("sdpa", "sdpa")])
def test_a_kernel_that_this_machine_may_lack_is_left_out(tmp_path, named, taken):
    settings = {"model": {"name_or_path": "org/m", "attn_implementation": named}, "data": {"source": "x", "max_length_tokens": 8}}
    (tmp_path / "config.yaml").write_text(json.dumps({**settings, "train": {"max_steps": 1}}))
    assert load_run_config(tmp_path, []).model.attn_implementation == taken


FILES = {"model.safetensors": b"\x01" * 5000, "config.json": b"{}", "README.md": b"---\nlicense: mit\n---\n"}


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    with hub_server() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        yield hub


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """An export, which no upload may change."""
    folder = tmp_path / "my export"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    yield folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


def test_an_export_is_uploaded_to_a_repository_that_is_new_or_there(hub, folder, capsys):
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
        ("mine/model", True, "hf_good", "/commit/", "the disk of the hub is full"),
        ("mine/public", True, "hf_good", "", "which is public: make it private, or take another name"),
        ("mine/model", False, "hf_good", "a network that is away", "): the folder is whole: check the name"),
    ],
)
def test_a_refused_upload_is_one_sentence_with_the_command_that_repeats_it(
    hub, folder, monkeypatch, name, private, token, fails_at, sentence
):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.fails_at = fails_at
    if fails_at == "a network that is away":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    text = refusal(push, folder, name, private=private)
    assert text.startswith(f"{folder} was not uploaded to {name}") and sentence in text
    assert name == "mine/public" or text.endswith(f"type hf upload {name} '{folder}'{' --private' * private}")
    assert not hub.repositories.get(name)


@pytest.mark.parametrize(
    ("name", "changes", "token", "sentence"),
    [
        ("mine/model", {}, "hf_good", "the export will be uploaded to HUB/mine/model, which is private\n"),
        ("mine/public", {}, "hf_good", "the export will be uploaded to HUB/mine/public, which is public\n"),
        ("mine/bad", {}, "hf_bad", r"where the hub does not let this token write \(.*Invalid credentials.*\): check the name"),
        ("theirs/model", {}, "hf_good", r"does not let this token write \(.*rights to create a model under.*\): check"),
        ("model", {}, "hf_good", "export.push_to_hub is model: give NAMESPACE/NAME"),
        ("a/b/c", {}, "hf_good", "export.push_to_hub is a/b/c: give NAMESPACE/NAME"),
        ("mine/model", {"train.max_steps": 0}, "hf_good", "a run with train.max_steps 0 exports nothing: leave it out"),
        ("mine/model", LORA, "hf_good", "the adapter's base /models/base is a folder here: set export.merge"),
        ("mine/model", LORA | {"export.merge": True}, None, "is mine/model, but there is no token: type hf auth login"),
        ("mine/model", {}, "offline", "export.push_to_hub is mine/model, but HF_HUB_OFFLINE is set: unset it"),
    ],
)
def test_a_run_makes_its_repository_or_is_refused_before_it_trains(hub, monkeypatch, capsys, name, changes, token, sentence):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    monkeypatch.setenv("HF_TOKEN", str(token))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", token == "offline")
    given = {"model.name_or_path": "/models/base", "data.source": "x", "train.max_steps": 1, "export.push_to_hub": name}
    config = load_config("llm", overrides=given | changes)
    if "HUB/" in sentence:
        prepare_push(config)
        assert sentence.replace("HUB", hub.url) in capsys.readouterr().out and name in hub.repositories
    else:
        said = refusal(prepare_push, config)
        assert re.search(sentence, said) and str(token) not in said


def test_one_row_for_each_checkpoint_and_leftover_and_strict_json_with_all_metrics(tmp_path, capsys):
    for step, loss in ((3, 2.5), (6, math.nan), (9, None)):
        folder = make_checkpoint(tmp_path, step, loss)
        os.utime(folder / MANIFEST, (1e9, 1e9 + step))
    change_manifest(folder, lambda m: m["identity"]["config"].update({"eval.best_metric": "accuracy"}))
    change_manifest(folder, lambda m: m["metrics"].update(accuracy=0.5, perplexity=9.0))
    (folder / "state" / ".metadata").write_bytes(bytes(2**20))
    for leftover in ("step-00000012.tmp", "step-00000003.old", "step-00000001.removing"):
        shutil.copytree(tmp_path / "checkpoints" / "step-00000003", tmp_path / "checkpoints" / leftover)
    assert call_toolkit("checkpoints", tmp_path) == 1
    header, *rows, hint = capsys.readouterr().out.splitlines()
    assert header.split() == ["MiB", "written", "processes", "loss", "accuracy"]
    assert [row.split()[0] for row in rows] == [
        "step-00000001.removing", "step-00000003", "step-00000003.old", "step-00000006", "step-00000009", "step-00000012.tmp",
    ]  # fmt: skip
    assert rows[1].split()[2] == "2001-09-09"
    assert [rows[1].split()[at] for at in (-4, -3, -2, -1)] == ["1", "2.50", "–", "valid"]
    assert rows[4].endswith("0.50  NOT VALID: state/.metadata has 1048576 bytes instead of 130") and " 1.0  " in rows[4]
    assert "leftover: half removed" in rows[0]
    assert "leftover: replaced by another of that step" in rows[2]
    assert "leftover: unfinished" in rows[5]
    assert hint.endswith("--verify hashes them too.")
    (folder / MANIFEST).unlink()
    assert call_toolkit("checkpoints", tmp_path, "--json") == 1
    *_, nan, damaged, leftover = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (nan["step"], nan["valid"], nan["metrics"], nan["world_size"]) == (6, True, {"loss": None}, 1)
    assert (damaged["valid"], damaged["note"]) == (False, "has no manifest.json: it was never finished")
    assert (leftover["name"], leftover["is_checkpoint"], leftover["valid"]) == ("step-00000012.tmp", False, None)


def test_a_run_without_checkpoints_is_one_sentence(tmp_path, capsys):
    run, left = tmp_path / "run", "step-00000003.tmp"
    for folder, sentence in (
        (tmp_path, f"{run} is not a folder: give the folder of a run"),
        (run, f"{run} has no checkpoints folder: give the folder of a run"),
        (run / "checkpoints", f"{run}/checkpoints holds no checkpoint: let the run reach"),
        (run / "checkpoints" / left, f"{run}/checkpoints holds no checkpoint, only {left}: let the run reach"),
    ):
        folder.mkdir(exist_ok=True)
        assert call_toolkit("checkpoints", run) == 2
        assert capsys.readouterr().err.startswith(f"error: {sentence}")


def test_a_changed_byte_is_reported_by_verify_alone_and_valid_ones_whatever_lies_beside_them(tmp_path, capsys, monkeypatch):
    stray = make_checkpoint(tmp_path, 3) / "state" / ".nfs0001"
    stray.touch()
    pruned = make_checkpoint(tmp_path, 9)
    metadata = make_checkpoint(tmp_path, 6) / "state" / ".metadata"
    (tmp_path / "checkpoints" / "step-00000012.tmp").mkdir()
    listed = checkpoint_table.list_checkpoints(tmp_path)
    shutil.rmtree(pruned)  # the run goes on, which is no damage
    monkeypatch.setattr(checkpoint_table, "list_checkpoints", lambda run: listed)
    changed = "NOT VALID: state/.metadata does not have the sha256 of the manifest: its content changed"
    for flips, flags, status, ends in ((0, ["--verify"], 0, "  valid"), (1, [], 0, "  valid"), (0, ["--verify"], 1, changed)):
        content = metadata.read_bytes()
        metadata.write_bytes(bytes([content[0] ^ flips]) + content[1:])
        assert call_toolkit("checkpoints", tmp_path, *flags) == status
        rows = capsys.readouterr().out.splitlines()
        assert rows[1].endswith("valid: also holds 'state/.nfs0001', which nothing reads")
        assert rows[2].endswith(ends) and not any("step-00000009" in row for row in rows)


def test_who_waits_at_a_terminal_sees_how_far_the_hashing_is(tmp_path, monkeypatch):
    make_checkpoint(tmp_path, 3)
    for flags, is_terminal, said in ((["--verify"], True, "hashing:   0%"), ([], True, ""), (["--verify"], False, "")):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert call_toolkit("checkpoints", tmp_path, *flags) == 0
        assert said in stream.getvalue() and bool(stream.getvalue()) == bool(said)
        assert not said or stream.getvalue().endswith("\r"), "the bar is gone"


def test_figures_that_are_no_equals_are_noted(tmp_path, capsys):
    make_checkpoint(tmp_path, 3, 0.5, {"rows": "b", "num_beams": 1})
    make_checkpoint(tmp_path, 6, 0.6, {"rows": "a", "num_beams": 4})
    make_checkpoint(tmp_path, 9, 0.7)
    make_checkpoint(tmp_path, 12, 0.8)
    make_checkpoint(tmp_path, 15)
    assert call_toolkit("checkpoints", tmp_path) == 0
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert rows[0].endswith("valid: metrics are of other rows than step-00000012's")
    assert rows[1].endswith("valid: texts were generated or scored in another way than step-00000012's")
    assert all(row.endswith("  valid") for row in rows[2:])
