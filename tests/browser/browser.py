"""A headless browser that opens pages from files, and what it says about them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DRAWN = """() => [...document.querySelectorAll(".chart")]
  .every(each => !each.checkVisibility() || each.querySelector(".live svg"))"""
NARROW, WIDE = 375, 1280


def missing() -> str:
    """Return what this machine lacks to open a page, in one line; nothing if it lacks nothing."""
    result = shutil.which("chromium")
    return "" if result else "chromium not found; `make test` installs it on Debian (tests/browser/install)"


@contextmanager
def browser() -> Iterator[Any]:
    """Start the browser; root may not use its sandbox."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Opened:
    """A page in a tab, with its console messages and requests."""

    tab: Any
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def dismiss(self, dialog: Any) -> None:
        """Close a dialog, and keep what it said."""
        self.said.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def count(self, selector: str) -> int:
        """Return the number of elements that a CSS selector finds."""
        return int(self.tab.locator(selector).count())


def open_page(started: Any, page: Path, width: int = WIDE, unfolded: bool = True, **options: Any) -> Opened:
    """Open a page in a tab of `width` pixels, all sections unfolded, and wait until its charts are drawn.

    options: those of playwright's new_page, as color_scheme="dark".
    """
    tab = started.new_page(viewport={"width": width, "height": 900}, **options)
    opened = Opened(tab)
    tab.on("console", lambda message: opened.said.append(message.text))
    tab.on("pageerror", lambda error: opened.said.append(str(error)))
    tab.on("dialog", opened.dismiss)
    tab.on("request", lambda request: opened.requests.append(request.url))
    tab.goto(page.as_uri())
    if unfolded:
        tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    if options.get("java_script_enabled", True):
        tab.wait_for_function(DRAWN, timeout=20_000)
    return opened
