"""The table of `zerolora check`, and a short form for the first lines of a job's log."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import typer

from zerolora.check.machine import Machine, this_machine
from zerolora.check.rows import Check, Mark, rows
from zerolora.log import LOGGER
from zerolora.types import Device
from zerolora.units import counted

MARKS: dict[Mark, str] = {"right": "✓", "missing": "✗", "note": "–"}
PLAIN: dict[Mark, str] = {"right": "ok", "missing": "NO", "note": "--"}
"""Marks for a terminal that cannot show the others."""
STYLES: dict[Mark, str] = {"right": "green", "missing": "red", "note": "dim"}
STYLED: dict[str, dict[str, Any]] = {
    "green": {"fg": "green"},
    "red": {"fg": "red"},
    "dim": {"dim": True},
    "bold": {"bold": True},
}
ARROW = "→"
ASCII = str.maketrans({"×": "x", "–": "-", ARROW: "->", "…": "..."})
GAP = 2


def shows(encoding: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a terminal with this encoding can show the marks. Consoles of Linux have no glyphs for them."""
    try:
        "".join([*MARKS.values(), ARROW, "×"]).encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return environment.get("TERM") not in ("linux", "dumb")


def table(checked: Sequence[Check], width: int, *, colour: bool = False, plain: bool = False) -> str:
    """Return the rows as lines of at most `width` characters; a remedy is below its row."""
    marks = PLAIN if plain else MARKS
    mark, name = max(map(len, marks.values())), max(len(row.name) for row in checked)
    needed = min(max(len(row.needed) for row in checked), width // 3)
    margin = mark + GAP + name + GAP
    here = width - margin - needed - GAP
    here = min(here, max(len(row.here) for row in checked))
    lines = [_styled(f"{'':{margin}}{'here':{here}}{'':{GAP}}{'needed' if needed else ''}".rstrip(), "bold", colour)]
    for row in checked:
        style = STYLES[row.mark]
        columns = zip_longest(wrapped(row.here, here), wrapped(row.needed, max(needed, 1)), fillvalue="")
        for number, (left, right) in enumerate(columns):
            first = _styled(f"{marks[row.mark]:{mark}}", style, colour) if number == 0 else " " * mark
            title = row.name if number == 0 else ""
            lines.append(f"{first}{'':{GAP}}{title:{name}}{'':{GAP}}{left:{here}}{'':{GAP}}{right}".rstrip())
        arrow = f"{ARROW} "
        for number, line in enumerate(wrapped(row.remedy, width - margin - len(arrow))):
            lines.append(" " * margin + _styled(f"{arrow if number == 0 else '  '}{line}", style, colour))
    text = "\n".join(lines)
    return text.translate(ASCII) if plain else text


def wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` characters."""
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _styled(text: str, style: str, colour: bool) -> str:
    return typer.style(text, **STYLED[style]) if colour else text


def closing(checked: Sequence[Check], config: str | None) -> str:
    """Return the sentence below the table."""
    missing = sum(row.mark == "missing" for row in checked)
    what = f"{counted(missing, 'thing')} missing" if missing else "Nothing is missing"
    return f"{what} for {config}." if config else f"{what}; there is no config to compare with."


def short(machine: Machine, device: Device) -> list[str]:
    """Return the machine in a few lines, for the log of a job on this device."""
    checked = rows(machine, None)
    here = {row.name: row.here for row in checked}
    versions = [f"{machine.host}: Python {machine.python}", f"torch {here['torch']}"]
    if "packages" in here:
        versions.append(f"{here['packages']} of envs/requirements.lock")
    room = [f"memory {here['memory']}", *(f"disk {row.here}" for row in checked if row.name == "disk")]
    gpus = [row.here for row in checked if row.name == "GPUs"]
    lines = [versions, room, [f"NVIDIA driver {here['driver']}", f"GPUs {'; '.join(gpus)}"]]
    return ["; ".join(parts) for parts in (lines if device == "cuda" else lines[:2])]


def log_machine(device: Device) -> None:
    """Log the machine, for a job on this device."""
    for line in short(this_machine(device), device):
        LOGGER.info("%s", line)
