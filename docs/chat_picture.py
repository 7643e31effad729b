"""Record a terminal: a conversation with a tuned model and its base model, as docs/figures/chat.svg.

.venv/bin/python docs/chat_picture.py     # in the directory of a finished run of the embedded default; half a minute
"""

import fcntl
import html
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from check_table import FONT_FACE
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from zerolora.files import write_text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/figures/chat.svg"
WIDTH, HEIGHT = 100, 40
COMMAND = ("zerolora", "chat", "default", "default/base", "--max-new-tokens", "32")
LINES = ("1645=", "/new", "257=")
PROMPT = "> "
TEXT = re.compile(r'textLength="([\d.]+)"([^>]*)>([^<]+)')


def session(command: tuple[str, ...], lines: tuple[str, ...], folder: Path, environment: dict[str, str]) -> str:
    """Return what a terminal shows of a command to which `lines` are typed, each at its prompt, and then Ctrl-D.

    Raises CalledProcessError if the command fails.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    variables = {**environment, "TERM": "dumb", "LC_ALL": "C.UTF-8"}  # no sequences that move the cursor
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as running:
        os.close(theirs)
        shown = b""
        try:
            for typed in (*(f"{line}\n" for line in lines), "\x04"):
                shown += _until_prompt(ours)
                os.write(ours, typed.encode())
            while more := _read(ours):
                shown += more
        finally:
            running.kill()
            os.close(ours)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command, shown)
    return shown.decode().replace("\r\n", "\n")


def picture(text: str) -> str:
    """Return the terminal as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")
    for line in text.splitlines():
        for part in chop_cells(line, WIDTH) or [""]:
            console.print(Text(part, style="bold" if line.startswith(("$ ", PROMPT)) else "", no_wrap=True))
    svg = console.export_svg(title="a finished run", theme=SVG_EXPORT_THEME, unique_id="chat")
    svg = TEXT.sub(_of_cells, FONT_FACE.sub("", svg))
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _of_cells(text: re.Match[str]) -> str:
    """Return a text of the picture as wide as its cells. For rich, each character takes one."""
    characters = html.unescape(text[3])
    return f'textLength="{float(text[1]) / len(characters) * cell_len(characters):.1f}"{text[2]}>{text[3]}'


def recorded(folder: Path, environment: dict[str, str]) -> str:
    """Return what a terminal shows of the conversation in the project `folder`."""
    return f"$ {' '.join(COMMAND)}\n{session(COMMAND, LINES, folder, environment)}".rstrip()


def _until_prompt(terminal: int) -> bytes:
    read = b""
    while not (read == PROMPT.encode() or read.endswith(f"\n{PROMPT}".encode())):
        if not (more := _read(terminal)):
            raise EOFError(f"the command ended: {read.decode(errors='replace')}")
        read += more
    return read


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the command has closed it
        return b""


def main() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    text = recorded(Path.cwd(), {**os.environ, "PATH": path})
    print(text)
    write_text(PICTURE, picture(text))


if __name__ == "__main__":
    main()
