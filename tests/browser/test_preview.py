"""The page of `preview --html`, as a person meets it."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.checks import PHONE_WIDTH, check_contrast, check_tab_order, check_width
from tests.support.previews import CASES, HOSTILE, HOSTILE_ROWS, LONG, LONG_ROW, call_preview, save_hostile_rows, save_inputs
from toolkit.errors import visible


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """A folder with a page for each of `CASES`, one of hostile rows, and one of a row of a megabyte."""
    folder = tmp_path_factory.mktemp("preview")
    save_inputs(folder)
    save_hostile_rows(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, flags in {**CASES, "hostile": HOSTILE_ROWS, "long": f"{LONG_ROW} --row 0"}.items():
            assert call_preview(f"{flags} --html {name}.html") == 0
    return folder


@pytest.mark.parametrize("case", [*CASES, "hostile"])
def test_it_opens_on_a_desk_a_phone_and_in_the_dark(open_page, pages, case, take_screenshot):
    page = open_page(pages / f"{case}.html")
    expect(page.locator("h1")).to_be_visible()
    assert page.evaluate("document.scripts.length") == 0
    take_screenshot(page, f"preview-{case}-desktop")
    marked = "[...document.querySelectorAll('.tokens .loss, .pack .loss')].map((it) => getComputedStyle(it).printColorAdjust)"
    assert {*page.evaluate(marked)} == {"exact"}, "a printer leaves out a background"
    check_tab_order(page)
    check_width(page, PHONE_WIDTH)
    take_screenshot(page, f"preview-{case}-phone")
    check_contrast(page)
    take_screenshot(page, f"preview-{case}-dark")


def test_hostile_texts_stay_text(open_page, pages):
    page = open_page(pages / "hostile.html")
    shown = page.locator(".text").all_text_contents()
    assert len(shown) == len(HOSTILE) and page.locator("img").count() == 0
    for text in HOSTILE:
        assert any(f"answer {visible(text)}<|im_end|>" in part for part in shown), text


def test_a_row_of_a_megabyte_opens(open_page, pages):
    page = open_page(pages / "long.html")
    assert LONG in page.locator(".text").first.text_content()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
