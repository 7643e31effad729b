"""Writes the data sets of another tool's config as a section of `prepare`: one path, or sources in a directory."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from zerolora.data.formats import FORMS
from zerolora.imports.formats.import_format import FILL_IN, Draft, Remark
from zerolora.imports.formats.shared.base_model_keys import COMMIT

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
FILES = "*.parquet"
"""Pattern of a repository's data files if the config names none."""
REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
FOLDER = "data/imported"
DATA_FILE = re.compile(r"\.(jsonl?|ndjson|csv|tsv|txt|parquet|arrow)(\.(gz|bz2|xz|zst))?$")
SLICE = re.compile(r"([\w.-]+)(\[(.*)\])?")
SCORES = ("score_chosen", "score_rejected")
"""Fields that are never ignored: no tool reads them, but they show pairs in the wrong order."""
BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""Paths that denote the type of data_files, which are anywhere (load_dataset of `datasets`)."""
FIRST = re.compile(r":([0-9]+)(%?)")


@dataclass
class DataSet:
    """One data set of another tool's config."""

    key: str
    """The key of the imported file that names it."""
    path: str
    """A file or directory, or a repository of a hub."""
    local: bool
    """Whether the path is a local one."""
    form: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    """Our role, by role name in its messages."""
    ignore: list[str] = field(default_factory=list)
    """Columns that the row format would read, but the tool does not."""
    split: str | None = None
    """A published split, or a slice of one, e.g. train[:1000]."""
    subset: str | None = None
    revision: str | None = None
    files: list[str] = field(default_factory=list)
    """The files of the path to read. Empty = all."""
    at_most: int | float | None = None
    """Maximum number of rows to use."""
    rows: int | None = None
    """Number of rows to use, repeated if it has fewer."""
    weight: float | None = None
    held_out: bool = False
    """Whether it is the validation split."""
    name: str = ""
    """Name in the directory of all data sets. Default: from its path."""


def write_sets(sets: list[DataSet], draft: Draft, folder_there: Path | None = None) -> list[str]:
    """Set path, sources, format and columns of the data set `rows`; return a line for each remaining task.

    Each data set becomes a separate source, even if two have the same name in different directories. `folder_there` is
    the directory that the tool's config names for its data sets.
    """
    lines: list[str] = []
    rows = draft.config["prepare"]["rows"]
    for each in sets:
        lines += [*_read_part(each), *_read_files(each)]
    if not sets:
        rows["path"] = "data/rows.json"
        return ["prepare.rows.path: the file names no data set; give your file of rows"]
    only = sets[0]
    plain = not (only.rows or only.weight or only.held_out)
    if len(sets) == 1 and plain and len(only.files) < 2:
        path, line = _path(only, draft)
        rows |= {"path": path, "format": only.form} | _names_in_rows(only)
        rows |= {"at_most": only.at_most} if only.at_most else {}
        return [*lines, *line]
    if all(each.local for each in sets) and (folder := _folder(sets, folder_there)):
        rows["path"] = folder
        names = {id(each): str(Path(each.path).relative_to(folder)) for each in sets}
    else:
        rows["path"] = FOLDER
        names = dict(zip(map(id, sets), _names(sets), strict=True))
    forms = {each.form for each in sets}
    rows["format"] = forms.pop() if len(forms) == 1 else "auto"
    if only.ignore and all(each.ignore == only.ignore for each in sets):
        rows["ignore"] = only.ignore
    sources: dict[str, dict[str, Any]] = {}
    for each in sets:
        entry: dict[str, Any] = {} if each.form == rows["format"] else {"format": each.form}
        entry |= {key: value for key, value in _names_in_rows(each).items() if rows.get(key) != value}
        entry |= {name: value for name in ("weight", "rows", "at_most") if (value := getattr(each, name)) is not None}
        entry |= {"split": "validation"} if each.held_out else {}
        path = names[id(each)]
        for name in [f"{path}/{file}" for file in each.files] or [path]:
            sources[name] = dict(entry)
            draft.came_from |= {("prepare", "rows", "sources", name, key): each.key for key in entry}
        if rows["path"] == FOLDER:
            lines.append(f"prepare.rows.sources: bring {_described(each)} to {FOLDER}/{path} (or link it there)")
        else:
            lines += _of_part(each)
    rows["sources"] = sources
    return lines


def _names_in_rows(each: DataSet) -> dict[str, Any]:
    """Return the non-empty keys of the config that describe how to read the rows."""
    return {key: value for key in ("columns", "roles", "ignore") if (value := getattr(each, key))}


def unread(form: str, read: Iterable[str]) -> list[str]:
    """Return the fields of a row format that are not in `read`, to be ignored."""
    known = set(read)
    return [name for name in FORMS[form].fields if name not in known]


def _read_part(each: DataSet) -> list[str]:
    """Turn a slice of a split, e.g. train[:1000] or train[:20%], into `at_most`."""
    match = SLICE.fullmatch(each.split or "")
    if not match or not match[2]:
        return []
    if first := FIRST.fullmatch(match[3]):
        count, percent = int(first[1]), bool(first[2])
        each.split = match[1]
        each.at_most = (count / 100 if count < 100 else None) if percent and count else count or None
        return []
    return [Remark(f"{each.key}: {each.split} is a slice of a split; bring only those rows", FILL_IN)]


def _read_files(each: DataSet) -> list[str]:
    """Make files relative to the data set; return a line for files elsewhere, and for `at_most` of several files."""
    lines: list[str] = []
    elsewhere = [file for file in each.files if REMOTE.match(file) or file.startswith(("/", "~")) or ".." in file]
    if elsewhere:
        each.files = [_last(file) if file in elsewhere else file for file in each.files]
        text = f"{each.key}: {', '.join(elsewhere)} is outside of {each.path}; bring it, and correct prepare.rows"
        lines.append(Remark(text, FILL_IN))
    if each.at_most and len(each.files) > 1:
        part = f"{each.at_most:.0%}" if isinstance(each.at_most, float) else each.at_most
        text = f"{each.key}: the first {part} rows of all files there, of each file here"
        lines.append(Remark(f"{text}; correct at_most of prepare.rows.sources"))
    return lines


def _path(each: DataSet, draft: Draft) -> tuple[str, list[str]]:
    """Return the path of the only data set, and a line if its rows have to be brought there."""
    if each.local:
        return (f"{each.path.rstrip('/')}/{each.files[0]}" if each.files else each.path), _of_part(each)
    name = _names([each])[0]
    if each.revision and COMMIT.fullmatch(each.revision) and REPOSITORY.fullmatch(each.path):
        key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "rows"
        entry = {
            "repository": each.path,
            "revision": each.revision,
            "files": each.files or [FILES],
            "license": "unknown",
        }
        draft.key = each.key
        draft.set(f"fetch.data.{key}", entry)
        lines = [f"fetch.data.{key}.license: the file does not name it; correct it"]
        if not each.files:
            part = f", and only those of {_described(each)}" if each.subset or each.split else ""
            lines.append(f"fetch.data.{key}.files: the file names none; {FILES} is written: name those to read{part}")
        return f"data/hub/{key}", lines
    path = f"data/{name}" + (f"/{each.files[0]}" if each.files else "")
    return path, [
        f"prepare.rows.path: bring {_described(each)} to {path}, or name it in fetch.data with a commit of 40 digits"
    ]


def of_builder(files: list[str]) -> tuple[str, list[str]]:
    """Return the path and files of a set whose path denotes the type of its files, e.g. json."""
    if len(files) == 1:
        return files[0], []
    levels = zip(*(file.split("/")[:-1] for file in files), strict=False)
    folder = "/".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    return folder or ("/" if files[0].startswith("/") else "."), [file[len(folder) :].lstrip("/") for file in files]


def _of_part(each: DataSet) -> list[str]:
    """Return a line if the tool reads only part of a local data set."""
    whole = each.subset is None and (each.split in (None, "train") or "[" in str(each.split))
    if whole or DATA_FILE.search(each.path):
        return []
    return [f"{each.key}: {_described(each)} is read there; name the files of that part in prepare.rows"]


def _described(each: DataSet) -> str:
    parts = [
        f"the files {', '.join(each.files)} of" * bool(each.files),
        f"the split {each.split} of" * bool(each.split),
        f"the subset {each.subset} of" * bool(each.subset),
        each.path,
        f"at {each.revision}" * bool(each.revision),
    ]
    return " ".join(part for part in parts if part)


def _names(sets: list[DataSet]) -> list[str]:
    """Return a name for each data set: the last part of its path, or more of it if two are equal."""
    paths = [each.name or _without_query(each.path).rstrip("/") for each in sets]
    lasts = [_last(path) for path in paths]
    names: list[str] = []
    for path, last in zip(paths, lasts, strict=True):
        name = last
        if lasts.count(last) > 1:
            name = "-".join(part for part in Path(path).parts if part not in ("/", "..", "~")) or last
        stem, suffix = _stem(name)
        number = 1
        while name in names:
            number += 1
            name = f"{stem}-{number}{suffix}"
        names.append(re.sub(r"[{}\s]", "-", name))
    return names


def _last(path: str) -> str:
    """Return the last part of a path that can be a file name."""
    return last if (last := Path(path).name) not in ("", "..", "~") else "rows.json"


def _without_query(path: str) -> str:
    return path.partition("?")[0] if REMOTE.match(path) else path


def _stem(name: str) -> tuple[str, str]:
    match = DATA_FILE.search(name)
    return (name[: match.start()], name[match.start() :]) if match else (name, "")


def _folder(sets: list[DataSet], folder_there: Path | None) -> str | None:
    """Return the common directory of all data sets, which are local paths; None if there is none.

    An absolute directory must directly contain all data sets or be inside `folder_there`: a higher one may be / or a
    home directory, and all of it would be tracked.
    """
    paths = [Path(each.path) for each in sets]
    if len(set(paths)) < len(paths) or any(".." in path.parts for path in paths):
        return None
    for folder in paths[0].parents:
        if folder != Path() and all(folder in path.parents for path in paths):
            own = all(folder == path.parent for path in paths) and folder not in (Path("/"), Path("~"), Path.home())
            named = folder_there is not None and folder.is_relative_to(folder_there)
            relative = not folder.is_absolute() and folder.parts[0] != "~"
            return str(folder) if relative or own or named else None
    return None
