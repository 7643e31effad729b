"""Stage fetch: download the pinned base model and record the hash of every file.

    zerolora stage fetch MODEL

Writes config, tokenizer, templates and licences (kilobytes, versioned) and `manifest.json` with the hash of every file.
The weights stay in the store (weight_store.py), linked into resources/weights/NAME, or in the user's own directory, and
are never versioned. If a stage needs them and they are missing, `zerolora weights` (restore.py) restores them.
"""

import shutil
from pathlib import Path
from typing import Any

from zerolora.config.compared import compared
from zerolora.config.settings import FetchDirectory, FetchSettings
from zerolora.fetch.model_sources import materialise
from zerolora.fetch.weight_store import digest
from zerolora.files import MANIFEST, staged_directory, write_json
from zerolora.log import LOGGER, result
from zerolora.model.dequantized import FROM, is_dequantized_on_load, origin, weight_headers
from zerolora.model.greedy import unused
from zerolora.model.manifest import CONVERTED, LOADED, count_parameters, is_weight, model_files
from zerolora.units import byte_size


def fetch(settings: FetchSettings, weights: Path, output: Path) -> None:
    """Download the model that `settings` pins, and write its small files and manifest to `output`.

    Raises UserError if it cannot be downloaded, does not match its pin, or needs Python code from its repository.
    """
    directory = materialise(settings, weights)
    paths = model_files(directory)
    files: dict[str, Any] = {path.name: {"sha256": digest(path), "bytes": path.stat().st_size} for path in paths}
    with staged_directory(output) as staged:
        for name in files:
            if not is_weight(name):
                shutil.copyfile(directory / name, staged / name)
        manifest = {
            "source": compared(settings),
            "license": settings.license,
            "parameters": count_parameters(directory),
            "files": files,
        }
        if isinstance(settings, FetchDirectory) and directory != Path(settings.path):
            manifest[CONVERTED] = True
        if (stored := origin(directory)) is not None:
            manifest[FROM] = stored
        if is_dequantized_on_load(directory):
            manifest[LOADED] = sum(file.nbytes for file in weight_headers(directory))
        write_json(staged / MANIFEST, manifest)
    if keys := unused(output):
        LOGGER.warning("%s: not used, since answers are greedy (docs/evaluation.md)", "; ".join(keys))
    size = sum(file["bytes"] for name, file in files.items() if is_weight(name))
    result(f"{count_parameters(directory):,} parameters, {byte_size(size)} of weights")
