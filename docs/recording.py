"""Record a terminal: run commands in a folder, and draw what they print as an SVG.

.venv/bin/python docs/recording.py docs/figures/NAME.svg FOLDER 'COMMAND …' 'COMMAND …' …
"""

import html
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from check_table import FONT_FACE
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from zerolora.files import write_text

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
PROMPT = "$ "
TEXT = re.compile(r'textLength="([\d.]+)"([^>]*)>([^<]+)')


def here(*command: str, directory: Path) -> list[str]:
    """Return a command that runs on this machine."""
    return [*command]


def recorded(
    commands: Iterable[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    refused: Iterable[str] = (),
    enter: Callable[..., list[str]] = here,
) -> str:
    """Return what the terminal shows of the commands, run in `folder` one after another, without the paths of this
    machine. Those of `refused` must fail. `enter` returns the command that runs another one in a `directory`, as on
    another machine. Raises CalledProcessError if another one fails, or one of these succeeds.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, **(environment or {}), "COLUMNS": str(WIDTH)}
    lines = []
    for command in commands:
        done = subprocess.run(
            enter(*shlex.split(command), directory=folder),
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if bool(done.returncode) != (command in refused):
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
        lines += [f"{PROMPT}{command}", *done.stdout.rstrip().splitlines(), ""]
    return "\n".join(lines).rstrip().replace(f"{folder}/", "").replace(f"{ROOT}/", "")


def picture(text: str, title: str, name: str, width: int = WIDTH, typed: tuple[str, ...] = (PROMPT,)) -> str:
    """Return a terminal of `width` columns as SVG; lines that begin with one of `typed` are bold. `name` makes the
    picture's identifiers those of no other picture of a page."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor")
    for line in text.splitlines():
        for part in chop_cells(line, width) or [""]:
            console.print(Text(part, style="bold" if line.startswith(typed) else "", no_wrap=True))
    svg = console.export_svg(title=title, theme=SVG_EXPORT_THEME, unique_id=name)
    svg = TEXT.sub(_of_cells, FONT_FACE.sub("", svg))
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _of_cells(text: re.Match[str]) -> str:
    """Return a text of the picture as wide as its cells. For rich, each character takes one."""
    characters = html.unescape(text[3])
    return f'textLength="{float(text[1]) / len(characters) * cell_len(characters):.1f}"{text[2]}>{text[3]}'


def main(output: str, folder: str, *commands: str) -> None:
    text = recorded(commands, Path(folder).resolve())
    print(text)
    write_text(Path(output), picture(text, Path(folder).resolve().name, Path(output).stem))


if __name__ == "__main__":
    main(*sys.argv[1:])
