"""Every page that this package writes shows each text of others as text: no element, no attribute, no script of it."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest
from comparison import results_of, row
from finished_run import FinishedRun
from hypothesis import given
from hypothesis import strategies as st
from test_prepare import Folder

from zerolora import pages
from zerolora.report import comparison

HARM = "</pre></script>--><script>alert(1)</script><img src=x onerror='alert(1)'>\"'`={{ 7 * 7 }}\0\x1b[2J\u202e\ud800"
HARMS = st.lists(st.sampled_from([*HARM.split(), HARM, "]]>", "<!--", "&lt;", "<b"]) | st.text(), max_size=4).map(
    "".join
)
PLACES = '<p title="{{ text }}">{{ text }}</p><pre>{{ text }}</pre><title>{{ text }}</title><i>{{ [text] | join }}</i>'


class Skeleton(HTMLParser):
    """The elements of a page and the names of their attributes, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[Any] = []
        self.texts = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, [name for name, _ in attrs]))
        self.texts += "".join(f"{value}" for _, value in attrs)

    def handle_endtag(self, tag: str) -> None:
        self.elements.append(tag)

    def handle_comment(self, data: str) -> None:
        self.elements.append("comment")

    def handle_data(self, data: str) -> None:
        self.texts += data


class Harmful(str):
    """A text that is HARM where it is printed, and equal to itself where a template decides by it."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self[:]}{HARM}"

    def __format__(self, form: str) -> str:
        return str(self)


def harmful(value: Any) -> Any:
    """Return the values of a template with harm in every text, names of dictionaries too."""
    if type(value) is str:
        return Harmful(value)
    if isinstance(value, dict):
        return {harmful(key): harmful(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(harmful, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
        return dataclasses.replace(value, **{name: harmful(each) for name, each in fields.items()})
    return type(value)(map(harmful, value)) if type(value) in (list, tuple) else value


@given(HARMS)
def test_no_text_becomes_html(text: str) -> None:
    """In every kind of place of a page: an attribute, an element, a filter's result."""
    template = pages.environment(Path(__file__).parent).from_string(PLACES)
    page, plain = template.render(text=text), Skeleton(template.render(text="x"))
    assert Skeleton(page).elements == plain.elements
    page.encode()  # a lone surrogate cannot be written
    assert not {*map(chr, range(32)), "\x7f", "\u202e"} & {*page} - {"\n", "\t"}


@pytest.mark.parametrize("name", ["report", "comparison", "mask"])
def test_every_text_of_a_page_is_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    """All values that the real page is made of, and the names in them, are harmful."""

    def made(folder: Path) -> Skeleton:
        folder.mkdir()
        if name == "report":
            page = FinishedRun(folder).page(fail_if="accuracy < base")
        elif name == "comparison":
            rows = {f"run{position}": row(position) for position in range(3)}
            comparison.compare_all(results_of(folder / "results", rows, [*rows, "waiting"]), folder / "compare")
            page = folder / "compare/index.html"
        else:
            given = [{"instruction": f"<i>{number}", "output": "&amp;", "label": number} for number in range(12)]
            page = Folder(folder, tiny_model).prepare(given, ignore=["label"]) / "mask.html"
        return Skeleton(page.read_text(encoding="utf-8"))

    harmless = made(tmp_path / "harmless")
    render = jinja2.Template.render
    monkeypatch.setattr(jinja2.Template, "render", lambda self, **values: render(self, **harmful(values)))
    page = made(tmp_path / "harmful")
    assert page.elements == harmless.elements
    assert page.texts.count("<script>alert(1)</script>") >= 20
