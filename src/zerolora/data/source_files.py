"""The sources of a data set: their files, their settings, and the form of their rows."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config.schema import Source
from zerolora.config.settings import PrepareSettings
from zerolora.data import sampled_rows
from zerolora.data.example import BadRow
from zerolora.data.formats import FORMS, detect, fitting, other_kind, parse, several
from zerolora.data.formats.leaves import Unread
from zerolora.data.formats.reading import Reading, Seen, reading_of
from zerolora.data.formats.selection import is_disjoint, selected
from zerolora.data.nested_rows import check_not_nested
from zerolora.data.published import check_not_pooled, sources_block
from zerolora.data.readers import all_files, check_not_linked, chunks, files_of, matching
from zerolora.errors import UserError
from zerolora.files import MANIFEST
from zerolora.log import LOGGER
from zerolora.model import foreign
from zerolora.model.manifest import check_intact
from zerolora.types import RowKind

HOW_READ = ("format", "columns", "roles", "ignore", "classes", "where", "better")
"""Settings of a source that default to the data set's."""
ROWS = 100  # of each file, to detect the form
SIZE = 1 << 16  # bytes of a chunk


class SourceFiles(NamedTuple):
    """A source: its name, its files, its config section with the defaults of HOW_READ filled in, and where it is."""

    name: str
    files: list[Path]
    settings: Source
    place: Path


def sources_of(settings: PrepareSettings, selections: Path = Path()) -> list[SourceFiles]:
    """Return the sources of a data set, with their files: those of its path, then those in the directory `selections`.

    Raises UserError if there are none, if two share a file, or if one would pool published splits or configs.
    """
    own = _in_path(settings, Path(settings.path)) if settings.path else []
    return [*own, *(_selected(settings, selections / name) for name in settings.selections)]


def _selected(settings: PrepareSettings, folder: Path) -> SourceFiles:
    """Return the source of a selection, all of whose rows are for training. Raises UserError if it is not as `select`
    wrote it, or if its rows hold something else than the data set's runs learn from."""
    check_intact(folder, "zerolora stage select")
    rows = foreign.manifest(folder / MANIFEST, "zerolora stage select", "rows")["rows"]
    if rows != settings.rows:
        raise UserError(f"{folder}: its rows are {rows}, but the runs of this data set learn from {settings.rows}")
    entry = settings.sources.get(folder.name, Source.model_construct())
    most = entry.at_most or (None if entry.rows else settings.at_most)
    read: dict[str, Any] = {"format": sampled_rows.FORMATS[settings.rows], "split": "train", "at_most": most}
    return SourceFiles(folder.name, [folder / sampled_rows.ROWS], entry.model_copy(update=read), folder)


def _in_path(settings: PrepareSettings, path: Path) -> list[SourceFiles]:
    entries = {name: entry for name, entry in settings.sources.items() if name not in settings.selections}
    if not entries:
        files = files_of(path)
        check_not_pooled(path, path, files, settings.split, named=path.is_file())
        own = Source(**{key: getattr(settings, key) for key in (*HOW_READ, "at_most")})
        return [SourceFiles(path.name, files, own, path)]
    if not path.is_dir():
        names = ", ".join(entries)
        raise UserError(f"{path}: is not a directory, so it cannot hold the sources {names}; set path to its directory")
    result = []
    owners: dict[Path, list[str]] = {}
    for name, entry in entries.items():
        inside = entry.path or name
        files = _files(path, inside)
        folder = path / inside if (path / inside).is_dir() else path
        check_not_pooled(path, folder, files, settings.split, entry.split, named=folder == path)
        for file in files:
            for other in owners.setdefault(file, []):
                if not is_disjoint(settings.sources[other].where, entry.where):
                    raise UserError(
                        f"{file}: belongs to two sources, {other} and {name}; name it in one only, or give both where "
                        "with different values of a column, as in where: {split: [train]}"
                    )
            owners[file].append(name)
        filled = {key: getattr(entry, key) or getattr(settings, key) for key in HOW_READ}
        filled["at_most"] = entry.at_most or (None if entry.rows else settings.at_most)
        result.append(SourceFiles(name, files, entry.model_copy(update=filled), path / name))
    return result


def left_out(settings: PrepareSettings, sources: list[SourceFiles]) -> list[Path]:
    """Return the data files below the data set's path that no entry of `sources` reads."""
    if not settings.path or {*settings.sources} <= {*settings.selections}:
        return []
    used = {file for source in sources for file in source.files}
    return [file for file in all_files(Path(settings.path)) if file not in used]


def _files(path: Path, name: str) -> list[Path]:
    """Return the files of an entry of `sources`: a file, a folder, or a pattern such as data/train-*.parquet."""
    for folder in [path / name, *(path / name).parents]:
        if folder == path:
            break
        if folder.is_dir():
            check_not_linked(folder)
    if "*" not in name or (path / name).exists():
        return files_of(path / name)
    return matching(path, name)


def form_of(source: SourceFiles, root: Path, rows: RowKind = "texts") -> tuple[str, str]:
    """Return the form of a source's rows ("" without rows), and the first row of that form.

    The settings name the form (the first row is then ""), or the columns of the first rows of each file decide it.
    root: the data set's path. rows: what they must hold. Raises UserError if rows or files have different forms, or
    several, if no row has a form, or if the form of the settings holds something else.
    """
    for path in source.files:
        check_not_nested(root, path, source.settings.columns)
    if source.settings.format not in (None, "auto"):
        named = str(source.settings.format)
        if FORMS[named].rows != rows:
            raise UserError(f"prepare: {other_kind(named, rows, f'format of {source.name} is {named}')}")
        return named, ""
    forms: dict[Path, tuple[str, str]] = {}
    errors = []
    for path in source.files:
        try:
            if found := _form_of_file(path, source.settings, rows):
                forms[path] = found
        except BadRow as error:
            errors.append(str(error))
    if errors:
        raise UserError(errors[0])
    if not forms:
        return "", ""  # no row can be read, so the form is not needed
    first: dict[str, str] = {}
    for form, place in forms.values():
        first.setdefault(form, place)
    if len(first) > 1:
        kinds = [f"{place} is of the form {form}" for form, place in first.items()]
        settings = {path: f"format: {forms[path][0]}" if path in forms else "" for path in source.files}
        raise UserError(f"{source.name}: {kinds[0]}, but {kinds[1]}; set {sources_block(root, settings)}")
    ((form, place),) = first.items()
    LOGGER.info(f"{source.name}: its rows are read as {form}, by the columns of {place}")
    return form, place


def _form_of_file(path: Path, settings: Source, kind_of_rows: RowKind) -> tuple[str, str] | None:
    """Return the form of a file's rows and the first row of it, None if no row can be read. Raises BadRow, with its
    place, if rows have no form, several or different ones."""
    rows: list[tuple[str, dict[str, Any], Reading, list[str]]] = []
    bad: list[tuple[str, dict[str, Any], Reading, list[str]]] = []
    errors = []
    for place, value, reading in _first_rows(path, settings):
        try:
            fits = fitting(value, reading, kind_of_rows)
        except BadRow as error:
            errors.append(f"{place}: {error}")
            continue
        valid = len(fits) > 1 or _columns_read(value, fits[0], reading)
        (rows if valid else bad).append((place, value, reading, fits))
    rows = rows or bad
    if not rows:
        if errors:
            raise BadRow(errors[0])
        return None
    first: dict[str, str] = {}
    for place, *_, forms in rows:
        for form in forms:
            first.setdefault(form, place)
    if len(first) == 1:
        ((form, place),) = first.items()
        return form, place
    several_of = next((row for row in rows if len(row[3]) > 1), None)
    if several_of is None:
        (form, place), (other, elsewhere), *_ = first.items()
        raise BadRow(
            f"{elsewhere}: is of the form {other}, but {place} of the form {form}; put rows of one form into files of "
            "their own, and name these in sources, each with its format"
        )
    place, value, reading, forms = several_of
    richest = max(forms, key=lambda form: _columns_read(value, form, reading))
    unread = Unread()
    for where, each, how, fits in rows:
        if richest not in fits:
            raise BadRow(f"{place}: {several(value, reading, forms)}; {where} fits {' and '.join(fits)} alone")
        with suppress(BadRow):
            parse(each, richest, how, unread=unread, place=where)
    if undecided := unread.end().undecided:
        raise BadRow(f"{place}: {several(value, reading, [richest, *forms], [*undecided])}")
    return richest, place


def _columns_read(value: dict[str, Any], form: str, reading: Reading) -> int:
    """Return the number of columns that a form reads of a row, 0 if it cannot."""
    seen = Seen()
    try:
        parse(value, form, reading, seen)
    except BadRow:
        return 0
    return sum(1 for _, where, _ in seen if where == "column")


def _first_rows(path: Path, settings: Source) -> Iterator[tuple[str, dict[str, Any], Reading]]:
    """Yield the place, the value and the reading of the first rows of a file that can be read and that `where`
    keeps."""
    number = 0
    for chunk in chunks(path, ROWS, SIZE):
        reading = reading_of(settings, chunk.kind)
        for place, value in chunk.records():
            if number == ROWS:
                return
            if not isinstance(value, BadRow) and _is_kept(value, reading):
                number += 1
                yield place, value, reading


def _is_kept(value: dict[str, Any], reading: Reading) -> bool:
    try:
        return selected(value, reading)
    except BadRow:
        return False


def other_form(value: Any, form: str, reading: Reading, rows: RowKind = "texts") -> str:
    """Return the form in which a row that is not of `form` is valid, "" if there is none."""
    try:
        result = detect(value, reading, rows)
        if result != form:
            parse(value, result, reading)
            return result
    except BadRow:
        pass
    return ""
