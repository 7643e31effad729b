"""Pushes to a repository of the Hugging Face hub: one commit, which takes earlier pushes away, or none."""

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
from zerolora.publish.product import PUSH, PushedModel
from zerolora.train.launch.stop_signals import Stopped

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LOGIN = "log in with `hf auth login`, or put a token that may write there into the environment variable HF_TOKEN"
LOADED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", "adapter_config.json", ".index.json")
"""Ends of names of files that a library would load in the place of, or beside, those that are pushed."""


@dataclass(frozen=True)
class HubTarget:
    """Where a push goes."""

    repository: str
    branch: str | None
    """None for main."""
    private: bool
    """Of a repository that is made; of one that is there, what it has to be."""


def check_repository(name: str) -> None:
    """Raise UserError unless `name` can be that of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(
            f"--to {name}: is not the name of a repository; write OWNER/NAME, or ./{name} for a directory"
        ) from None


def push_to_hub(product: PushedModel, texts: dict[str, str], target: HubTarget, message: str) -> tuple[str, str, bool]:
    """Commit the product's files and `texts`, by name. Return the commit, its address, and whether it is new.

    Files of an earlier push that this one does not have are deleted in the same commit. Raises UserError if the hub
    refuses it, cannot be reached, or the repository holds files of somebody else that would be loaded instead.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what is to be said is said here
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _explained(target):
        if (token := get_token()) is None:
            raise UserError(f"--to {target.repository}: no one is logged in to the hub; {LOGIN}")
        api = HfApi(token=token)
        head = _head(api, target)
        old = _files_of_earlier_push(api, target, head, {*product.files, *texts})
        operations: list[Any] = [
            CommitOperationAdd(name, texts[name].encode() if name in texts else product.directory / name)
            for name in sorted({*product.files, *texts})
        ]
        operations += [CommitOperationDelete(name) for name in sorted(old)]
        # Not upload_folder: with Xet it makes several commits, so that half a push could stay there.
        commit = api.create_commit(
            target.repository, operations, commit_message=message, revision=target.branch, parent_commit=head
        )
    return commit.oid, commit.commit_url, commit.oid != head


def _head(api: "HfApi", target: HubTarget) -> str:
    """Return the last commit of the branch. A repository that is not there is made, unless a branch is named."""
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
            f"--private: {target.repository} is there already, and everybody can read it; make it private in its "
            "settings, or name another repository"
        )
    assert info.sha
    return info.sha


def _files_of_earlier_push(api: "HfApi", target: HubTarget, head: str, pushed: set[str]) -> set[str]:
    """Return the files of an earlier push that are not among those that are pushed now.

    Raises UserError for other files that would be loaded instead of, or beside, them.
    """
    there = set(api.list_repo_files(target.repository, revision=head))
    ours: set[str] = set()
    if MANIFEST in there:
        with tempfile.TemporaryDirectory() as folder:
            path = api.hf_hub_download(target.repository, MANIFEST, revision=head, local_dir=folder)
            try:
                manifest = json.loads(Path(path).read_text(encoding="utf-8"))
                ours = set(manifest["files"]) if PUSH in manifest else set()
            except (ValueError, KeyError, TypeError):
                ours = set()
    others = sorted(name for name in there - ours - pushed if name.endswith(LOADED))
    if others:
        raise UserError(
            f"{target.repository}: holds {others[0]}, which no push wrote and which would be loaded with what is "
            "pushed; delete it there, or name another repository"
        )
    return there & ours - pushed


@contextmanager
def _explained(target: HubTarget) -> Iterator[None]:
    """Convert the errors of the hub's client into UserError. The addresses in them can contain signatures for an
    upload, so none is shown."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined,unused-ignore]  # HTTPError is the HTTP library's
        HfHubHTTPError,
        HTTPError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as raised:
        if isinstance(raised, OSError) and raised.filename is not None:  # a file of this machine
            raise
        error = raised.__cause__ if isinstance(raised, RuntimeError) and raised.__cause__ else raised
        if isinstance(error, Stopped):
            raise error from None
        name, branch = target.repository, target.branch
        if isinstance(error, OfflineModeIsEnabled):
            text = "HF_HUB_OFFLINE is set; unset it to push"
        elif isinstance(error, RevisionNotFoundError):
            raise UserError(
                f"--revision {branch}: {name} has no such branch; make it with `hf repos branch create {name} "
                f"{branch}`, or leave it out for main"
            ) from None
        elif isinstance(error, HfHubHTTPError):
            text = _refusal(error.response.status_code, _plain(error.server_message or ""))
        elif isinstance(error, HTTPError | OSError):
            text = f"the hub cannot be reached ({type(error).__name__}); check the network, then run it again"
        else:  # the hub refuses the card, or its client the files or an answer
            text = f"nothing was committed: {_plain(str(error)) or type(error).__name__}; run it again"
        raise UserError(f"{name}: {text}") from None


def _refusal(status: int, reason: str) -> str:
    """Return what an HTTP status of the hub means, with the hub's own reason, which may be empty."""
    why = f" ({reason})" if reason else ""
    return {
        401: f"the hub does not accept the token; {LOGIN}",
        403: f"the token may not write there{why}; name a repository of yours, or {LOGIN}",
        404: f"there is no such repository, or the token may not see it; correct --to, or {LOGIN}",
        409: (moved := f"has changed while it was pushed to{why}; run it again"),
        412: moved,
    }.get(status, f"the hub answers with status {status}{why}; nothing was committed, run it again")


def _plain(text: str) -> str:
    """Return a text as one line; nothing if it has an address, which may contain a signature."""
    return "" if "://" in text else " ".join(text.split()).rstrip(".")
