"""The `sources` block that an error shows, for the user to paste into the config."""

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

SHOWN = 20  # sources that a line names
LEFT_OUT = "left out"
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


def block(root: Path, settings: Mapping[Path, str]) -> str:
    """Return `sources: {...}` for the files of `root`, with the settings of each, as in "split: test".

    Files with the same settings are joined to their folder or, if their names differ in numbers only, to a pattern.
    Those with the settings LEFT_OUT are in none.
    """
    return of_entries(_entries(root, root, settings))


def of_entries(entries: Sequence[tuple[str, str]]) -> str:
    """Return `sources: {...}` of entries: names and settings. A name that YAML would not read as text is quoted."""
    shown = [
        f"{name if PLAIN.fullmatch(name) and yaml.safe_load(name) == name else json.dumps(name, ensure_ascii=False)}: "
        f"{{{setting}}}"
        for name, setting in entries[:SHOWN]
    ]
    return f"sources: {{{', '.join(shown)}{', ...' * (len(entries) > SHOWN)}}}"


def _entries(root: Path, folder: Path, settings: Mapping[Path, str]) -> list[tuple[str, str]]:
    inside = {path: value for path, value in settings.items() if path.is_relative_to(folder)}
    values = set(inside.values())
    if values == {LEFT_OUT}:
        return []
    if folder != root and len(values) == 1:
        return [(folder.relative_to(root).as_posix(), values.pop())]
    result: list[tuple[str, str]] = []
    for child in sorted({folder / path.relative_to(folder).parts[0] for path in inside}):
        if child not in inside:
            result += _entries(root, child, inside)
            continue
        if inside[child] == LEFT_OUT:
            continue
        pattern = re.sub(r"\d+", "*", child.name)
        beside = [path for path in inside if path.parent == folder and fnmatchcase(path.name, pattern)]
        alike = len(beside) > 1 and {inside[path] for path in beside} == {inside[child]}
        entry = ((folder / pattern if alike else child).relative_to(root).as_posix(), inside[child])
        result += [entry] * (entry not in result)
    return result
