"""Record a terminal: a conversation with a tuned model and its base model, as docs/figures/chat.svg.

.venv/bin/python docs/chat_picture.py     # in the directory of a finished run of the embedded default; half a minute
"""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import recording

from zerolora.files import write_text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/figures/chat.svg"
WIDTH, HEIGHT = 100, 40
COMMAND = ("zerolora", "chat", "default", "default/base", "--max-new-tokens", "32")
LINES = ("1645=", "/new", "257=")
PROMPT = "> "


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
    drawn: str = recording.picture(text, "a finished run", "chat", WIDTH, (recording.PROMPT, PROMPT))
    return drawn


def recorded(folder: Path, environment: dict[str, str]) -> str:
    """Return what a terminal shows of the conversation in the project `folder`."""
    return f"{recording.PROMPT}{' '.join(COMMAND)}\n{session(COMMAND, LINES, folder, environment)}".rstrip()


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
