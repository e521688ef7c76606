"""`export` takes the checkpoint that is asked for, and each kind of export goes into a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoint_files import change_manifest, make_checkpoint
from toolkit.config.python import load_config
from toolkit.export.places import Places
from toolkit.tools.export import Options, choose_checkpoint, choose_places, load_run_config

REQUIRED = {"model.name_or_path": "m", "data.source": "x", "train.max_steps": 9, "checkpoint.keep_best": 1}


def options(run_folder: Path, **given: Any) -> Options:
    defaults: dict[str, Any] = {"checkpoint": None, "merge": False, "dtype": None, "to": None, "flags": []}
    defaults |= {"push_to_hub": None, "private": False}
    return Options(run_folder=run_folder, **defaults | given)


@pytest.mark.parametrize(("metric", "best"), [("rougeL", 2), ("loss", 3)])
def test_the_flag_goes_before_the_setting_and_best_knows_which_value_is_better(tmp_path: Path, metric: str, best: int) -> None:
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


def test_each_kind_of_export_has_a_folder_of_its_own(tmp_path: Path) -> None:
    plain, lora = (load_config("llm", overrides=REQUIRED | method) for method in ({}, {"adapter.method": "lora"}))
    for config, given, expected in (
        (plain, {}, Places(model=tmp_path / "export-3")),
        (plain, {"dtype": "float16"}, Places(model=tmp_path / "export-3-float16", dtype=torch.float16)),
        (plain, {"to": tmp_path / "here"}, Places(model=tmp_path / "here")),
        (lora, {}, Places(adapter=tmp_path / "export-3")),
        (lora, {"merge": True}, Places(model=tmp_path / "export-3-merged")),
    ):
        assert choose_places(options(tmp_path, **given), config, 3) == expected


@pytest.mark.parametrize(("named", "taken"), [("flash_attention_2", None), ("eager", "eager"), ("sdpa", "sdpa")])
def test_a_kernel_that_this_machine_may_lack_is_left_out(tmp_path: Path, named: str, taken: str | None) -> None:
    settings = {"model": {"name_or_path": "org/m", "attn_implementation": named}, "data": {"source": "x", "max_length_tokens": 8}}
    (tmp_path / "config.yaml").write_text(json.dumps({**settings, "train": {"max_steps": 1}}))
    assert load_run_config(tmp_path, []).model.attn_implementation == taken
