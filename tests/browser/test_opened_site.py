"""The site, opened from files in a real headless browser, where workers are refused."""

from pathlib import Path
from typing import Any

import pytest
from browser import open_page

pytestmark = pytest.mark.browser

PHONE = 400


# Whether all parts of a diagram are in its drawing, and the drawing in its column.
WHOLE = """drawing => {
  const {width, height} = drawing.viewBox.baseVal, column = drawing.parentElement;
  const parts = [...drawing.querySelectorAll("rect, text, :scope > path")].map(part => part.getBBox());
  return parts.length > 10 && column.scrollWidth <= column.clientWidth && parts.every(
    part => part.x >= 0 && part.y >= 0 && part.x + part.width <= width && part.y + part.height <= height);
}"""


# Elements beyond the right edge that nothing scrolls, and codes of a table that are broken within a word.
UNREADABLE = """width => [...document.querySelectorAll("article *")].filter(each => {
  const box = each.getBoundingClientRect();
  return box.width && box.right > width + 1 && !each.closest("table, pre, .diagram, .tabbed-labels")
    || each.matches("td code") && /^[\\w.]+$/.test(each.textContent) && each.getClientRects().length > 1;
}).map(each => each.outerHTML.slice(0, 90))"""


def test_every_page_can_be_read_on_a_phone(chromium: Any, site: Path) -> None:
    """None scrolls sideways: what is wide scrolls in itself. The theme is loaded once, for the texts of all pages."""
    opened = open_page(chromium, site / "index.html", PHONE)
    wrong = {}
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    for path in pages:
        article = path.read_text(encoding="utf-8").partition("<article")[2].partition(">")[2].partition("</article>")[0]
        opened.tab.evaluate("article => document.querySelector('article').innerHTML = article", article)
        width, unreadable = opened.tab.evaluate(f"[document.documentElement.scrollWidth, ({UNREADABLE})({PHONE})]")
        if width > PHONE or unreadable:
            wrong[path.relative_to(site).as_posix()] = (width, unreadable[:3])
    assert len(pages) > 40
    assert wrong == {}
    opened.tab.close()


@pytest.mark.parametrize("page", ["index.html", "architecture.html"])
def test_a_diagram_is_not_cut_off(chromium: Any, site: Path, page: str) -> None:
    opened = open_page(chromium, site / page)
    assert opened.tab.locator(".diagram svg").evaluate_all(f"drawings => drawings.map({WHOLE})") == [True]
    opened.tab.close()


def test_the_search_answers_from_a_file(chromium: Any, site: Path) -> None:
    opened = open_page(chromium, site / "index.html")
    field = opened.tab.get_by_role("textbox", name="Search")
    field.click()
    # Until the index is there, it says that it initializes.
    opened.tab.locator(".md-search-result__meta", has_text="Type to start searching").wait_for(timeout=60_000)
    field.press_sequentially("tensor streaming reflink")  # it listens to keys
    opened.tab.locator(".md-search-result__link[href*='/export.html']").first.click()
    opened.tab.wait_for_url("**/export.html*")
    assert opened.said == []
    assert all(address.startswith(f"{site.as_uri()}/") or address == "about:srcdoc" for address in opened.requests)
    opened.tab.close()
