"""The page of a comparison in a real headless browser: charts, sorting, filtering, narrow screens, escaped texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import NARROW, Opened, open_page
from comparison import results_of, row

from zerolora.report.comparison import compare_all

pytestmark = pytest.mark.browser

SCRIPT = "<script>document.title = 'taken'</script>"
RUNS = 9
CHARTS = 6


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of finished runs, one that its gate does not let pass, and one that has not run."""
    rows = {
        f"run{position}": row(position, adapter_bytes=10**7 * 1000 ** (position % 2)) for position in range(RUNS - 2)
    }
    rows["gated"] = row(9, status="failed", reason=f"evaluate.fail_if: {SCRIPT}", strategy="config/deepspeed/<b>.json")
    folder = tmp_path_factory.mktemp("comparison")
    results = results_of(folder / "results", rows, [*rows, "waiting"])
    (results / "run0").mkdir()
    (results / "run0/report.html").write_text("<title>the run's page</title>")
    compare_all(results, folder / "work/compare")
    return folder / "work/compare/index.html"


@pytest.fixture
def page(chromium: Any, file: Path) -> Iterator[Any]:
    """The open page; what its console says, or a request for any other file, fails the test."""
    opened = open_page(chromium, file)
    yield opened.tab
    assert opened.said == []
    assert {*opened.requests} <= {file.as_uri(), (file.parents[2] / "results/run0/report.html").as_uri()}
    opened.tab.close()


def column(page: Any, number: int) -> list[str]:
    """Return the texts of a column's visible cells, from the top down."""
    cells = page.locator(f"tbody tr:visible > :nth-child({number})")
    return [text.strip() for text in cells.all_inner_texts()]


def place_of(page: Any, title: str) -> int:
    titles = [text.split("\n")[0].strip(" ↕↑↓") for text in page.locator("thead th").all_inner_texts()]
    return titles.index(title) + 1


def test_every_chart_is_drawn_and_has_words(page: Any) -> None:
    for figure in page.locator("figure.chart").all():
        assert figure.locator(".live svg").bounding_box()["height"] > 100
        label = figure.locator("[role=img]").get_attribute("aria-label")
        assert label and any(character.isdigit() for character in label)
    text = page.locator("main").inner_text()
    assert "No other run is both faster and smaller" in text
    assert page.locator("tbody tr").count() == RUNS  # none is left out


def test_a_click_sorts_numbers_as_numbers_and_empty_ones_last(page: Any) -> None:
    loss = place_of(page, "loss")
    button = page.locator("thead button").nth(loss - 1)
    button.click()
    assert page.locator("thead th").nth(loss - 1).get_attribute("aria-sort") == "ascending"
    ascending = column(page, loss)
    assert ascending == [f"{0.5 + index:.4g}" for index in range(RUNS - 2)] + ["9.5", ""]
    button.click()
    assert column(page, loss) == [*reversed(ascending[:-1]), ""]


def test_sizes_sort_by_their_bytes(page: Any) -> None:
    adapter = place_of(page, "adapter")
    page.locator("thead button").nth(adapter - 1).click()
    units = [text.split()[-1] for text in column(page, adapter) if text]
    assert units == sorted(units, reverse=True) and len(set(units)) == 2  # MiB before GiB


def test_the_keyboard_sorts_too(page: Any) -> None:
    button = page.locator("thead button").nth(place_of(page, "accuracy") - 1)
    button.focus()
    page.keyboard.press("Enter")
    assert column(page, 1)[0] == "gated"  # the lowest accuracy
    page.keyboard.press("Space")
    assert column(page, 1)[0] == "run0"


def test_the_filter_keeps_the_rows_with_every_word(page: Any) -> None:
    field = page.get_by_role("searchbox")
    field.fill("fail_if gated")
    assert column(page, 1) == ["gated"]
    assert page.get_by_role("status").inner_text() == f"1 of {RUNS} rows"
    field.fill("not run")
    assert column(page, 1) == ["waiting"]
    field.fill("")
    assert len(column(page, 1)) == RUNS


def test_texts_of_runs_are_shown_and_never_run(page: Any) -> None:
    assert page.title() == f"Comparison of {RUNS} runs"
    reasons = column(page, place_of(page, "reason"))
    assert f"evaluate.fail_if: {SCRIPT}" in reasons
    assert "config/deepspeed/<b>.json" in column(page, place_of(page, "strategy"))


def test_a_run_leads_to_its_page_if_there_is_one(page: Any) -> None:
    assert page.locator("tbody a").all_inner_texts() == ["run0"]
    page.locator("tbody a").click()
    assert page.title() == "the run's page"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_a_phone(chromium: Any, file: Path, scheme: str) -> None:
    opened: Opened = open_page(chromium, file, NARROW, color_scheme=scheme)
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= NARROW
    assert opened.count("figure.chart.drawn") == CHARTS
    opened.tab.close()
