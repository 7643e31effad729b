"""Files that appear whole or not at all, and their sha256.

Everything is written beside its target, flushed to disk and renamed, so a reader or a restarted stage
never sees half a file.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolora.errors import UserError

MANIFEST = "manifest.json"
UMASK = os.umask(0)  # there is no way to ask for it but to set it
os.umask(UMASK)


def sha256(path: Path) -> str:
    """Return the hex sha256 of a file, read in 1 MiB blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def canonical(value: Any) -> str:
    """Return `value` as JSON with sorted keys: equal values give equal text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, whole or not at all."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n")


def read_json(path: Path, written_by: str) -> Any:
    """Return the JSON value in `path`; `written_by` names the command that makes the file.

    Raises UserError if the file is missing or broken.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; `{written_by}` writes it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it and run `{written_by}` again") from None


def readable(path: Path) -> None:
    """Give a file the permissions of any other new one; safetensors writes for its owner alone."""
    path.chmod(0o666 & ~UMASK)


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside `target` that takes its place when the block ends without an error.

    An older `target` is replaced; on an error it stays as it was and the new directory is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    replaced = target.with_name(f".{target.name}.{os.getpid()}.old")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        yield beside
        for path in beside.rglob("*"):
            if path.is_file():
                readable(path)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if target.exists():
            target.rename(replaced)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def describe(directory: Path) -> dict[str, dict[str, Any]]:
    """Return `{relative name: {"sha256", "bytes"}}` for every file below `directory` but its manifest."""
    return {
        path.relative_to(directory).as_posix(): {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
