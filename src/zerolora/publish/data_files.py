"""The files of a run's data set, with their origin and licence."""

from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from zerolora.config.schema import data_folders
from zerolora.files import MANIFEST
from zerolora.publish.finished import FinishedRun


class DataFile(NamedTuple):
    """A file of the data set."""

    source: str
    """Name of its source in the data set."""
    name: str
    """Its path in its origin; for a local file, relative to the data set's parent directory."""
    sha256: str
    origin: str | None = None
    """Repository and commit, or package and version; None for a local file."""
    licence: str | None = None
    repository: str | None = None
    """Its data set repository on the hub, if any."""
    address: str | None = None
    """Of a file of the hub (huggingface_hub's `hf://`) or of a package (a package URL); None for a local file."""


def data_files(run: FinishedRun) -> list[DataFile]:
    """Return the files of a run's data set."""
    manifest = run.read(run.data / MANIFEST)
    folders = [Path(folder) for folder in data_folders(run.config.fetch).values()]
    top, *others = map(Path, run.prepared.reads_rows)
    result = []
    for text, digest in manifest["read"].items():
        path = Path(text)
        selected = next((each.name for each in others if path.is_relative_to(each)), top.name)
        source = next((name for name in manifest["sources"] if path.is_relative_to(top / name)), selected)
        folder = next((folder for folder in folders if path.is_relative_to(folder)), None)
        if folder is None:
            shown = path.relative_to(top.parent) if path.is_relative_to(top.parent) else Path(path.name)
            result.append(DataFile(source, shown.as_posix(), digest))
            continue
        fetched = run.read(folder / MANIFEST)
        origin, name = fetched["source"], path.relative_to(folder).as_posix()
        repository = origin.get("repository")
        if repository:
            version, address = f"{repository}@{origin['revision']}", hub_address(f"datasets/{repository}", origin, name)
        else:
            version, address = f"{origin['package']}=={origin['version']}", package_address(origin, name)
        result.append(DataFile(source, name, digest, version, fetched["license"], repository, address))
    return result


def hub_address(repository: str, origin: dict[str, Any], name: str) -> str:
    """Return the address of a file at a commit of the hub, as its client writes it (hf_file_system.py)."""
    return f"hf://{repository}@{origin['revision']}/{quote(name)}"


def package_address(origin: dict[str, Any], name: str) -> str:
    """Return the address of a file in a release of a package: a package URL (purl-spec, types/pypi)."""
    return f"pkg:pypi/{origin['package']}@{origin['version']}#{quote(name)}"
