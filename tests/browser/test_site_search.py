"""The search of the site, opened from a file in a real headless browser, where workers are refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import open_page
from conftest import ROOT

pytestmark = pytest.mark.browser


def test_the_search_answers_from_a_file(chromium: Any, tmp_path: Path) -> None:
    """Building the site takes three seconds."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    opened = open_page(chromium, tmp_path / "index.html")
    field = opened.tab.get_by_role("textbox", name="Search")
    field.click()
    # Until the index is there, it says that it initializes.
    opened.tab.locator(".md-search-result__meta", has_text="Type to start searching").wait_for(timeout=60_000)
    field.press_sequentially("tensor streaming reflink")  # it listens to keys
    opened.tab.locator(".md-search-result__link[href*='/merge.html']").first.click()
    opened.tab.wait_for_url("**/merge.html*")
    assert opened.said == []
    assert all(address.startswith(f"{tmp_path.as_uri()}/") or address == "about:srcdoc" for address in opened.requests)
    opened.tab.close()
