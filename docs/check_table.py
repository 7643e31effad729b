"""Write what docs/check.md shows of `zerolora check`: its table for a recipe on a machine, as text and as a picture.

.venv/bin/python docs/check_table.py             # write the page's text and docs/figures/check.svg
.venv/bin/python docs/check_table.py --check     # exit with 1 if they are out of date
.venv/bin/python docs/check_table.py --measure   # first take the facts of this machine, docs/check_machine.json
"""

import dataclasses
import io
import json
import re
import sys
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from zerolora.check.check_table import closing, table
from zerolora.check.machine import Machine, this_machine
from zerolora.check.needs import Needs, needs_of
from zerolora.check.rows import rows
from zerolora.config.file import load

ROOT = Path(__file__).resolve().parents[1]
FACTS = ROOT / "docs/check_machine.json"
PAGE = ROOT / "docs/check.md"
PICTURE = ROOT / "docs/figures/check.svg"
CONFIG = "config/recipes/qwen2.5-14b-2x32gb/config.yaml"
WIDTH = 100
BLOCK = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""rich's pictures name a font of another host."""


def facts() -> Machine:
    """Return the machine that the page shows."""
    return TypeAdapter(Machine).validate_json(FACTS.read_text(encoding="utf-8"))


def needs() -> Needs:
    """Return the needs of the page's recipe with the packages of the lock, which have no liger-kernel to compile."""
    return dataclasses.replace(needs_of(load(ROOT / CONFIG)), compiling=())


def shown(colour: bool = False) -> str:
    """Return what `zerolora check --config CONFIG` prints on the page's machine."""
    checked = rows(facts(), needs())
    return f"{table(checked, WIDTH, colour=colour)}\n{closing(checked, CONFIG)}"


def page(text: str) -> str:
    """Return the page with the current table."""
    indented = "\n".join(f"    {line}".rstrip() for line in shown().splitlines())
    return BLOCK.sub(lambda block: f"{block[1]}\n{indented}\n\n{block[2]}", text)


def picture() -> str:
    """Return the terminal as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ zerolora check --config {CONFIG}"))
    console.print(Text.from_ansi(shown(colour=True)))
    drawn = console.export_svg(title="zerolora check", theme=SVG_EXPORT_THEME, unique_id="check")
    return "\n".join(line.rstrip() for line in FONT_FACE.sub("", drawn).splitlines()) + "\n"


def main(options: list[str]) -> int:
    """Write or check the page and the picture; return 1 if one is out of date."""
    if "--measure" in options:
        FACTS.write_text(json.dumps(dataclasses.asdict(this_machine()), indent=2) + "\n", encoding="utf-8")
    current = {PAGE: page(PAGE.read_text(encoding="utf-8")), PICTURE: picture()}
    if "--check" in options:
        old = [file for file, text in current.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
        for file in old:
            print(f"{file.relative_to(ROOT)} is out of date; run docs/check_table.py", file=sys.stderr)
        return int(bool(old))
    for file, text in current.items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
