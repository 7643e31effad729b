"""Write the lists of modules in docs/modules.md from the modules' own first lines: python docs/module_table.py.

With --check it writes nothing, and exits with 1 if the lists are out of date.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs/modules.md"
PACKAGE = ROOT / "src/zerolora"
MARK = re.compile(r"(<!-- modules of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def modules_of(room: str) -> list[Path]:
    """Return the modules of a room and its subpackages; for `.` those beside the rooms."""
    if room == ".":
        return sorted(path for path in PACKAGE.glob("*.py") if path.name != "__init__.py")
    return sorted(
        path for path in (PACKAGE / room).rglob("*.py") if path.name != "__init__.py" or path.parent.name != room
    )


def line_of(path: Path) -> str:
    """Return the list entry of a module: its path and the first sentence of its docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    first = re.split(r"(?<=[.:])\s(?=[A-Z]|$)", paragraph)[0].rstrip(".:")
    return f"- `{path.relative_to(ROOT).as_posix()}`: {first}"


def written(text: str) -> str:
    """Return the document with every list written again."""

    def block(match: re.Match[str]) -> str:
        return match[1] + "".join(f"{line_of(path)}\n" for path in modules_of(match[2])) + match[3]

    return MARK.sub(block, text)


def rooms(text: str) -> list[str]:
    """Return the rooms that the document lists."""
    return [match[2] for match in MARK.finditer(text)]


def write_or_check(document: Path, new: str) -> int:
    """Write a document, or with --check report whether it is out of date. Return the exit code."""
    if "--check" not in sys.argv:
        document.write_text(new, encoding="utf-8")
        return 0
    if new == document.read_text(encoding="utf-8"):
        return 0
    print(f"{document.relative_to(ROOT).as_posix()} is out of date; run `make architecture`")
    return 1


def main() -> int:
    """Write the lists, or compare them."""
    return write_or_check(DOCUMENT, written(DOCUMENT.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
