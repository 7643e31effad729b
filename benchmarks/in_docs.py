"""Puts what a benchmark found into a page of docs/, between <!-- NAME --> and <!-- end -->."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def put(page: str, name: str, text: str) -> None:
    """Replace what stands between the marks in a page. Raises ValueError if the page has no such marks."""
    path = DOCS / page
    before = path.read_text(encoding="utf-8")
    after, result = re.subn(
        rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", lambda marks: f"{marks[1]}{text}\n{marks[2]}", before,
        flags=re.DOTALL,
    )  # fmt: skip
    if result != 1:
        raise ValueError(f"{path}: {result} places for {name}")
    path.write_text(after, encoding="utf-8")
