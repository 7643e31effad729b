"""Makes what docs/gpu.md shows of `zerolora check`, its table for a recipe on a machine, when the site is built.

.venv/bin/python docs/check_table.py   # take the facts of this machine, docs/check_machine.json
"""

import dataclasses
import io
import json
import re
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


def written(text: str) -> str:
    """Return a page with the table."""
    indented = "\n".join(f"    {line}".rstrip() for line in shown().splitlines())
    return BLOCK.sub(lambda block: f"{block[1]}\n{indented}\n\n{block[2]}", text)


def picture() -> str:
    """Return the terminal as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ zerolora check --config {CONFIG}"))
    console.print(Text.from_ansi(shown(colour=True)))
    drawn = console.export_svg(title="zerolora check", theme=SVG_EXPORT_THEME, unique_id="check")
    return "\n".join(line.rstrip() for line in FONT_FACE.sub("", drawn).splitlines()) + "\n"


if __name__ == "__main__":
    FACTS.write_text(json.dumps(dataclasses.asdict(this_machine()), indent=2) + "\n", encoding="utf-8")
