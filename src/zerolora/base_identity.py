"""Which base model an adapter is for: its name, its revision, and a hash of its weights."""

import hashlib
from pathlib import Path
from typing import Any

from zerolora import foreign
from zerolora.errors import UserError
from zerolora.files import MANIFEST, canonical
from zerolora.manifest import is_weight

KEY = "base_model"
"""Of an adapter's manifest."""


def base_identity(stamp: Path) -> dict[str, Any]:
    """Return `name`, `revision` and `weights` of the base model whose weights the file `stamp` locates.

    `weights` is a hash of the sha256 of its weight files, so a copy in another directory, or with another tokenizer, is
    the same base.
    """
    record = foreign.manifest(stamp, "zerolora weights", "files", "source")
    weights = {name: file["sha256"] for name, file in record["files"].items() if is_weight(name)}
    name, revision = hub_name(record["source"])
    return {"name": name, "revision": revision, "weights": hashlib.sha256(canonical(weights).encode()).hexdigest()}


def hub_name(source: dict[str, Any]) -> tuple[str, str | None]:
    """Return base_model_name_or_path and revision of peft's config for a model's source, as `fetch` recorded it.

    A model of the hub has its repository and commit. What is not on the hub gets a name that the hub's client refuses,
    so that nobody loads another model that happens to have it: a package's file `PACKAGE==VERSION:FILE`, a directory
    its path, which begins with / or a dot (huggingface_hub/utils/_validators.py, validate_repo_id).
    """
    if source["source"] == "hub":
        return source["repository"], source["revision"]
    if source["source"] == "package":
        return f"{source['package']}=={source['version']}:{source['file']}", None
    path: str = source["path"]
    return (path if path.startswith(("/", ".")) else f"./{path}"), None


def check_same_base(directory: Path, stamp: Path) -> None:
    """Raise UserError if the manifest of the adapter in `directory` names another base model than the file `stamp`.

    An adapter without such a manifest, as those of the hub, may be of any.
    """
    if not (directory / MANIFEST).exists():
        return
    theirs = foreign.manifest(directory / MANIFEST, "zerolora train").get(KEY)
    ours = base_identity(stamp)
    if theirs and theirs["weights"] != ours["weights"]:
        raise UserError(
            f"train.from_adapter: {directory / MANIFEST}: {KEY} is {_shown(theirs)}, and this run's is {_shown(ours)}; "
            "name an adapter of this run's base model, or a data set prepared for that one"
        )


def _shown(base: dict[str, Any]) -> str:
    revision = f" at {base['revision'][:12]}" if base.get("revision") else ""
    return f"{base['name']}{revision} (weights {base['weights'][:12]})"
