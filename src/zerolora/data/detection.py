"""Decides the form of a source's rows, from the first rows of each of its files."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config.schema import Source
from zerolora.data.example import BadRow
from zerolora.data.formats import detect, parse
from zerolora.data.formats.reading import Reading, reading_of
from zerolora.data.readers import chunks
from zerolora.data.source_files import SourceFiles
from zerolora.data.sources_block import block
from zerolora.errors import UserError, wording
from zerolora.log import LOGGER

ROWS = 100  # of each file
SIZE = 1 << 16  # bytes of a chunk


class Detected(NamedTuple):
    """The form of a source's rows ("" if there are none), and the place of the first row that has it ("" if the config
    names the form)."""

    form: str
    place: str


class _Sample(NamedTuple):
    """The forms of a file's first rows: how many have each, the first of each, and the first that has none."""

    rows: Counter[str]
    places: dict[str, str]
    error: str


def form_of(source: SourceFiles, root: Path) -> Detected:
    """Return the form of a source's rows: the one its settings name, or that of most of the first rows of its files.

    root: the data set's path. Raises UserError if files have different forms, with the `sources` to write, or if no row
    has a form.
    """
    if source.settings.format not in (None, "auto"):
        return Detected(str(source.settings.format), "")
    samples = {path: _sample(path, source.settings) for path in source.files}
    forms = {path: sample.rows.most_common(1)[0][0] for path, sample in samples.items() if sample.rows}
    if not forms:
        if errors := [sample.error for sample in samples.values() if sample.error]:
            raise UserError(errors[0])
        return Detected("", "")  # nothing can be read, so the form is not needed
    if len(set(forms.values())) > 1:
        raise UserError(_mixed(source, root, samples, forms))
    first, form = next(iter(forms.items()))
    place = samples[first].places[form]
    alike = sum(sample.rows[form] for sample in samples.values())
    LOGGER.info(
        f"{source.name}: its rows are read as {form}, the form of {place} and of {alike:,} of the "
        f"{sum(sample.rows.total() for sample in samples.values()):,} rows that were looked at"
    )
    return Detected(form, place)


def _sample(path: Path, settings: Source) -> _Sample:
    sample, error = _Sample(Counter(), {}, ""), ""
    records = ((chunk.kind, *record) for chunk in chunks(path, ROWS, SIZE) for record in chunk.records())
    for number, (kind, index, value) in enumerate(records):
        if number >= ROWS and (sample.rows or error):
            break
        if isinstance(value, BadRow):
            continue
        try:
            form = detect(value, reading_of(settings, kind))
        except BadRow as bad:
            error = error or f"{index}: {bad}"
            continue
        sample.rows[form] += 1
        sample.places.setdefault(form, index)
    return sample._replace(error=error)


def _mixed(source: SourceFiles, root: Path, samples: dict[Path, _Sample], forms: dict[Path, str]) -> str:
    first: dict[str, Path] = {}
    for path, form in forms.items():
        first.setdefault(form, path)
    kinds = [wording(f"{samples[path].places[form]} is of the form {form}") for form, path in first.items()]
    settings = {path: f"format: {forms[path]}" if path in forms else "" for path in source.files}
    return wording(f"{source.name}: {kinds[0]}, but {kinds[1]}; write {block(root, settings)}")


def other_form(value: Any, form: str, reading: Reading) -> str:
    """Return the other form of which a row is a good one, "" if there is none. For rows that are none of `form`."""
    try:
        result = detect(value, reading)
        if result != form:
            parse(value, result, reading)
            return result
    except BadRow:
        pass
    return ""
