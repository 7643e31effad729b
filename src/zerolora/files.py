"""Atomic writing of files and directories, and their sha256.

Everything is written beside its target, flushed to disk and renamed, so a reader or a restarted stage never sees an
incomplete file. Unfinished files and directories are called `.NAME.HOST.PID.tmp`, which .gitignore and .dvcignore list.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.json_file import read_own

MANIFEST = "manifest.json"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)


def sha256(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    unfinished = _unfinished(path)
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        # What is written through a buffer names no file in its errors.
        error.filename = str(error.filename or path).replace(str(unfinished), str(path))
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def canonical(value: Any) -> str:
    """Return `value` as JSON with sorted keys: equal values give equal text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def as_json(value: Any) -> str:
    """Return `value` as the text of a JSON file: indented, with sorted keys."""
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, whole or not at all."""
    write_text(path, as_json(value))


def read_json(path: Path, written_by: str) -> Any:
    """Return the JSON value in `path`; `written_by` names the command that makes the file.

    Raises UserError if the file is missing or broken. For files of this project; model/foreign.py reads others.
    """
    return read_own(path, written_by)


def read_object(path: Path, written_by: str) -> dict[str, Any]:
    """Return the JSON object in `path`, as `read_json` does. Raises UserError if it holds anything else."""
    value = read_json(path, written_by)
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {shown(value)}, no JSON object; delete it and run `{written_by}` again")
    return value


def readable(path: Path) -> None:
    """Give a file the permissions of any other new one; safetensors writes for its owner alone."""
    path.chmod(0o666 & ~_umask())


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk, so that a rename in it survives a power failure."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot do it; their server decides when entries reach the disk.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside `target` that takes its place when the block ends without an error.

    An older `target` is replaced in one step, so that there is always one of the two (on file systems without
    renameat2's RENAME_EXCHANGE in two steps); on an error it stays as it was and the new directory is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    unfinished = _unfinished(target)
    unfinished.mkdir()
    try:
        yield unfinished
        for path in [*unfinished.rglob("*"), unfinished]:
            if path.is_dir():
                sync_directory(path)
            elif path.is_file():
                readable(path)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        _replace(target, unfinished)
        sync_directory(target.parent)
    except OSError as error:
        # Arrow names no file in its errors; others name it by the name that it has meanwhile.
        error.filename = str(error.filename or target).replace(str(unfinished), str(target))
        raise
    finally:
        _remove(unfinished)


def describe(directory: Path, hashes: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return `{relative name: {"sha256", "bytes"}}` for every file below `directory` but its manifest.

    `hashes` has the sha256 of files that need not be read again, by relative name. Raises UserError for a name that is
    not UTF-8, which JSON cannot hold.
    """
    known, found = hashes or {}, {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            name = checked_name(path).relative_to(directory).as_posix()
            found[name] = {"sha256": known.get(name) or sha256(path), "bytes": path.stat().st_size}
    return found


def checked_name(path: Path) -> Path:
    """Return `path` if its name is UTF-8. Raises UserError if not, since no JSON or log could name it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{os.fsencode(path)!r}: the file's name is not UTF-8; rename it") from None
    return path


def _unfinished(target: Path) -> Path:
    """Return the name that `target` has while this process writes it."""
    return target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}.tmp")


def _sweep(target: Path) -> None:
    """Remove what processes of this machine that have died left of `target`."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{re.escape(os.uname().nodename)}\.(\d+)(\.old)?\.tmp")
    for path in target.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not _lives(int(match[1]))):
            _remove(path)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _replace(target: Path, new: Path) -> None:
    """Put `new` in the place of `target`; an older `target` then lies under the name of `new`."""
    if not os.path.lexists(target):
        new.rename(target)
    elif not _exchange(new, target):
        old = new.with_name(new.name.removesuffix(".tmp") + ".old.tmp")
        target.rename(old)
        new.rename(target)
        old.rename(new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step. Return whether the system and the file system can."""
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _umask() -> int:
    """Return the process's umask: as Linux tells it, elsewhere by setting it for a moment."""
    try:
        match = UMASK.search(Path("/proc/self/status").read_text(encoding="ascii", errors="replace"))
    except OSError:
        match = None
    if match:
        return int(match[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
