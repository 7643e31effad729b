"""Stage fetch_data: download the pinned files of a data set or an adapter from the Hugging Face hub.

    zerolora fetch-data --settings JSON --output data/hub/NAME

The output holds the unchanged files under their paths in the repository, and `manifest.json` with the hash of each.
Only data files are downloaded, no code, pickles or archives, and nothing of the repository is executed.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.config.settings import FetchAdapterSettings, FetchDataSettings
from zerolora.data.kinds import DATA_FILE, ENDINGS
from zerolora.errors import UserError
from zerolora.fetch.hub_errors import explained_errors
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.log import result
from zerolora.methods.peft_format import ADAPTER, CONFIG
from zerolora.units import byte_size, counted

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

LISTED = 10
TOKENS = "tokens.json"
"""Beside an adapter that zerolora trained with added tokens (model/added_tokens.py); others have none."""


@dataclass(frozen=True)
class Wanted:
    """Files of a repository at a commit."""

    what: str
    repository_type: str
    """dataset or model."""
    repository: str
    revision: str
    license: str
    files: list[str]
    """Patterns; `*` matches `/` too."""
    optional: tuple[str, ...] = ()
    """Paths that are downloaded if they are there."""


def fetch_data(settings: FetchDataSettings, output: Path) -> None:
    """Download the data files that `settings` pins and write them and their manifest to `output` atomically.

    Raises UserError if a pattern matches no file or one that is not a data file, if the repository cannot be reached,
    or if a file's size or sha256 is not what the hub lists.
    """
    _fetch(Wanted("data set", "dataset", **settings.model_dump()), output)


def fetch_adapter(settings: FetchAdapterSettings, output: Path) -> None:
    """Download an adapter's config, its weights and the list of the tokens that it adds, if any, likewise."""
    _fetch(Wanted("adapter", "model", **settings.model_dump(), files=[CONFIG, ADAPTER], optional=(TOKENS,)), output)


def _fetch(wanted: Wanted, output: Path) -> None:
    from huggingface_hub import snapshot_download

    with explained_errors(_named(wanted), wanted.what):
        listed = _list(wanted)
    there = [file.path for file in listed if file.path in wanted.optional]
    wanted = replace(wanted, files=[*wanted.files, *there])
    chosen = _choose(wanted, listed)
    with staged_directory(output) as staged:
        with explained_errors(_named(wanted), wanted.what):
            snapshot_download(
                wanted.repository,
                repo_type=wanted.repository_type,
                revision=wanted.revision,
                allow_patterns=wanted.files,
                local_dir=staged,
            )
        # The client's own records of this download, which contain dates.
        shutil.rmtree(staged / ".cache")
        files = describe(staged)
        for file in chosen:
            _check(wanted, file, files[file.path])
        write_json(
            staged / MANIFEST,
            {
                "source": {"repository": wanted.repository, "revision": wanted.revision},
                "license": wanted.license,
                "files": files,
            },
        )
    result(f"{counted(len(files), 'file')}, {byte_size(sum(file['bytes'] for file in files.values()))}")


def _list(wanted: Wanted) -> "list[RepoFile]":
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi().list_repo_tree(
        wanted.repository, repo_type=wanted.repository_type, revision=wanted.revision, recursive=True
    )
    return sorted((entry for entry in entries if isinstance(entry, RepoFile)), key=lambda file: file.path)


def _choose(wanted: Wanted, listed: "list[RepoFile]") -> "list[RepoFile]":
    """Return the files that the patterns match, in order of their paths."""
    from huggingface_hub.utils._paths import filter_repo_objects

    chosen = {}
    for pattern in wanted.files:
        # The same function by which the hub's client selects files.
        matching = list(filter_repo_objects(listed, allow_patterns=pattern, key=lambda file: file.path))
        if not matching:
            there = [file.path for file in sorted(listed, key=lambda file: _refusal(file.path) is not None)]
            raise UserError(
                f"{_named(wanted)}: `files`: nothing matches {pattern!r}; write a pattern for one of: {_some(there)}"
            )
        refused = [f"{file.path} ({_refusal(file.path)})" for file in matching if _refusal(file.path)]
        if refused:
            raise UserError(
                f"{_named(wanted)}: `files`: {pattern!r} matches what is not fetched: {_some(refused)}; "
                f"write patterns that match nothing but {ENDINGS}"
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


def _check(wanted: Wanted, file: "RepoFile", downloaded: dict[str, Any]) -> None:
    """Raise UserError if a downloaded file's size, or sha256 where the hub lists one, is not what the hub lists."""
    expected = {"bytes": file.size} | ({"sha256": file.lfs.sha256} if file.lfs else {})
    for key, value in expected.items():
        if downloaded[key] != value:
            raise UserError(
                f"{_named(wanted)}: {file.path} came with {key} {downloaded[key]}, where the hub lists {value}; "
                "run it again, and if it stays so, ask the owner of the repository"
            )


def _named(wanted: Wanted) -> str:
    return f"{wanted.what} {wanted.repository} at {wanted.revision}"


def _some(names: list[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more if names else "none, since it contains no file"
