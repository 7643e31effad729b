"""The sources of a data set: their files, their settings, and the form of their rows."""

from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config.schema import Source
from zerolora.config.settings import PrepareSettings
from zerolora.data.example import BadRow
from zerolora.data.formats import FORMS, detect, other_kind, parse
from zerolora.data.formats.reading import Reading, reading_of
from zerolora.data.nested_rows import check_not_nested
from zerolora.data.published import check_not_pooled, sources_block
from zerolora.data.readers import check_not_linked, chunks, files_of, matching
from zerolora.errors import UserError, wording
from zerolora.log import LOGGER
from zerolora.types import RowKind

HOW_READ = ("format", "columns", "roles", "ignore")
"""Settings of a source that default to the data set's."""
ROWS = 100  # of each file, to detect the form
SIZE = 1 << 16  # bytes of a chunk


class SourceFiles(NamedTuple):
    """A source: its name, its files, and its config section with the defaults of HOW_READ filled in."""

    name: str
    files: list[Path]
    settings: Source


def sources_of(settings: PrepareSettings) -> list[SourceFiles]:
    """Return the sources of a data set, with their files.

    Raises UserError if there are none, if two share a file, or if one would pool published splits or configs.
    """
    path = Path(settings.path)
    if not settings.sources:
        files = files_of(path)
        check_not_pooled(path, path, files, settings.split, named=path.is_file())
        own = Source(**{key: getattr(settings, key) for key in (*HOW_READ, "at_most")})
        return [SourceFiles(path.name, files, own)]
    if not path.is_dir():
        raise UserError(f"{path}: is not a directory, so it cannot hold the sources {', '.join(settings.sources)}")
    result = []
    owners: dict[Path, str] = {}
    for name, entry in settings.sources.items():
        files = _files(path, name)
        folder = path / name if (path / name).is_dir() else path
        check_not_pooled(path, folder, files, settings.split, entry.split, named=folder == path)
        for file in files:
            if file in owners:
                raise UserError(f"{file}: belongs to two sources, {owners[file]} and {name}; name it in one only")
            owners[file] = name
        filled = {key: getattr(entry, key) or getattr(settings, key) for key in HOW_READ}
        filled["at_most"] = entry.at_most or (None if entry.rows else settings.at_most)
        result.append(SourceFiles(name, files, entry.model_copy(update=filled)))
    return result


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

    The settings name the form (the first row is then ""), or it is the most common one among the first rows of the
    files. root: the data set's path. rows: what they must hold. Raises UserError if files have different forms, with
    the `sources` to write, if no row has a form, or if the form of the settings holds something else.
    """
    for path in source.files:
        check_not_nested(root, path, source.settings.columns)
    if source.settings.format not in (None, "auto"):
        named = str(source.settings.format)
        if FORMS[named].rows != rows:
            raise UserError(f"prepare: {other_kind(named, rows, f'format of {source.name} is {named}')}")
        return named, ""
    samples, errors = {}, []
    for path in source.files:
        samples[path], error = _sample(path, source.settings, rows)
        errors += [error] * bool(error)
    forms = {path: max(rows, key=lambda form: len(rows[form])) for path, rows in samples.items() if rows}
    if not forms:
        if errors:
            raise UserError(errors[0])
        return "", ""  # no row can be read, so the form is not needed
    first: dict[str, str] = {}
    for path, form in forms.items():
        first.setdefault(form, samples[path][form][0])
    if len(first) > 1:
        kinds = [wording(f"{place} is of the form {form}") for form, place in first.items()]
        settings = {path: f"format: {forms[path]}" if path in forms else "" for path in source.files}
        raise UserError(f"{source.name}: {kinds[0]}, but {kinds[1]}; write {sources_block(root, settings)}")
    ((form, place),) = first.items()
    alike = sum(len(rows.get(form, ())) for rows in samples.values())
    total = sum(len(places) for rows in samples.values() for places in rows.values())
    LOGGER.info(
        f"{source.name}: its rows are read as {form}, the form of {place} and of {alike:,} of the {total:,} rows that "
        "were looked at"
    )
    return form, place


def _sample(path: Path, settings: Source, kind_of_rows: RowKind) -> tuple[dict[str, list[str]], str]:
    """Return the first rows of a file by form, and the first error."""
    rows: dict[str, list[str]] = {}
    error = ""
    records = ((chunk.kind, *record) for chunk in chunks(path, ROWS, SIZE) for record in chunk.records())
    for number, (kind, place, value) in enumerate(records):
        if number >= ROWS and (rows or error):
            break
        if isinstance(value, BadRow):
            continue
        try:
            rows.setdefault(detect(value, reading_of(settings, kind), kind_of_rows), []).append(place)
        except BadRow as bad:
            error = error or f"{place}: {bad}"
    return rows, error


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
