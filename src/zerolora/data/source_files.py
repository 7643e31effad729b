"""The sources of a data set, as files: which belong to which, and what their settings are."""

from pathlib import Path
from typing import NamedTuple

from zerolora.config.schema import Source
from zerolora.config.settings import PrepareSettings
from zerolora.data.published import check_not_pooled
from zerolora.data.readers import check_not_linked, files_of, matching
from zerolora.errors import UserError

HOW_READ = ("format", "columns", "roles", "ignore")
"""The keys of a source that are the data set's unless it has its own."""


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
        return [SourceFiles(path.name, files, Source(**{key: getattr(settings, key) for key in HOW_READ}))]
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
        own = {key: getattr(entry, key) or getattr(settings, key) for key in HOW_READ}
        result.append(SourceFiles(name, files, entry.model_copy(update=own)))
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
