"""A stage's settings as an argument of its command: by value, or as @FILE where they are longer than a shell takes."""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import canonical, write_text

LONGEST = 100_000
"""Bytes of settings in quotes. Linux takes 128 KiB for one argument (MAX_ARG_STRLEN, execve(2)), and Snakemake hands
a command with all that it is given to bash as one."""
FOLDER = Path("work/settings")


def argument_of(settings: Any) -> str:
    """Return the argument that `settings_of` reads. A file is called by its content, so two are equal or differ."""
    text = canonical(settings)
    if len(shlex.quote(text).encode()) <= LONGEST:
        return text
    path = FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    if not path.is_file():
        write_text(path, text)
    return f"@{path}"


def settings_of(argument: str) -> Any:
    """Return the settings of an argument. Raises ValueError if it is not JSON, UserError for a missing file."""
    if not argument.startswith("@"):
        return json.loads(argument)
    path = Path(argument[1:])
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--settings: {path}: there is no such file; run Snakemake again, which writes it") from None
