"""The base model: its repository and commit, or its directory."""

import re
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from zerolora.config.values import Name
from zerolora.imports.formats.import_format import Draft, fact, text
from zerolora.imports.formats.shared.named_files import exists

COMMIT = re.compile(r"[0-9a-f]{40}")
MODEL = fact("model", "fetch.directory or fetch.hub", text, "a Hub model needs a commit here")
REVISION = fact("revision", "fetch.hub", text)
"""The rules of the keys that `model` combines."""


def model(key: str, draft: Draft) -> tuple[str, list[str]]:
    """Set the base model from `key`; return its name in the config, and a line for each assumption."""
    lines = []
    if "model" not in draft.facts:
        lines.append(f"fetch: the file names no model ({key}); correct models/model")
    draft.key = key if "model" in draft.facts else ""
    name, revision = draft.facts.get("model", "model"), draft.facts.get("revision")
    ours = re.sub(r"[^a-z0-9]+", "-", Path(name).name.lower()).strip("-")[:60]
    try:
        TypeAdapter(Name).validate_python(ours)
    except ValidationError:
        ours = "model"
    if revision and COMMIT.fullmatch(revision) and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        entry = {"repository": name, "revision": revision, "license": "unknown"}
        draft.set(f"fetch.hub.{ours}", entry)
        return ours, [*lines, f"fetch.hub.{ours}.license: the file does not name it; correct it"]
    is_path = name.startswith((".", "/", "~")) or exists(Path(name), Path.is_dir)
    path = name if is_path else f"models/{Path(name).name or 'model'}"
    draft.set(f"fetch.directory.{ours}", {"path": path, "license": "unknown"})
    at = f" at {revision}" if revision else ""
    lines.append(
        f"fetch.directory.{ours}: {path} is used for {name}{at}; save the model there, or name it in fetch.hub with "
        "its commit, and correct the license"
    )
    return ours, lines
