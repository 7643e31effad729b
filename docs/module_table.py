"""Lists the modules in docs/architecture.md by their first sentences, when the site is built."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
    """Return a page with its lists of modules."""

    def block(match: re.Match[str]) -> str:
        return match[1] + "".join(f"{line_of(path)}\n" for path in modules_of(match[2])) + match[3]

    return MARK.sub(block, text)


def rooms(text: str) -> list[str]:
    """Return the rooms that a page lists."""
    return [match[2] for match in MARK.finditer(text)]
