"""The section of which preset to take: what stands on the page is what the planner found, and still finds."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.presets import choice
from benchmarks.presets.page import CHOICE_FILE, update_page
from tests.support.refusals import refusal
from toolkit.errors import UserError
from toolkit.tools.plan.search import estimate_peak
from toolkit.tools.plan.trace import fake_ranks

PRESETS = Path(__file__).parents[2] / "accelerate_configs"
CELLS = json.loads((PRESETS / CHOICE_FILE).read_text())["cells"]


def test_the_planner_still_finds_what_the_page_says():
    wanted = ("8B (Llama 3.1)", "full", 8, 80)
    (cell,) = (c for c in CELLS if (c["model"], c["way"], c["num_gpus"], c["gpu_gib"]) == wanted)
    strategy = dict(choice.candidates(8, 80, PRESETS))[cell["preset"]]
    subject = choice.build_shape(cell["model"], cell["way"], PRESETS)
    with fake_ranks(8):
        assert estimate_peak(subject, strategy, rows=1) == pytest.approx(cell["peak_bytes"], rel=1e-3)  # other versions of torch


def test_a_page_that_is_out_of_date_is_reported_with_the_command(tmp_path):
    presets = Path(shutil.copytree(PRESETS, tmp_path / "presets"))
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
    assert "has changed: run `python -m benchmarks.presets.page --write --plan " in refusal(update_page, presets, write=False)
