"""Pushes to a directory: whole or not at all, and only in the place of an earlier push."""

import json
import shutil
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_object, sha256, staged_directory, write_text
from zerolora.publish.finished import RESULTS
from zerolora.publish.product import PUSH, PushedModel


def push_to_directory(product: PushedModel, texts: dict[str, str], target: Path) -> bool:
    """Write the product's files and `texts`, by name, to directory `target`. Return False if they are there already.

    Raises UserError if something else is there.
    """
    if target.resolve().is_relative_to(RESULTS.resolve()):
        raise UserError(f"--to {target}: {RESULTS} belongs to the pipeline; write a directory outside it")
    if target.exists() and not _is_ours(target):
        raise UserError(
            f"--to {target}: is there already, and no earlier push wrote it; name another directory, or remove it"
        )
    if _is_there(target, texts):
        return False
    with staged_directory(target) as staged:
        for name in product.files.keys() - texts.keys():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(product.directory / name, staged / name)
        for name, text in texts.items():
            write_text(staged / name, text)
    return True


def _is_ours(target: Path) -> bool:
    """Tell whether a directory is empty, or an earlier push wrote it."""
    if not target.is_dir():
        return False
    if not any(target.iterdir()):
        return True
    return (target / MANIFEST).is_file() and PUSH in read_object(target / MANIFEST, "zerolora push")


def _is_there(target: Path, texts: dict[str, str]) -> bool:
    """Tell whether a directory holds just what is to be pushed."""
    if not (target / MANIFEST).is_file():
        return False
    manifest: dict[str, Any] = json.loads(texts[MANIFEST])
    files = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} - {MANIFEST}
    return (
        (target / MANIFEST).read_text(encoding="utf-8") == texts[MANIFEST]
        and files == manifest["files"].keys()
        and all(sha256(target / name) == entry["sha256"] for name, entry in manifest["files"].items())
    )
