"""Seven cells of the support table come out as docs/support.md says, which has every family and is what its results make."""

import pytest

from tests.families.families import TITLES
from tests.families.page import is_known, render
from tests.families.survey import survey
from tests.families.table import PAGE, cells_of, recorded, run_family

CHOSEN: dict[str, list[str]] = {
    "bart": ["full", "full-packed"],
    "marian": ["nf4"],
    "qwen2": ["lora-packed", "nf4-packed"],
    "granitemoe": ["lora"],
    "gpt2": ["nf4"],
}
"""Cells by family: of each column and each group, and some that are refused."""


SURVEYED = ("nemotron_h", "qwen2_5_vl", "t5gemma2")
"""Kinds of the survey that the first table does not have."""


@pytest.mark.parametrize("family", CHOSEN)
def test_cells_come_out_as_recorded(family):
    cells = recorded()[0]["cells"][family]
    assert run_family(family, CHOSEN[family]) == {cell: cells[cell] for cell in CHOSEN[family]}


@pytest.mark.parametrize("kind", SURVEYED)
def test_kinds_of_the_survey_come_out_as_recorded(kind):
    assert survey(kind) == recorded()[1]["kinds"][kind]


def test_the_page_has_every_family_and_no_silent_cell():
    (results, surveyed), page = recorded(), PAGE.read_text(encoding="utf-8")
    assert len(TITLES) >= 30 and {family: list(cells) for family, cells in results["cells"].items()} == {
        family: cells_of(family) for family in TITLES
    }
    unknown = [outcome for cells in results["cells"].values() for outcome in cells.values() if not is_known(outcome)]
    assert not unknown and "FAILS" not in page
    assert page == render(results, surveyed)
    for title in TITLES.values():
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
        (cells,) = [row[1:] for row in rows if f", {title}," in f", {row[0]},"]
        assert len(cells) >= 4 and all(map(is_known, cells))
