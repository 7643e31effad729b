"""Rows of public data sets go through `init` and `prepare`, or stop in a line, and nothing of them gets lost."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from row_layouts import CORPORA, filled_leaves, golden, layouts, outcome, settings_of, write_rows
from test_prepare import Folder

from zerolora.data.prepare import prepare
from zerolora.errors import UserError
from zerolora.first_config.columns import RowLayout, layout_of

ALL = [(corpus, layout) for corpus in CORPORA for layout in layouts(corpus)]
each_layout = pytest.mark.parametrize(("corpus", "layout"), ALL, ids=[layout["name"] for _, layout in ALL])
GOLDEN = golden()


def prepared(folder: Folder, layout: RowLayout, path: Path, ignored: list[str]) -> int:
    """Return the number of training rows that `prepare` makes of a file by what `init` proposes."""
    prepare(settings_of(layout, path, ignored), folder.manifest, folder.output, 1)
    return len(folder.all_rows())


@each_layout
def test_outcome_of_a_layout(corpus: str, layout: dict[str, Any], tmp_path: Path, tiny_model: Path) -> None:
    """Of JSON lines, every third layout of a Parquet table."""
    folder = Folder(tmp_path, tiny_model)
    path = write_rows(tmp_path, layout["rows"], as_table=ALL.index((corpus, layout)) % 3 == 2)
    proposed = layout_of([path], {}, [], "rows")
    found = outcome(layout["rows"], proposed)
    assert found == GOLDEN[corpus][layout["name"]]
    assert [*found["leaves"]] == filled_leaves(layout["rows"]) and "missing" not in found["leaves"].values()
    if {"tools", "messages[].thinking"} & {*found["leaves"]}:
        template = (ROOT / "tests/templates/qwen3.jinja").read_text(encoding="utf-8")
        (folder.manifest.parent / "chat_template.jinja").write_text(template, encoding="utf-8")
    if found["outcome"] == "listed":
        with pytest.raises(UserError) as raised:
            prepared(folder, proposed, path, proposed.ignore)
        assert str(raised.value).startswith(str(path)) and len(str(raised.value).splitlines()) <= 6
        return
    if found["outcome"] == "line":
        with pytest.raises(UserError) as raised:
            prepared(folder, proposed, path, proposed.ignore)
        first, last = str(raised.value).splitlines()[0], str(raised.value).splitlines()[-1]
        assert re.match(rf"{re.escape(str(path))}:( row )?\d+: ", first) and "nothing reads it" in first
        named = yaml.safe_load(last.rpartition("ignore: ")[2])
        assert {*named} <= {*proposed.undecided, *proposed.ignore} and {*named} & {*proposed.undecided}
    assert 0 < prepared(folder, proposed, path, [*proposed.ignore, *proposed.undecided]) <= len(layout["rows"])


def test_golden_has_all_layouts_and_their_numbers() -> None:
    for corpus in CORPORA:
        found = GOLDEN[corpus]
        assert [*found] == [layout["name"] for layout in layouts(corpus)]
        assert Counter(each["outcome"] for each in found.values()) == Counter(GOLDEN["counts"][corpus])
    assert GOLDEN["counts"]["popular"]["free"] >= 34
