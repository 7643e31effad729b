"""`zerolora push`: what a finished run made, and its model card, to a hub repository or a directory.

zerolora push --run default --what adapter --to OWNER/NAME
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import MANIFEST
from zerolora.log import result
from zerolora.model.base_identity import KEY as BASE
from zerolora.publish.card import model_card
from zerolora.publish.directory import push_to_directory
from zerolora.publish.finished import finished_run
from zerolora.publish.hub import HubTarget, check_repository, push_to_hub
from zerolora.publish.product import CARD, PUSH, PushedModel, product_of
from zerolora.units import byte_size

PLACES = ("/", "./", "../")
"""What the path of a directory begins with."""
HUB = "hf://"


def push(run: str, what: str, to: str, revision: str | None, private: bool, message: str | None) -> str:
    """Push a run's adapter or merged model; return where it is: REPOSITORY@COMMIT, or the directory.

    Nothing changes there if what would be pushed is there already. Raises UserError, before anything is sent, if the
    run is not finished or out of date, or a file is not the one that its stage wrote.
    """
    directory = _directory(to)
    if directory is not None and (revision or private or message):
        raise UserError(f"--to {to}: is a directory; --revision, --private and --message are for a repository")
    repository = to.removeprefix(HUB)
    if directory is None:
        check_repository(repository)
    finished = finished_run(run)
    product = product_of(finished, what)
    title = directory.resolve().name if directory else repository
    card = model_card(finished, product, title, repository=directory is None, branch=revision)
    texts = product.rewritten | {CARD: card}
    texts[MANIFEST] = _manifest(product, texts, run)
    size = f"{len(product.files | texts)} files, {byte_size(product.bytes)}"
    if directory is not None:
        new = push_to_directory(product, texts, directory)
        result(f"{size} in {directory}" if new else f"nothing to do: {directory} holds just this already")
        return str(directory)
    target = HubTarget(repository, revision, private)
    commit, address, new = push_to_hub(product, texts, target, message or f"Push {what} of run {run}")
    result(f"{size} in {address}" if new else f"no new commit: {repository} holds just this already, at {commit}")
    return f"{repository}@{commit}"


def _directory(to: str) -> Path | None:
    """Return the directory that --to names, None if it names a repository. Raises UserError if it could be both."""
    if to in (".", "..") or to.startswith(PLACES):
        return Path(to)
    if not to.startswith(HUB) and Path(to.split("/", maxsplit=1)[0]).exists():
        raise UserError(f"--to {to}: write ./{to} for the directory, or {HUB}{to} for the repository")
    return None


def _manifest(product: PushedModel, texts: dict[str, str], run: str) -> str:
    """Return the manifest that is pushed along: by it a later push knows its own files, and anybody can check them."""
    own = {
        name: {"sha256": hashlib.sha256(text.encode()).hexdigest(), "bytes": len(text.encode())}
        for name, text in texts.items()
    }
    value: dict[str, Any] = {BASE: product.base, "files": product.files | own, PUSH: {"run": run, "what": product.kind}}
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
