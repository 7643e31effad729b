"""Lines of the keys of a JSON text, for messages."""

import json
import re
from pathlib import Path

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
Location = tuple[str, ...]


def lines_of(path: Path) -> dict[Location, int]:
    """Return the line of each key of a valid JSON file, by the keys that lead to it, where entries of lists count as
    keys by their number. None is known if the file is not on this machine."""
    try:
        return key_lines(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def key_lines(text: str) -> dict[Location, int]:
    """Return the line of each key of a valid JSON text."""
    lines: dict[Location, int] = {}
    here: list[str] = []  # the key, or number, of each open object or list
    kinds: list[str] = []
    last, line_of_last = "", 1  # a string, which is a key if a colon follows
    line, end = 1, 0
    for token in TOKEN.finditer(text):
        line += text.count("\n", end, token.start())
        end = token.start()
        part = token[0]
        if part in "{[":
            kinds.append(part)
            here.append("0" if part == "[" else "")
        elif part in "}]":
            kinds.pop()
            here.pop()
        elif part == ",":
            if kinds[-1] == "[":
                here[-1] = str(int(here[-1]) + 1)
        elif part == ":":
            here[-1] = json.loads(last)
            lines[tuple(here)] = line_of_last
        else:
            last, line_of_last = part, line
    return lines


def line_at(lines: dict[Location, int], location: Location) -> int | None:
    """Return the line of a location, or of the innermost key around it; None if no key is known."""
    return next((lines[location[:end]] for end in range(len(location), 0, -1) if location[:end] in lines), None)
