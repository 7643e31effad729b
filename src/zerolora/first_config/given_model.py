"""The base model that a user names: a directory, or a repository of the Hugging Face Hub."""

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerolora.config.shorthands import slug
from zerolora.config.values import UNKNOWN_LICENSE
from zerolora.errors import UserError, shown
from zerolora.fetch.hub_client import explained_errors
from zerolora.fetch.model_sources import NOT_READ, SMALL_HUB_FILES, check_published_settings
from zerolora.fetch.small_files import small_files
from zerolora.files import MANIFEST, write_json
from zerolora.model import foreign
from zerolora.model.manifest import CONVERTED, is_weight

FETCH = "zerolora stage fetch"
REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


class GivenModel(NamedTuple):
    """A base model for the config."""

    name: str
    group: str
    """Its group in `fetch`."""
    entry: dict[str, Any]
    """Its entry there."""
    text: str
    """As the user wrote it."""
    files: Path
    """Directory with its config, tokenizer and templates, and a manifest without hashes."""


def given_model(text: str, into: Path) -> GivenModel:
    """Return the model of a directory or of NAME[@REVISION], with its small files in `into`.

    Of a repository the commit and the licence are looked up; a directory of `fetch` is the model that it fetched, by
    its pin. Raises UserError if there is no such model, or if it cannot be looked up.
    """
    directory, match = Path(text), REPOSITORY.fullmatch(text)
    if fetched := fetched_files(directory):
        return _fetched_model(text, fetched, into)
    if directory.is_dir():
        entry = {"path": text, "license": _license_of(directory)}
        name = slug(directory.resolve().name, "model")
        return GivenModel(name, "directory", entry, text, small_files(directory, into))
    if not match:
        raise UserError(
            f"--model {shown(text)}: no such directory, and no repository; give a directory with config.json and "
            "safetensors, or a name on the hub, as in Qwen/Qwen2.5-0.5B-Instruct"
        )
    repository, revision = match.groups()
    entry = _looked_up(repository, revision, into)
    try:
        files = check_published_settings(into)
    except UserError as error:
        raise UserError(str(error).replace(str(into), text)) from None
    write_json(files / MANIFEST, {"files": {}, "source": {"source": "hub"}})
    return GivenModel(slug(repository.partition("/")[2], "model"), "hub", entry, text, files)


def fetched_files(directory: Path) -> Path | None:
    """Return the output of `fetch` that a directory is, or whose weights it holds; None for any other directory."""
    known = {"models": directory.resolve(), "weights": directory.resolve().parents[1] / "models" / directory.name}
    folder = known.get(directory.resolve().parent.name) if directory.is_dir() else None
    if folder is None or not (folder / MANIFEST).is_file():
        return None
    try:
        foreign.manifest(folder / MANIFEST, FETCH, "files", "source", "license")
    except UserError:  # another program's file
        return None
    return folder


def _fetched_model(text: str, folder: Path, into: Path) -> GivenModel:
    """Return the model of an output of `fetch`, which is fetched by the same pin."""
    record = foreign.manifest(folder / MANIFEST, FETCH, "files", "source", "license")
    for name in record["files"]:
        if not is_weight(name):
            shutil.copyfile(folder / name, into / name)
    check_published_settings(into)
    entry = {**record["source"], "license": record["license"]}
    group, source = entry.pop("source"), {}
    if group == "directory":
        project = folder.parents[2]  # to which the path is relative
        entry["path"] = entry["path"] if project.samefile(Path.cwd()) else str(project / entry["path"])
        source = {} if CONVERTED in record else {"path": str(Path(entry["path"]).resolve())}
    write_json(into / MANIFEST, {"files": {}, "source": {"source": group, **source}})
    pinned = f"{entry['repository']}@{entry['revision']}" if group == "hub" else text
    return GivenModel(slug(folder.name, "model"), group, entry, pinned, into)


def _license_of(directory: Path) -> str:
    """Return the licence that a model's README.md states."""
    from huggingface_hub import metadata_load

    readme = directory / "README.md"
    try:
        stated = (metadata_load(readme) or {}).get("license") if readme.is_file() else None
    except (ValueError, yaml.YAMLError):  # the README is no input of any stage
        stated = None
    return str(stated or UNKNOWN_LICENSE)


def _looked_up(repository: str, revision: str | None, into: Path) -> dict[str, str]:
    """Return the hub's entry of a repository: the commit of the revision, and its licence. Download its small files."""
    from huggingface_hub import HfApi, snapshot_download

    name = f"model {repository}" + (f" at {revision}" if revision else "")
    with explained_errors(name, "model"):
        about: Any = HfApi().model_info(repository, revision=revision)
        snapshot_download(
            repository, revision=about.sha, allow_patterns=SMALL_HUB_FILES, ignore_patterns=NOT_READ, local_dir=into
        )
    return {"repository": repository, "revision": about.sha, "license": license_of(about.card_data)}


def license_of(card: Any) -> str:
    """Return the licence that the metadata of a repository's README.md states; of several, joined by AND."""
    stated = getattr(card, "license", None) if card else None
    return " AND ".join(map(str, stated)) if isinstance(stated, list) else str(stated or UNKNOWN_LICENSE)
