"""A stage's settings as a command-line argument: JSON, or @FILE if that is too long for a shell."""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import canonical, write_text

LONGEST = 100_000
"""Bytes of quoted settings in a command. Linux allows 128 KiB for one argument (MAX_ARG_STRLEN, execve(2)), and
Snakemake passes a whole command to bash as one."""
FOLDER = Path("work/settings")


def argument_of(settings: Any) -> str:
    """Return the argument that `settings_of` reads. A file is named by the hash of its content."""
    text = canonical(settings)
    if len(shlex.quote(text).encode()) <= LONGEST:
        return text
    path = FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    if not path.is_file():
        write_text(path, text)
    return f"@{path}"


def settings_of(argument: str) -> Any:
    """Return the settings in an argument. Raises ValueError if it is not JSON, UserError for a missing file."""
    if not argument.startswith("@"):
        return json.loads(argument)
    path = Path(argument[1:])
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--settings: {path}: there is no such file; run Snakemake again, which writes it") from None
