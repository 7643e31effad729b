"""The page of a finished run in a real browser: charts, tables, schemes, widths, print, and harmful rows."""

from pathlib import Path
from typing import Any

import pytest
from browser import NARROW, WIDE, Opened, open_page
from finished_run import FinishedRun

pytestmark = pytest.mark.browser

HARM = "<script>alert('harm')</script><img src=x onerror=alert(1)>"
WITHOUT_MARKS = """() => [...document.querySelectorAll(".chart")]
  .filter(each => !each.querySelector(".live [class*=role-mark] path, .live [class*=role-mark] line"))
  .map(each => each.id)"""
BEYOND = """width => [...document.querySelectorAll("body *")]
  .filter(each => each.getBoundingClientRect().right > width && !each.closest(".scroll, pre, svg"))
  .map(each => each.outerHTML.slice(0, 90))"""
CONTRAST = 4.5
"""WCAG 2.1's least contrast of text (success criterion 1.4.3)."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it: GPUs, a gate, groups of rows, and text that would do harm."""
    run = FinishedRun(tmp_path_factory.mktemp("run"))
    run.on_gpus()
    run.ask_for_harm(HARM)
    run.ask("a-task-with-a-long-name", [True, False] * 8, [True] * 16)
    return run.page(fail_if="accuracy < base - 0.01", tasks=["a-task-with-a-long-name"])


@pytest.fixture(scope="module")
def wide(chromium: Any, page: Path) -> Opened:
    """The page on a wide light screen."""
    return open_page(chromium, page, WIDE, color_scheme="light")


@pytest.fixture(scope="module")
def folded(chromium: Any, page: Path) -> Opened:
    """The page as it opens."""
    return open_page(chromium, page, unfolded=False)


@pytest.fixture(scope="module")
def narrow(chromium: Any, page: Path) -> Opened:
    """The page on a telephone."""
    return open_page(chromium, page, NARROW)


def test_the_console_is_silent_and_nothing_is_loaded(wide: Opened, page: Path) -> None:
    assert wide.said == []
    assert wide.requests == [page.as_uri()]


# The fewest marks that some charts must have: elements of their SVG.
MARKS = {
    "#accuracy .mark-symbol path": 2,
    "#loss-curve .mark-line path": 2,
    "#step-times .mark-area path": 6,
    "#load .mark-line path": 2,
    "#memory-gpu .mark-rect path": 60,
    "#memory-gpu .mark-symbol path[fill=currentColor]": 1,
    "#memory-host .mark-rule line": 1,
    "#predicted .mark-symbol path": 4,
    "#lengths .mark-rect path": 4,
    "#groups-chart .mark-symbol path": 10,
}


def test_every_chart_is_drawn_with_marks_and_described(wide: Opened) -> None:
    charts = wide.count("figure.chart")
    assert charts >= 11
    assert wide.count("figure.chart.drawn") == charts
    assert wide.tab.evaluate(WITHOUT_MARKS) == []
    for picture in (".live", ".static"):
        for selector, fewest in MARKS.items():
            chart, marks = selector.split(" ", 1)
            assert wide.count(f"{chart} {picture} .role-mark{marks}") >= fewest, (picture, selector)
    named = wide.tab.evaluate("[...document.querySelectorAll('.chart [role=img]')].map(each => each.ariaLabel)")
    assert len(named) == charts and all(len(name) > 20 for name in named)


def test_a_folded_chart_is_drawn_when_its_section_is_opened(folded: Opened) -> None:
    assert folded.count("#utilisation .live svg") == 0
    folded.tab.click("#utilisation summary")
    folded.tab.wait_for_selector("#load .live svg")
    width = folded.tab.evaluate("document.querySelector('#load .live svg').getBoundingClientRect().width")
    assert width > 700
    assert folded.said == []


def test_the_pointer_shows_the_values_of_a_step(wide: Opened) -> None:
    wide.tab.locator("#loss-curve .live svg").hover()
    wide.tab.wait_for_selector("#vg-tooltip-element.visible")
    assert "training" in wide.tab.locator("#vg-tooltip-element").inner_text()
    wide.tab.mouse.move(0, 0)


def column(opened: Opened, place: int) -> list[str]:
    cells = f"[...document.querySelectorAll('#memory tbody tr')].map(row => row.cells[{place}].textContent.trim())"
    return list(opened.tab.evaluate(cells))


def test_tables_sort_by_click_and_by_keyboard(wide: Opened) -> None:
    numbers = [float(cell.split()[0]) for cell in column(wide, 2)]
    assert numbers != sorted(numbers)
    header = wide.tab.locator("#memory thead th").nth(2)
    header.locator("button").click()
    assert [float(cell.split()[0]) for cell in column(wide, 2)] == sorted(numbers)
    assert header.get_attribute("aria-sort") == "ascending"
    wide.tab.locator("#memory thead th button").nth(0).focus()
    wide.tab.keyboard.press("Enter")
    names = column(wide, 0)
    assert names == sorted(names) and header.get_attribute("aria-sort") is None
    wide.tab.keyboard.press("Space")
    assert column(wide, 0) == names[::-1]
    assert wide.tab.locator("#memory thead th").nth(0).get_attribute("aria-sort") == "descending"


def test_tables_are_filtered_by_typed_text(wide: Opened) -> None:
    field = wide.tab.get_by_role("searchbox", name="Filter rows: Predicted for every strategy")
    field.fill("zero3 off")
    assert wide.tab.locator("#memory tbody tr:visible").count() == 2
    assert "2 of 16 rows" in wide.tab.locator("#memory .filter").inner_text()
    field.fill("")
    assert wide.tab.locator("#memory tbody tr:visible").count() == 16


def test_the_keyboard_reaches_everything_and_shows_where_it_is(folded: Opened) -> None:
    folded.tab.evaluate("document.body.tabIndex = -1, document.body.focus()")
    folded.tab.keyboard.press("Tab")
    assert folded.tab.evaluate("document.activeElement.className") == "skip"
    kinds = set()
    for _ in range(40):
        folded.tab.keyboard.press("Tab")
        kind, outline = folded.tab.evaluate(
            "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
        )
        if kind in ("BUTTON", "INPUT", "SUMMARY", "DIV"):
            kinds.add(kind)
            assert outline != "none", kind
    assert kinds == {"BUTTON", "INPUT", "SUMMARY", "DIV"}


def test_a_screen_reader_has_landmarks_headings_and_named_tables(wide: Opened) -> None:
    for landmark in ("header", "main#main", "footer"):
        assert wide.count(landmark) == 1
    assert wide.count("h1") == 1
    nameless = (
        "[...document.querySelectorAll('main table')].filter(each => !each.caption || !each.caption.textContent.trim())"
    )
    assert wide.tab.evaluate(f"{nameless}.length") == 0
    assert wide.count("thead th:not([scope])") == wide.count("tbody th:not([scope])") == 0
    identifiers = wide.tab.evaluate("[...document.querySelectorAll('[id]:not(svg [id])')].map(each => each.id)")
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_do_not_scroll_sideways(narrow: Opened, scheme: str) -> None:
    narrow.tab.emulate_media(color_scheme=scheme)
    assert narrow.tab.evaluate("document.documentElement.scrollWidth") == NARROW
    assert narrow.tab.evaluate(BEYOND, NARROW) == []
    assert narrow.said == []


# The least contrast of a text to what is behind it, and that text. Charts have the text's colour.
LEAST_CONTRAST = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = color => color.slice(0, 3).map(part => part / 255)
    .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
    .reduce((sum, part, place) => sum + part * [.2126, .7152, .0722][place], 0);
  const behind = each => {
    for (let at = each; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  let least = [99, ""];
  for (const each of document.querySelectorAll("body *, body svg text")) {
    if (!each.checkVisibility() || each.closest("script, style, .hidden")) continue;
    if (![...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    const style = getComputedStyle(each);
    const ink = light(rgb(each.ownerSVGElement ? style.fill : style.color)), paper = light(behind(each));
    const contrast = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
    if (contrast < least[0]) least = [contrast, each.textContent.trim().slice(0, 40)];
  }
  return least;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(wide: Opened, scheme: str) -> None:
    wide.tab.emulate_media(color_scheme=scheme)
    paper = wide.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(15, 18, 21)") == (scheme == "dark")
    contrast, text = wide.tab.evaluate(LEAST_CONTRAST)
    assert contrast >= CONTRAST, text


def test_print_has_the_static_pictures_and_every_section(folded: Opened) -> None:
    drawn = folded.count(".chart.drawn")
    assert folded.count(".chart.drawn .static svg:visible") == 0
    folded.tab.emulate_media(media="print", color_scheme="dark")
    assert folded.count(".chart .static svg:visible") == folded.count("figure.chart") > drawn > 0
    assert folded.count(".chart .live svg:visible") == folded.count(".filter:visible") == 0
    assert folded.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert folded.tab.locator("#mask p").evaluate("each => each.checkVisibility()")
    folded.tab.emulate_media(media="screen", color_scheme="light")
    assert not folded.tab.locator("#mask p").evaluate("each => each.checkVisibility()")


def test_without_javascript_the_page_says_the_same(chromium: Any, page: Path) -> None:
    opened = open_page(chromium, page, unfolded=False, java_script_enabled=False)
    assert opened.count(".chart .static svg:visible") >= 4
    assert opened.tab.locator("main").inner_text().startswith("Result")
    opened.tab.close()


def test_harmful_rows_are_text(wide: Opened, page: Path) -> None:
    assert "<script>alert('harm')" not in page.read_text(encoding="utf-8")
    assert wide.count("main script:not([type='application/json'])") == wide.count("img") == 0
    for section in ("answers", "memory", "mask", "groups"):
        assert HARM in wide.tab.locator(f"#{section}").inner_text()
    provenance = wide.tab.locator("section[aria-labelledby=provenance]").inner_text()
    assert provenance.count(HARM) == 2
    assert wide.said == []


def test_a_script_that_was_smuggled_in_does_not_run(chromium: Any, page: Path, tmp_path: Path) -> None:
    """Should a row be printed unescaped one day, the page's policy stops it."""
    copy = tmp_path / "copy.html"
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("</main>", "<script>alert('harm')</script></main>"), encoding="utf-8")
    opened = open_page(chromium, copy, unfolded=False)
    assert any("Content Security Policy" in line for line in opened.said)
    assert not any("dialog" in line for line in opened.said)
    opened.tab.close()
