"""Chromium of the system, offline. A page may print no error, open no dialog and request nothing but its own file."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

if find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]
    warnings.warn("tests/browser is left out, as playwright is not installed: make test-browser runs it", stacklevel=1)

SCREENSHOTS = Path(__file__).parent / "screenshots"

OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program, "there is no program chromium here: `make test-browser` installs it from Debian's packages"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens a file at a width, light or dark. At the end of the test, what a page may not do must not have been done."""
    contexts, faults = [], list[str]()

    def open_file(path: Path, *, width: int = 1280, color_scheme: str = "light") -> Page:
        context = browser.new_context(offline=True, viewport={"width": width, "height": 900}, color_scheme=color_scheme)
        contexts.append(context)
        page = context.new_page()
        watch(page, path, faults)
        page.goto(path.as_uri())
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert not faults


def watch(page: Page, path: Path, faults: list[str]) -> None:
    """Add to `faults` each error or warning that is printed, each dialog, and each request but that of the file."""
    page.on("console", lambda line: line.type in ("error", "warning") and faults.append(f"{line.type}: {line.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: request.url == path.as_uri() or faults.append(f"request: {request.url}"))


@pytest.fixture
def take_screenshot() -> Callable[[Page, str], None]:
    """Of the window, into a folder that git ignores."""
    SCREENSHOTS.mkdir(exist_ok=True)
    return lambda page, name: page.screenshot(path=SCREENSHOTS / f"{name}.png") and None
