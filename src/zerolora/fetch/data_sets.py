"""Stage fetch_data: download the pinned data files of a Hugging Face dataset repository.

    zerolora fetch-data --settings JSON --output data/hub/NAME

The output holds the unchanged files under their paths in the repository, and `manifest.json` with the hash of each.
Only data files are downloaded, no code, pickles or archives, and nothing of the repository is executed.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.config.settings import FetchDataSettings
from zerolora.data.kinds import DATA_FILE, ENDINGS
from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.log import result
from zerolora.units import byte_size

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

LISTED = 10
ACCESS = "put a token that may read it into the environment variable HF_TOKEN"


def fetch_data(settings: FetchDataSettings, output: Path) -> None:
    """Download the files that `settings` pins and write them and their manifest to `output` atomically.

    In the patterns of `files`, `*` matches `/` too. Raises UserError if a pattern matches no file or one that is not a
    data file, if the repository cannot be reached, or if a file's size or sha256 is not what the hub lists.
    """
    from huggingface_hub import snapshot_download

    with _explained(settings):
        listed = _list(settings)
    chosen = _choose(settings, listed)
    with staged_directory(output) as staged:
        with _explained(settings):
            snapshot_download(
                settings.repository,
                repo_type="dataset",
                revision=settings.revision,
                allow_patterns=settings.files,
                local_dir=staged,
            )
        # The client's own records of this download, which contain dates.
        shutil.rmtree(staged / ".cache")
        files = describe(staged)
        for file in chosen:
            _check(settings, file, files[file.path])
        write_json(
            staged / MANIFEST,
            {
                "source": {"repository": settings.repository, "revision": settings.revision},
                "license": settings.license,
                "files": files,
            },
        )
    result(f"{len(files)} files, {byte_size(sum(file['bytes'] for file in files.values()))}")


def _list(settings: FetchDataSettings) -> "list[RepoFile]":
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi().list_repo_tree(
        settings.repository, repo_type="dataset", revision=settings.revision, recursive=True
    )
    return sorted((entry for entry in entries if isinstance(entry, RepoFile)), key=lambda file: file.path)


def _choose(settings: FetchDataSettings, listed: "list[RepoFile]") -> "list[RepoFile]":
    """Return the files that the patterns match, in order of their paths."""
    from huggingface_hub.utils._paths import filter_repo_objects

    chosen = {}
    for pattern in settings.files:
        # The same function by which the hub's client selects files.
        matching = list(filter_repo_objects(listed, allow_patterns=pattern, key=lambda file: file.path))
        if not matching:
            there = [file.path for file in sorted(listed, key=lambda file: _refusal(file.path) is not None)]
            raise UserError(
                f"{_named(settings)}: `files`: nothing matches {pattern!r}; write a pattern for one of: {_some(there)}"
            )
        refused = [f"{file.path} ({_refusal(file.path)})" for file in matching if _refusal(file.path)]
        if refused:
            raise UserError(
                f"{_named(settings)}: `files`: {pattern!r} matches what is not fetched: {_some(refused)}; "
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
    if not DATA_FILE.fullmatch(name):
        return "not a data file; code, pickles and archives are never downloaded"
    return None


def _check(settings: FetchDataSettings, file: "RepoFile", downloaded: dict[str, Any]) -> None:
    """Raise UserError if a downloaded file's size, or sha256 where the hub lists one, is not what the hub lists."""
    expected = {"bytes": file.size} | ({"sha256": file.lfs.sha256} if file.lfs else {})
    for key, value in expected.items():
        if downloaded[key] != value:
            raise UserError(
                f"{_named(settings)}: {file.path} came with {key} {downloaded[key]}, where the hub lists {value}; "
                "run it again, and if it stays so, ask the owner of the repository"
            )


@contextmanager
def _explained(settings: FetchDataSettings) -> Iterator[None]:
    """Convert the errors of the hub's client into UserError."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined,unused-ignore]  # HTTPError is the HTTP library's
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = _named(settings)
    try:
        yield
    # A broken connection is an HTTPError, not an OSError; the Xet client raises RuntimeError.
    except (HTTPError, OSError, ValueError, RuntimeError) as raised:
        # If the hub fails, the client falls back to local files and reports that there is none.
        error = raised.__cause__ if isinstance(raised, LocalEntryNotFoundError) and raised.__cause__ else raised
        if isinstance(error, OfflineModeIsEnabled):
            message = f"{name} must be downloaded, and HF_HUB_OFFLINE is set; unset it (and TRANSFORMERS_OFFLINE)"
        elif isinstance(error, RevisionNotFoundError):
            message = f"{name}: the repository has no such commit; copy `revision` from its history on the hub"
        elif isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
            message = f"{name}: no such data set, or a private one; correct `repository`, or {ACCESS}"
        elif isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            reason = f"{error.response.status_code}: {_line(error.server_message or 'no reason given')}"
            message = f"{name}: access is refused ({reason}); accept its terms on the hub if it has any, and {ACCESS}"
        else:
            reason = _line(str(error)) or type(error).__name__
            message = f"{name} cannot be downloaded: {reason}; check the network, then run it again"
        raise UserError(message) from None


def _named(settings: FetchDataSettings) -> str:
    return f"data set {settings.repository} at {settings.revision}"


def _line(text: str) -> str:
    """Return the first non-empty line of a text."""
    return next(iter(text.strip().splitlines()), "").rstrip(".")


def _some(names: list[str]) -> str:
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more if names else "none, since it holds no file"
