"""Push to a repository of the Hugging Face hub in one commit, which also deletes stale files of earlier pushes."""

import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError
from zerolora.files import MANIFEST
from zerolora.publish.finished import PUSH, PushedModel
from zerolora.train.launch.stop_signals import Stopped

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LOGIN = "run `hf auth login`, or set HF_TOKEN to a token with write access"
LOADED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", "adapter_config.json", ".index.json")
"""Suffixes of files that a library would load instead of, or in addition to, the pushed ones."""


@dataclass(frozen=True)
class HubTarget:
    """The destination of a push."""

    repository: str
    branch: str | None
    """None for main."""
    private: bool
    """Create the repository as private, or require an existing one to be."""


def check_repository(name: str) -> None:
    """Raise UserError unless `name` is a valid name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(
            f"--to {name}: is not the name of a repository; use OWNER/NAME, or ./{name} for a directory"
        ) from None


def push_to_hub(product: PushedModel, texts: dict[str, str], target: HubTarget, message: str) -> tuple[str, str, bool]:
    """Commit the product's files and `texts`, by name. Return the commit, its address, and whether it is new.

    The same commit deletes stale files of earlier pushes. Raises UserError if the hub refuses the commit or cannot be
    reached, or if the repository has other files that would be loaded instead.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # errors are reported below
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _explained(target):
        if (token := get_token()) is None:
            raise UserError(f"--to {target.repository}: not logged in to the hub; {LOGIN}")
        api = HfApi(token=token)
        head = _head(api, target)
        old = _files_of_earlier_push(api, target, head, {*product.files, *texts})
        operations: list[Any] = [
            CommitOperationAdd(name, texts[name].encode() if name in texts else product.path(name))
            for name in sorted({*product.files, *texts})
        ]
        operations += [CommitOperationDelete(name) for name in sorted(old)]
        # Not upload_folder: with Xet it makes several commits, so an interrupted push could leave half a model.
        commit = api.create_commit(
            target.repository, operations, commit_message=message, revision=target.branch, parent_commit=head
        )
    return commit.oid, commit.commit_url, commit.oid != head


def _head(api: "HfApi", target: HubTarget) -> str:
    """Return the last commit of the branch. A missing repository is created, unless a branch is named."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(target.repository, revision=target.branch)
    except RepositoryNotFoundError as error:
        if target.branch or error.response.status_code != 404:
            raise
        api.create_repo(target.repository, private=target.private or None)
        info = api.model_info(target.repository)
    if target.private and not info.private:
        raise UserError(
            f"--private: {target.repository} already exists and is public; make it private in its settings, or name "
            "another repository"
        )
    assert info.sha
    return info.sha


def _files_of_earlier_push(api: "HfApi", target: HubTarget, head: str, pushed: set[str]) -> set[str]:
    """Return the files of earlier pushes that this one does not have.

    Raises UserError for other files that would be loaded instead of, or in addition to, the pushed ones.
    """
    existing = set(api.list_repo_files(target.repository, revision=head))
    ours: set[str] = set()
    if MANIFEST in existing:
        with tempfile.TemporaryDirectory() as folder:
            path = api.hf_hub_download(target.repository, MANIFEST, revision=head, local_dir=folder)
            try:
                manifest = json.loads(Path(path).read_text(encoding="utf-8"))
                ours = set(manifest["files"]) if PUSH in manifest else set()
            except (ValueError, KeyError, TypeError):
                ours = set()
    others = sorted(name for name in existing - ours - pushed if name.endswith(LOADED))
    if others:
        raise UserError(
            f"{target.repository}: has {others[0]}, which no push wrote and which libraries would load with the pushed "
            "files; delete it there, or name another repository"
        )
    return existing & ours - pushed


@contextmanager
def _explained(target: HubTarget) -> Iterator[None]:
    """Convert the errors of the hub's client to UserError. Their addresses may contain upload signatures, so they are
    not shown."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined,unused-ignore]  # HTTPError is the HTTP library's
        HfHubHTTPError,
        HTTPError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as raised:
        if isinstance(raised, OSError) and raised.filename is not None:  # a local file
            raise
        error = raised.__cause__ if isinstance(raised, RuntimeError) and raised.__cause__ else raised
        if isinstance(error, Stopped):
            raise error from None
        name, branch = target.repository, target.branch
        if isinstance(error, OfflineModeIsEnabled):
            text = "HF_HUB_OFFLINE is set; unset it to push"
        elif isinstance(error, RevisionNotFoundError):
            raise UserError(
                f"--revision {branch}: {name} has no such branch; create it with `hf repos branch create {name} "
                f"{branch}`, or omit --revision for main"
            ) from None
        elif isinstance(error, HfHubHTTPError):
            text = _refusal(error.response.status_code, _plain(error.server_message or ""))
        elif isinstance(error, HTTPError | OSError):
            text = f"the hub cannot be reached ({type(error).__name__}); check the network, then run it again"
        else:  # the hub refused the card, or its client the files or a response
            text = f"nothing was committed: {_plain(str(error)) or type(error).__name__}; run it again"
        raise UserError(f"{name}: {text}") from None


def _refusal(status: int, reason: str) -> str:
    """Return the message for an HTTP status of the hub; the hub's own `reason` may be empty."""
    why = f" ({reason})" if reason else ""
    return {
        401: f"the hub rejected the token; {LOGIN}",
        403: f"the token has no write access{why}; name a repository of yours, or {LOGIN}",
        404: f"no such repository, or the token has no access to it; correct --to, or {LOGIN}",
        409: (moved := f"changed during the push{why}; run it again"),
        412: moved,
    }.get(status, f"the hub responded with status {status}{why}; nothing was committed, run it again")


def _plain(text: str) -> str:
    """Return a text as one line; empty if it has an address, which may contain a signature."""
    return "" if "://" in text else " ".join(text.split()).rstrip(".")
