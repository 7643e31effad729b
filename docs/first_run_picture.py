"""Record a terminal: from an empty folder with a model and rows to a trained adapter, as docs/figures/first-run.svg.

.venv/bin/python docs/first_run_picture.py MODEL     # a directory, as resources/weights/smollm2-135m-instruct; minutes
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from check_table import FONT_FACE
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from zerolora.files import write_text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/figures/first-run.svg"
WIDTH = 120
ROWS = [
    {"instruction": f"What is {one} + {other}?", "output": f"{one} + {other} = {one + other}"}
    for one in range(1, 21)
    for other in range(1, 21)
]
COMMANDS = (
    "ls",
    "zerolora init --model models/smollm2 --data sums.jsonl",
    "zerolora run",
    "ls results/sums/adapter",
)


def recorded(folder: Path) -> str:
    """Return what the terminal shows of the commands, run in `folder`. Raises CalledProcessError if one fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    lines = []
    for command in COMMANDS:
        done = subprocess.run(
            command.split(),
            cwd=folder,
            env={**os.environ, "PATH": path, "COLUMNS": str(WIDTH)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        lines += [f"$ {command}", *done.stdout.rstrip().splitlines(), ""]
    return "\n".join(lines).rstrip()


def picture(text: str) -> str:
    """Return the terminal as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")
    for line in text.splitlines():
        console.print(Text(line, style="bold" if line.startswith("$ ") else ""))
    svg = console.export_svg(title="an empty folder", theme=SVG_EXPORT_THEME, unique_id="first-run")
    return "\n".join(line.rstrip() for line in FONT_FACE.sub("", svg).splitlines()) + "\n"


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        (folder / "models/smollm2").symlink_to(Path(model).resolve())
        (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
        text = recorded(folder).replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    print(text)
    write_text(PICTURE, picture(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
