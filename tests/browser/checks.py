"""What holds for every page, of `report` and of `preview`."""

from playwright.sync_api import Page

PHONE_WIDTH = 390

OUTSIDE = """() => [...document.querySelectorAll("body *")]
  .filter((element) => !element.closest(".table") && element.getClientRects().length)
  .filter((element) => element.getBoundingClientRect().right > innerWidth + 1 || element.getBoundingClientRect().left < -1)
  .map((element) => `${element.tagName} ${element.className}: ${element.textContent.slice(0, 40)}`)"""

# Of each element with a text of its own: WCAG's contrast with the background that is behind it.
FAINT = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const background = (element) => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")]
    .filter((element) => element.checkVisibility() && [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((element) => {
      const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(background(element))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element];
    })
    .filter(([contrast]) => contrast < 4.5)
    .map(([contrast, { tagName, className, textContent }]) =>
      `${contrast.toFixed(2)}: ${tagName} ${className} ${textContent.slice(0, 40)}`);
}"""

NAMES = """(elements) => elements.map((element) =>
  `${element.tagName} ${element.id || (element.tagName === "DIV" ? element.className : element.textContent)}`)"""
FOCUSED = f"""() => {{
  let element = document.activeElement;  // and into a chart's own trees
  while (element.shadowRoot?.activeElement) element = element.shadowRoot.activeElement;
  return [...({NAMES})([document.activeElement]), getComputedStyle(element).outlineStyle];
}}"""
REACHABLE = "a[href], summary, input, select, button, [tabindex='0']"


def wait_until(page: Page, condition: str) -> None:
    """Wait for what the page itself reports. Playwright's own wait uses eval, which the pages forbid."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"after 5 s still not: {condition}")


def check_width(page: Page, width: int = PHONE_WIDTH) -> None:
    """Resize the window; nothing may need a horizontal scroll, except for a wide table in itself."""
    page.set_viewport_size({"width": width, "height": 844})
    wait_until(page, f"document.documentElement.scrollWidth <= {width}")
    assert page.evaluate(OUTSIDE) == []


def check_contrast(page: Page) -> None:
    """Texts are readable, light and dark; dark is dark."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(FAINT) == [], scheme
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"


def check_tab_order(page: Page) -> list[str]:
    """The tab key reaches all that can be clicked or scrolled, in the order of the page, and shows where it is. Returns names."""
    expected = page.evaluate(f'({NAMES})([...document.querySelectorAll("{REACHABLE}")].filter((e) => e.checkVisibility()))')
    reached = press_tab(page)
    assert [name for name in reached if name in {*expected}] == expected
    return expected


def press_tab(page: Page, until: str | None = None) -> list[str]:
    """Press the tab key until an element of this name has the focus, or the page is left. Returns the names on the way."""
    reached = []
    for _ in range(300):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(FOCUSED)
        if name.startswith("BODY"):
            break
        assert outline != "none", f"{name}: the focus is not seen"
        reached.append(name)
        if name == until:
            return reached
    assert until is None, f"{until} is not reached: {reached}"
    return reached
