"""Layouts of rows of public data sets, and what `zerolora init` and `prepare` make of them.

`python tests/row_layouts.py` writes the golden file, tests/unit/layouts/outcomes.json.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from zerolora.config.schema import Source
from zerolora.config.settings import PrepareSettings
from zerolora.data.formats import parse
from zerolora.data.formats.reading import Seen, reading_of
from zerolora.data.formats.row_values import is_blank
from zerolora.first_config.columns import RowLayout, layout_of

LAYOUTS = Path(__file__).parent / "unit/layouts"
OUTCOMES = LAYOUTS / "outcomes.json"
CORPORA = ("popular", "unseen")
RANKED = {"answer", "rank"}
"""What the form `preference` reads of ranked answers, which are no messages."""


def layouts(corpus: str) -> list[dict[str, Any]]:
    """Return the layouts of a corpus."""
    return [json.loads(line) for line in (LAYOUTS / f"{corpus}.jsonl").read_text(encoding="utf-8").splitlines()]


def write_rows(folder: Path, rows: list[dict[str, Any]], as_table: bool = False) -> Path:
    """Write rows as JSON lines, or as a Parquet table."""
    path = folder / ("rows.parquet" if as_table else "rows.jsonl")
    if as_table:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def leaves(value: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every leaf of a row, of objects in lists as well, as in messages[].content.

    Nothing here is the product's, so that a leaf that it forgets is missed.
    """
    for key, held in value.items():
        if isinstance(held, dict) and held:
            yield from leaves(held, f"{above}{key}.")
        elif isinstance(held, list) and any(isinstance(each, dict) for each in held):
            for each in held:
                yield from leaves(each, f"{above}{key}[].") if isinstance(each, dict) else [(f"{above}{key}", each)]
        else:
            yield f"{above}{key}", held


def filled_leaves(rows: list[dict[str, Any]]) -> list[str]:
    """Return the leaves that have a value in some row, in their order."""
    blank: tuple[Any, ...] = (None, "", [], {})
    return [*dict.fromkeys(leaf for row in rows for leaf, held in leaves(row) if held not in blank)]


def settings_of(layout: RowLayout, path: Path, ignored: list[str]) -> PrepareSettings:
    """Return the settings that `init` proposes, with these leaves in `ignore`."""
    values: dict[str, Any] = {"model": "tiny", "path": str(path), "split": {"validation": 0, "test": 0}, "seed": 1}
    return PrepareSettings.model_validate(
        values | {"rows": layout.rows, "max_length": 4096} | layout.settings() | {"ignore": ignored}
    )


def outcome(rows: list[dict[str, Any]], layout: RowLayout) -> dict[str, Any]:
    """Return the outcome of a layout: `free`, `line` if the user decides some leaves, or `listed` without a form; and
    what becomes of each leaf."""
    found = {column.leaf: column for column in layout.found}
    fields = {column: field for field, column in layout.columns.items()}
    keys = _read_keys(rows, layout)
    fates: dict[str, str] = {}
    for leaf in filled_leaves(rows):
        owner = next((name for name in _owners(leaf) if name in found), "")
        if not owner:
            fates[leaf] = "blank" if _is_blank(rows, leaf) else "missing"
            continue
        fate: str = found[owner].status
        if fate == "read" and owner in fields:
            fate = f"mapped to {fields[owner]}"
        if fate == "read" and "[]" in leaf and leaf != owner and leaf.rpartition("[].")[2].split(".")[0] not in keys:
            fate = "missing"
        fates[leaf] = fate
    name = "listed" if not layout.form else "line" if layout.undecided else "free"
    return {"outcome": name, "form": layout.form, "leaves": fates}


def _owners(leaf: str) -> Iterator[str]:
    """Yield a leaf and what it is inside of."""
    yield leaf
    while (end := max(leaf.rfind("."), leaf.rfind("[]"))) > 0:
        leaf = leaf[:end]
        yield leaf


def _is_blank(rows: list[dict[str, Any]], leaf: str) -> bool:
    return all(is_blank(held) for row in rows for name, held in leaves(row) if name == leaf)


def _read_keys(rows: list[dict[str, Any]], layout: RowLayout) -> set[str]:
    """Return the keys of messages that the form reads."""
    seen = Seen()
    if layout.form:
        settings = layout.settings() | {"ignore": [*layout.ignore, *layout.undecided]}
        reading = reading_of(Source.model_validate(settings), "jsonl")
        for row in rows:
            parse(row, layout.form, reading, seen)
    ranked = RANKED if seen["read", "column", "answers"] else set()
    return ranked | {name for status, where, name in seen if where == "key" and status == "read"}


def outcomes() -> dict[str, Any]:
    """Return the outcomes of all layouts, and their numbers."""
    result: dict[str, Any] = {"counts": {}}
    for corpus in CORPORA:
        of_corpus = {}
        for layout in layouts(corpus):
            with tempfile.TemporaryDirectory() as folder:
                path = write_rows(Path(folder), layout["rows"])
                of_corpus[layout["name"]] = outcome(layout["rows"], layout_of([path], {}, [], "rows"))
        counted = Counter(each["outcome"] for each in of_corpus.values())
        result["counts"][corpus] = {name: counted[name] for name in ("free", "line", "listed")}
        result[corpus] = of_corpus
    return result


def golden() -> dict[str, Any]:
    """Return what the golden file has."""
    return json.loads(OUTCOMES.read_text(encoding="utf-8"))


if __name__ == "__main__":
    OUTCOMES.write_text(json.dumps(outcomes(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
