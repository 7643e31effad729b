"""Which base model an adapter is for: its name, its revision, and a hash of its weights."""

import hashlib
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, canonical, sha256
from zerolora.log import LOGGER
from zerolora.model import foreign
from zerolora.model.manifest import is_weight
from zerolora.model.weight_files import weight_files

KEY = "base_model"
"""Of an adapter's manifest."""


def base_identity(stamp: Path) -> dict[str, Any]:
    """Return `name`, `revision` and `weights` of the base model whose weights the file `stamp` locates.

    `weights` is a hash of the sha256 of its weight files, so a copy in another directory, or with another tokenizer, is
    the same base.
    """
    record = foreign.manifest(stamp, "zerolora weights", "files", "source")
    name, revision = hub_name(record["source"])
    hashes = {name: file["sha256"] for name, file in record["files"].items() if is_weight(name)}
    return {"name": name, "revision": revision, "weights": _hash(hashes)}


def _hash(weights: dict[str, str]) -> str:
    """Return the hash of the sha256 of weight files by name."""
    return hashlib.sha256(canonical(weights).encode()).hexdigest()


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
    theirs = foreign.adapter_manifest(directory).get(KEY)
    if theirs and theirs["weights"] != (ours := base_identity(stamp))["weights"]:
        raise UserError(
            f"{directory / MANIFEST}: {KEY} is {_shown(theirs)}, and this base is {_shown(ours)}; write an adapter of "
            "this base model, or that adapter's"
        )


def check_base_directory(directory: Path, base: Path) -> None:
    """Raise UserError if the manifest of the adapter in `directory` names other weights than those in directory
    `base`, which are hashed for it; without such a manifest, log the name that the adapter's config has."""
    if theirs := foreign.adapter_manifest(directory).get(KEY):
        weights = _hash({path.name: sha256(path) for path in weight_files(base)})
        if theirs["weights"] != weights:
            raise UserError(
                f"{directory / MANIFEST}: {KEY} is {_shown(theirs)}, and the weights in {base} are {weights[:12]}; "
                f"write that base, or remove {KEY} from the manifest if these are the same numbers in other files"
            )
    elif (directory / foreign.ADAPTER_CONFIG).is_file():
        name = foreign.adapter_config(directory).get("base_model_name_or_path")
        LOGGER.info("%s: names %s as its base", directory, shown(name) if name else "nothing")


def _shown(base: dict[str, Any]) -> str:
    revision = f" at {base['revision'][:12]}" if base.get("revision") else ""
    return f"{base['name']}{revision} (weights {base['weights'][:12]})"
