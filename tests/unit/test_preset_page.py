"""The section of which preset to take: what stands on the page is what the planner found, and still finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.presets import choice
from benchmarks.presets.page import CHOICE_FILE, update_page
from toolkit.errors import UserError
from toolkit.tools.plan.search import estimate_peak
from toolkit.tools.plan.trace import fake_ranks

PRESETS = Path(__file__).parents[2] / "accelerate_configs"
CELLS = json.loads((PRESETS / CHOICE_FILE).read_text())["cells"]
PLACES = {(cell["model"], cell["way"], cell["num_gpus"], cell["gpu_gib"]): cell for cell in CELLS}


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PRESETS, tmp_path / "presets"))


def test_the_page_has_a_cell_for_every_model_way_and_number_of_gpus() -> None:
    names = {(model, way) for model in choice.MODELS for way in choice.WAYS if way != "QLoRA" or model in choice.QLORA_MODELS}
    assert PLACES.keys() == {(*name, *gpus) for name in names for gpus in choice.GPUS}
    names = {name for gpus in choice.GPUS for name, _ in choice.candidates(*gpus, PRESETS)}
    assert {cell["preset"] for cell in CELLS} <= names | {None}
    assert all((PRESETS / f"{name.partition(',')[0]}.yaml").is_file() for name in names)


def test_the_planner_still_finds_what_the_page_says() -> None:
    cell = PLACES["8B (Llama 3.1)", "full", 8, 80]
    strategy = dict(choice.candidates(8, 80, PRESETS))[cell["preset"]]
    subject = choice.build_shape(cell["model"], cell["way"], PRESETS)
    with fake_ranks(8):
        assert estimate_peak(subject, strategy, rows=1) == pytest.approx(cell["peak_bytes"], rel=1e-3)  # other versions of torch


def test_a_page_that_is_out_of_date_is_reported_with_the_command(presets: Path) -> None:
    update_page(presets, write=False)
    page = presets / "README.md"
    page.write_text(page.read_text().replace("3B (Llama 3.2)", "3B"))
    with pytest.raises(
        UserError, match=r"made from which_preset.json is out of date; run `python -m benchmarks.presets.page --write "
    ):
        update_page(presets, write=False)
    update_page(presets, write=True)
    update_page(presets, write=False)
    preset = presets / "ddp.yaml"
    preset.write_text(f"# another comment\n{preset.read_text()}")
    update_page(presets, write=False)  # a comment changes no plan
    preset.write_text(preset.read_text().replace("mixed_precision: bf16", "mixed_precision: 'no'"))
    with pytest.raises(UserError, match=r"has changed: run `python -m benchmarks.presets.page --write --plan "):
        update_page(presets, write=False)
