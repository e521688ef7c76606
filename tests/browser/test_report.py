"""`report.html` as a person meets it: opened, clicked, searched, sorted, on a phone, in the dark, by keyboard."""

import itertools
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.checks import PHONE_WIDTH, check_contrast, check_tab_order, check_width, press_tab, wait_until
from tests.browser.conftest import watch
from tests.support.report_runs import HOSTILE, evaluation, save_long_run, save_run, save_whole_run, train
from toolkit.tools.report.page import save_page

SHOWN = HOSTILE.replace("\u202e", "\\u202e").replace("\u2066", "\\u2066")
AXIS_COLOR = "Bokeh.documents[0].roots()[0].below[0].major_label_text_color"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The page of a run with all sections."""
    folder = tmp_path_factory.mktemp("whole")
    save_page([save_whole_run(folder / "example", num_steps=300)], folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """The page of 10,000 steps and 1,000 predictions, one of a megabyte."""
    folder = tmp_path_factory.mktemp("long")
    save_page([save_long_run(folder / "run")], folder / "page.html")
    return folder / "page.html"


def test_what_a_page_may_not_do_is_seen(browser, tmp_path):
    path, faults = tmp_path / "page.html", list[str]()
    path.write_text("<img src=http://127.0.0.1:9/x.png><script>console.error('one'); alert('two'); three()</script>")
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        watch(page, path, faults)
        page.goto(path.as_uri())
    for fault in ("request: http://127.0.0.1:9/x.png", "error: one", "dialog: two", "three is not defined"):
        assert any(fault in line for line in faults), faults


def test_links_lead_to_sections_and_charts_and_tables_open(open_page, whole, take_screenshot):
    page = open_page(whole)
    expect(page.locator("#chart-0 canvas").first).to_be_visible()
    take_screenshot(page, "report-desktop")
    for link in page.get_by_role("navigation").get_by_role("link").all():
        link.click()
        expect(page.get_by_role("heading", level=2, name=link.inner_text(), exact=True)).to_be_in_viewport()
    charts = page.locator(".chart").all()
    for chart in charts:
        chart.scroll_into_view_if_needed()
        expect(chart.locator("canvas").first).to_be_visible()
    assert len(charts) == 7
    for details in page.locator("details").all():
        expect(details.locator("table").first).to_be_hidden()
        details.locator("summary").click()
        expect(details.locator("table").first).to_be_visible()
    check_width(page)


def test_all_charts_are_drawn_for_who_does_not_scroll_and_a_print_has_whole_texts(open_page, whole):
    """A screen reader, and a printer, in the colours of paper."""
    page = open_page(whole, color_scheme="dark")
    for chart in page.locator(".chart").all():
        expect(chart.locator("canvas").first).to_be_attached()
    assert page.evaluate("scrollY") == 0
    page.emulate_media(media="print")
    expect(page.get_by_role("navigation")).to_be_hidden()
    for what, expected in (("body').backgroundColor", "rgb(251, 251, 250)"), (".text').maxHeight", "none")):
        selector, name = what.split("').")
        assert page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{name}") == expected
    bars = "[...document.querySelectorAll('.rank b')].map((bar) => getComputedStyle(bar).printColorAdjust)"
    assert {*page.evaluate(bars)} == {"exact"}, "a printer leaves out a background"
    wait_until(page, f"{AXIS_COLOR} === '#5d6675'")


def test_a_print_of_a_dark_page_is_painted_in_the_colours_of_paper_at_once(open_page, whole):
    """A browser prints what stands in the canvas when it has announced the print, and waits for nothing."""
    page = open_page(whole, color_scheme="dark")
    last = AXIS_COLOR.replace("[0]", "[6]", 1)
    wait_until(page, f"Bokeh.documents.length === 7 && {last} === '#a2abb9'")
    page.wait_for_timeout(200)
    canvas = page.locator("#chart-0 canvas").first.element_handle()
    on_screen = canvas.evaluate("(canvas) => canvas.toDataURL()")
    canvas.evaluate(f"""(canvas) => addEventListener("beforeprint", () => {{
      globalThis.printed = [{AXIS_COLOR}, canvas.toDataURL(), getComputedStyle(document.body).backgroundColor];
    }})""")
    page.pdf()
    color, printed, background = page.evaluate("printed")
    assert (color, background) == ("#5d6675", "rgb(251, 251, 250)") and printed != on_screen
    assert page.evaluate(AXIS_COLOR) == "#a2abb9"
    assert canvas.evaluate("(canvas) => canvas.toDataURL()") == on_screen


def test_a_logarithmic_axis_is_labelled_over_its_whole_length(open_page, tmp_path):
    losses = {"wide": [6.0, 3.0, 0.5, 0.08], "narrow": [8.0, 4.0, 2.2], "huge": [9000.0, 1.0]}
    ticks = {"wide": [0.1, 0.2, 0.5, 1, 2, 5], "narrow": None, "huge": None}  # None: bokeh's own, as its labels are apart
    axis = "Bokeh.documents[0].roots()[0].left[0]"
    for name, values in losses.items():
        save_page([save_run(tmp_path / name, *itertools.starmap(train, enumerate(values, start=1)))], tmp_path / f"{name}.html")
        page = open_page(tmp_path / f"{name}.html")
        page.locator("#chart-0 canvas").first.wait_for()
        wait_until(page, f"{axis} && Number.isFinite(Bokeh.documents[0].roots()[0].y_range.start)")
        page.wait_for_timeout(200)
        shown = page.evaluate(f"{axis}.ticker.type === 'FixedTicker' ? {axis}.ticker.ticks : null")
        assert (shown and pytest.approx(shown)) == ticks[name], name
        assert page.evaluate(f"{axis}.formatter.doFormat([5], {{loc: 0}})") == ["5"]
        assert page.evaluate(f"{axis}.formatter.doFormat([0.0005, 0.001, 120000], {{loc: 0}})") == ["0.0005", "0.001", "120000"]


def test_predictions_are_searched_and_sorted(open_page, long):
    page = open_page(long)
    first, count = page.locator("article h3").first, page.locator("#count")
    expect(count).to_have_text("20 of 1,000 rows")
    for order, row in {
        "rougeL, before training, highest first": 999,
        "rougeL, after step 10,000, highest first": 0,
        "rougeL, most gained first": 0,
        "rougeL, least gained first": 999,
        "as in the data": 0,
    }.items():
        page.get_by_label("Order").select_option(label=order)
        expect(first).to_have_text(f"Row {row}")
    page.get_by_role("button", name="Show more rows").click()
    expect(count).to_have_text("40 of 1,000 rows")
    expect(page.get_by_role("heading", name="Row 20", exact=True)).to_be_focused()
    page.get_by_label("Search").fill("REFERENCE 99")
    expect(count).to_have_text("11 of 11 rows")  # 99, 990 to 999
    expect(first).to_have_text("Row 99")
    expect(page.locator("mark")).to_have_text(["reference 99"] * 11)
    page.get_by_label("Search").fill("nowhere")
    expect(count).to_have_text("0 of 0 rows")
    expect(page.locator("article")).to_have_count(0)
    page.get_by_label("Search").fill("ابجد")
    expect(first).to_have_text("Row 7")
    expect(count).to_have_text("1 of 1 rows")


def test_an_empty_text_says_so(open_page, tmp_path):
    save_page([save_run(tmp_path / "run", evaluation(0, loss=3.0), predictions={0: ["", "b"]})], tmp_path / "page.html")
    first, second = open_page(tmp_path / "page.html").locator("article").all()
    expect(first.locator(".quiet")).to_have_text(["not known", "empty"])  # the source, the prediction
    expect(second.locator(".quiet")).to_have_text("not known")


def test_10_000_steps_and_1_000_predictions_open(open_page, long):
    page = open_page(long)
    expect(page.locator("#count")).to_have_text("20 of 1,000 rows")
    expect(page.locator("#chart-0 canvas").first).to_be_visible()
    assert "highest 1000" in (page.locator("#chart-0").get_attribute("aria-label") or ""), "the spike"
    check_width(page)


def test_a_value_that_never_changes_is_read_from_its_axis(open_page, tmp_path):
    save_page([save_run(tmp_path / "run", *map(train, range(1, 9)))], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    page.locator(".chart[aria-label^='Learning rate'] canvas").first.wait_for()
    plot = "Bokeh.documents.map((shown) => shown.roots()[0]).find((plot) => plot.renderers[0].name === 'learning rate')"
    wait_until(page, f"{plot}.y_range.end < 0.002 && {plot}.y_range.start > 0")  # 0.001 in 2 units reads as 0


def test_hostile_texts_stay_text(open_page, tmp_path, whole):
    page = open_page(whole)
    texts = page.locator("article").nth(1).locator(".text").all_text_contents()
    assert texts == [SHOWN, "reference 1", "b", SHOWN]
    page.get_by_label("Search").fill("<img src=x onerror=alert(1)>")
    expect(page.locator("mark")).to_have_text(["<img src=x onerror=alert(1)>"] * 2)
    assert page.evaluate("document.scripts.length") == 4 and page.locator("img").count() == 0

    lines = [evaluation(0, loss=3.0), train(1), {**evaluation(1, loss=2.0), "<b>own</b>": 1.0}]
    runs = [save_run(tmp_path / name, *lines, lr=lr) for name, lr in (("<script>alert(2)<", 0.1), ("\u202edlo", 0.2))]
    save_page(runs, tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert page.locator("h1").inner_text() == page.title() == "<script>alert(2)< · \\u202edlo"
    assert page.evaluate("document.scripts.length") == 4
    expect(page.locator("#chart-0 canvas").first).to_be_visible()
    check_width(page)


def test_a_phone_and_the_dark(open_page, whole, take_screenshot):
    page = open_page(whole, color_scheme="dark")
    expect(page.locator("#chart-0 canvas").first).to_be_visible()
    take_screenshot(page, "report-dark")
    assert page.evaluate(AXIS_COLOR) == "#a2abb9"
    page.emulate_media(color_scheme="light")  # a chart's words turn with the page
    wait_until(page, f"{AXIS_COLOR} === '#5d6675'")
    check_contrast(page)

    page = open_page(whole, width=PHONE_WIDTH)
    expect(page.locator("#chart-0 canvas").first).to_be_visible()
    take_screenshot(page, "report-phone")
    check_width(page)
    page.get_by_role("link", name="Predictions").click()
    take_screenshot(page, "report-phone-predictions")


def test_all_of_it_is_reached_by_keyboard(open_page, whole):
    page = open_page(whole)
    names = check_tab_order(page)
    assert names[:2] == ["A Summary", "A Curves"] and {"INPUT search", "SELECT order", "SUMMARY Loss as a table"} < {*names}
    assert sum(name.startswith("DIV table") for name in names) == 4, "tables that are open: they scroll, on a phone sideways"

    page.reload()
    press_tab(page, until="SUMMARY Loss as a table")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator("details .table").first).to_be_focused()
    press_tab(page, until="INPUT search")
    page.keyboard.type("source 0")
    expect(page.locator("#count")).to_have_text("1 of 1 rows")
    press_tab(page, until="SELECT order")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_label("Order")).not_to_have_value("")
