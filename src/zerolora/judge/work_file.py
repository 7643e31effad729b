"""A file of finished work, one JSON object a line, from which a killed command resumes."""

import json
import os
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import canonical

SERVED, VERDICTS = "served.jsonl", "verdicts.jsonl"
"""Names of the files of what served models replied: answers to sample from, and ratings of answers."""
NEVER = "ZEROLORA_ASK_NO_MODEL"
"""Variable by which commands ask no model behind an endpoint: a rebuild has the replies, or ends."""


class WorkFile:
    """The objects in a file, by `key`. Opening it removes an incomplete last line."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if a line before the last is damaged."""
        self.path = path
        self.pieces: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                piece = json.loads(line)
                self.pieces[piece["key"]] = piece
            except (ValueError, TypeError, KeyError):
                raise UserError(f"{path}:{number}: is damaged; delete that line to repeat its work") from None

    def add(self, piece: dict[str, Any]) -> None:
        """Append an object and flush it to disk."""
        with self.path.open("ab") as file:
            file.write(f"{canonical(piece)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        self.pieces[piece["key"]] = piece
