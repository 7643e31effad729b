"""Stage fetch_data: download the pinned files of a data set or an adapter from the Hugging Face hub.

    zerolora stage fetch_data SOURCE

Writes the unchanged files under their paths in the repository, and `manifest.json` with the hash of each. Only data
files are downloaded, no code, pickles or archives, and nothing of the repository is executed.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.config.settings import FetchAdapterSettings, FetchDataSettings
from zerolora.data import DATA_FILE, ENDINGS
from zerolora.errors import UserError
from zerolora.fetch.hub_client import explained_errors
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.log import result
from zerolora.methods.peft_format import ADAPTER, CONFIG
from zerolora.units import byte_size, counted

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

LISTED = 10
TOKENS = "tokens.json"
"""Beside an adapter that zerolora trained with added tokens (model/added_tokens.py)."""


def fetch_data(settings: FetchDataSettings, output: Path) -> None:
    """Download the data files that `settings` pins, and write them and their manifest to `output` atomically.

    Raises UserError if a pattern matches no file or one that is not a data file, if the repository cannot be reached,
    or if a file's size or sha256 differs from the hub's list.
    """
    _fetch("data set", settings, settings.files, output)


def fetch_adapter(settings: FetchAdapterSettings, output: Path) -> None:
    """Download an adapter's config, its weights and its list of added tokens, if any, likewise."""
    _fetch("adapter", settings, [CONFIG, ADAPTER], output, optional=(TOKENS,))


def _fetch(
    kind: str,
    settings: FetchDataSettings | FetchAdapterSettings,
    patterns: list[str],
    output: Path,
    optional: tuple[str, ...] = (),
) -> None:
    """Download the files that match `patterns`, of which `*` matches `/` too, and the `optional` ones if they exist."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.hf_api import RepoFile

    name = f"{kind} {settings.repository} at {settings.revision}"
    repository_type = "dataset" if kind == "data set" else "model"
    with explained_errors(name, kind):
        entries = HfApi().list_repo_tree(
            settings.repository, repo_type=repository_type, revision=settings.revision, recursive=True
        )
        listed = sorted((entry for entry in entries if isinstance(entry, RepoFile)), key=lambda file: file.path)
    patterns = [*patterns, *(file.path for file in listed if file.path in optional)]
    chosen = _choose(name, patterns, listed)
    with staged_directory(output) as staged:
        with explained_errors(name, kind):
            snapshot_download(
                settings.repository,
                repo_type=repository_type,
                revision=settings.revision,
                allow_patterns=patterns,
                local_dir=staged,
            )
        # The client's records of this download contain dates.
        shutil.rmtree(staged / ".cache")
        files = describe(staged)
        for file in chosen:
            _check(name, file, files[file.path])
        source = {"repository": settings.repository, "revision": settings.revision}
        write_json(staged / MANIFEST, {"source": source, "license": settings.license, "files": files})
    result(f"{counted(len(files), 'file')}, {byte_size(sum(file['bytes'] for file in files.values()))}")


def _choose(name: str, patterns: list[str], listed: "list[RepoFile]") -> "list[RepoFile]":
    """Return the files that match the patterns, sorted by path."""
    from huggingface_hub.utils._paths import filter_repo_objects

    chosen = {}
    for pattern in patterns:
        # The function with which the hub's client selects files.
        matching = list(filter_repo_objects(listed, allow_patterns=pattern, key=lambda file: file.path))
        if not matching:
            paths = [file.path for file in sorted(listed, key=lambda file: _refusal(file.path) is not None)]
            raise UserError(f"{name}: `files`: nothing matches {pattern!r}; give a pattern for one of: {_some(paths)}")
        refused = [f"{file.path} ({_refusal(file.path)})" for file in matching if _refusal(file.path)]
        if refused:
            raise UserError(
                f"{name}: `files`: {pattern!r} matches what is not fetched: {_some(refused)}; "
                f"give patterns that match nothing but {ENDINGS}"
            )
        chosen.update({file.path: file for file in matching})
    return [chosen[path] for path in sorted(chosen)]


def _refusal(path: str) -> str | None:
    """Return why a file is not downloaded, None if it is."""
    *_, name = parts = path.split("/")
    if any(part.startswith(".") for part in parts):
        return "hidden, so it would not be read"
    if name.lower() == MANIFEST:
        return f"{MANIFEST} is the name of the list that this stage writes"
    if not DATA_FILE.fullmatch(name) and path != ADAPTER:
        return "not a data file; code, pickles and archives are never downloaded"
    return None


def _check(name: str, file: "RepoFile", downloaded: dict[str, Any]) -> None:
    """Raise UserError if a downloaded file's size or sha256 differs from the hub's list, which may lack the sha256."""
    expected = {"bytes": file.size} | ({"sha256": file.lfs.sha256} if file.lfs else {})
    for key, value in expected.items():
        if downloaded[key] != value:
            raise UserError(
                f"{name}: {file.path} has {key} {downloaded[key]}, but the hub lists {value}; "
                "run it again, or report it to the owner of the repository"
            )


def _some(names: list[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more if names else "none, since it contains no file"
