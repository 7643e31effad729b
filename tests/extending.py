"""The examples of docs/extending.md, added to the package as the page says: files, and entries of tables."""

import ast
import re
from dataclasses import dataclass

from conftest import ROOT

PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"`src/zerolora/([\w/]+\.py)`(?:, below `([\w-]+)`)?:\n\n```python\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A block of code of the page."""

    path: str
    """Its file, in the package."""
    below: str | None
    """The entry of the file's table below which it stands; None if it is the whole file."""
    code: str

    def added(self, text: str) -> str:
        """Return the text of its file with it."""
        return with_entry(text, self.below, self.code) if self.below else self.code


EXAMPLES = [Example(*block) for block in BLOCK.findall(PAGE) if block[0] != "card.py"]  # a stage has files elsewhere


def with_entry(text: str, below: str, code: str) -> str:
    """Return the text of a table's module with an entry below another one, with its imports and functions."""
    lines = text.splitlines(keepends=True)
    (table,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "entries_by_name"
    )
    (row,) = (
        each
        for each in table.args
        if isinstance(each, ast.Call)
        and any(word.arg == "name" and ast.literal_eval(word.value) == below for word in each.keywords)
    )
    assert row.end_lineno
    entry = ast.parse(code).body[-1]
    before = "".join(code.splitlines(keepends=True)[: entry.lineno - 1])
    lines.insert(row.end_lineno, "".join(code.splitlines(keepends=True)[entry.lineno - 1 :]).rstrip() + ",\n")
    lines.insert(table.lineno - 1, f"{before}\n\n" if before else "")
    return "".join(lines)
