"""The errors of the Hugging Face hub's client, each as one line for the user."""

from collections.abc import Iterator
from contextlib import contextmanager

from zerolora.errors import UserError

ACCESS = "put a token that may read it into the environment variable HF_TOKEN"


@contextmanager
def explained_errors(name: str, kind: str) -> Iterator[None]:
    """Convert the errors of the hub's client into UserError; `name` is what is downloaded, `kind` what it is."""
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
