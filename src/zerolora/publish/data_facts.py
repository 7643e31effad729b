"""What a run was trained on: the files of each source with their hashes, and what the config says of their origin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.config.schema import data_folders
from zerolora.files import MANIFEST
from zerolora.publish.finished import FinishedRun


@dataclass(frozen=True)
class DataFile:
    """A file that rows were read from."""

    source: str
    """The source of the data set that it belongs to."""
    name: str
    """Its path in its origin; of a file of this machine, the path below the data set's, without where that lies."""
    sha256: str
    origin: str | None
    """Repository and commit, or package and version; None for a file of the user's own."""
    licence: str | None
    """None if nobody said."""
    repository: str | None
    """The data set repository of the hub, if it is from one."""


@dataclass(frozen=True)
class DataSource:
    """A source of training rows."""

    name: str
    rows: int
    tokens: int
    supervised_tokens: int
    share: float
    """Of the supervised training tokens."""


def data_files(run: FinishedRun) -> list[DataFile]:
    """Return the files that the data set of a run was read from."""
    manifest = run.read(run.data / MANIFEST)
    top = Path(run.prepared.path)
    fetched = {Path(folder): run.read(Path(folder) / MANIFEST) for folder in _folders(run, list(manifest["read"]))}
    found = []
    for text, digest in manifest["read"].items():
        path = Path(text)
        source = next((name for name in manifest["sources"] if path.is_relative_to(top / name)), top.name)
        folder = next((folder for folder in fetched if path.is_relative_to(folder)), None)
        if folder is None:
            name = path.relative_to(top.parent) if path.is_relative_to(top.parent) else Path(path.name)
            found.append(DataFile(source, name.as_posix(), digest, None, None, None))
            continue
        origin, licence = fetched[folder]["source"], fetched[folder]["license"]
        where = f"{origin['repository']}@{origin['revision']}" if "repository" in origin else _package(origin)
        name = path.relative_to(folder)
        found.append(DataFile(source, name.as_posix(), digest, where, licence, origin.get("repository")))
    return found


def data_sources(run: FinishedRun) -> list[DataSource]:
    """Return the sources of the training rows of a run, with their shares."""
    stats = run.read(run.data / "stats.json")
    if "sources" in stats:
        return [_source(name, entry, entry["train_supervised_share"]) for name, entry in stats["sources"].items()]
    (name,) = run.read(run.data / MANIFEST)["sources"]
    return [_source(name, stats, 1.0)]


def _source(name: str, counts: dict[str, Any], share: float) -> DataSource:
    return DataSource(name, counts["train_rows"], counts["train_tokens"], counts["train_supervised_tokens"], share)


def _folders(run: FinishedRun, paths: list[str]) -> list[str]:
    folders = data_folders(run.config.fetch).values()
    return [folder for folder in folders if any(Path(path).is_relative_to(folder) for path in paths)]


def _package(origin: dict[str, Any]) -> str:
    return f"{origin['package']}=={origin['version']}"
