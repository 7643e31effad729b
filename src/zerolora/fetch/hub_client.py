"""The Hugging Face hub's client: its errors as one line for the user, and the download of a model's config.json."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerolora.errors import UserError, shown

ACCESS = "put a token that may read it into the environment variable HF_TOKEN"
NAME = re.compile(r"([\w.-]+/[\w.-]+|[\w.-]+)@([0-9a-f]{40})")


@contextmanager
def explained_errors(name: str, kind: str) -> Iterator[None]:
    """Convert the client's errors into UserError. name: the download. kind: model, data set or adapter."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined,unused-ignore]  # HTTPError is the HTTP library's
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

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
            message = f"{name}: no such {kind}, or a private one; correct `repository`, or {ACCESS}"
        elif isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            reason = f"{error.response.status_code}: {_line(error.server_message or 'no reason given')}"
            message = f"{name}: access is refused ({reason}); accept its terms on the hub if it has any, and {ACCESS}"
        else:
            reason = _line(str(error)) or type(error).__name__
            message = f"{name} cannot be downloaded: {reason}; check the network, then run it again"
        raise UserError(message) from None


def _line(text: str) -> str:
    """Return the first non-empty line of a text."""
    return next(iter(text.strip().splitlines()), "").rstrip(".")


def download_config(pinned: str) -> Path:
    """Return the path of config.json of NAME@REVISION in the client's cache, downloaded if needed.

    Raises UserError if `pinned` has another form, or the file cannot be downloaded.
    """
    match = NAME.fullmatch(pinned)
    if not match:
        raise UserError(f"--hub {shown(pinned)}: use NAME@REVISION, a repository and the 40 digits of a commit of it")
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    repository, revision = match.groups()
    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise UserError(f"--hub {shown(pinned)}: is not the name of a repository; copy it from the hub") from None
    if isinstance(cached := try_to_load_from_cache(repository, "config.json", revision=revision), str):
        return Path(cached)
    name = f"model {repository} at {revision}"
    with explained_errors(name, "model"):
        try:
            # Without a network this fails at once; the download would retry for half a minute.
            get_hf_file_metadata(hf_hub_url(repository, "config.json", revision=revision))
            return Path(hf_hub_download(repository, "config.json", revision=revision))
        except LocalEntryNotFoundError:  # there is no network
            raise
        except EntryNotFoundError:
            raise UserError(f"{name}: has no config.json; give the repository of a transformers model") from None
