"""Atomic writing of files and directories, and their SHA-256.

Outputs are written next to their target, flushed to disk and renamed, so that no reader or restarted stage sees an
incomplete one. Unfinished ones are named `.NAME.HOST.PID.tmp`, which .gitignore and .dvcignore list.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolora.errors import CONTROLS, UserError, shown
from zerolora.json_file import read_text, unique

MANIFEST = "manifest.json"
Stamp = tuple[int, int, int, int]
"""Size, time of change of the content, time of change of the file's entry, and inode."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)


def sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(path: Path | str) -> Stamp | None:
    """Return the stamp of a file, by which it counts as unchanged; None if there is none.

    Whoever changes a file can set the time of its content back, but not that of its entry, and a file that replaces
    another has its own inode. The time of the entry also changes if a hard link is made or removed: hash it then.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 (thousands of them, at each start)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def cache_folder() -> Path:
    """Return this package's folder in the user's cache. Raises RuntimeError for a user without a home directory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "zerolora"


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
        # Errors of buffered writes name no file.
        error.filename = str(error.filename or path).replace(str(unfinished), str(path))
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def canonical(value: Any) -> str:
    """Return `value` as compact JSON with sorted keys; equal values give equal text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def as_json(value: Any) -> str:
    """Return `value` as indented JSON with sorted keys."""
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, whole or not at all."""
    write_text(path, as_json(value))


def read_json(path: Path, written_by: str) -> Any:
    """Return the JSON value in a file of the project, written by the command `written_by`.

    Raises UserError if it is missing, invalid, or has repeated keys. For files of other programs see model/foreign.py.
    """
    try:
        text = read_text(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: there is no such file; `{written_by}` writes it") from None
    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it and run `{written_by}` again") from None


def read_object(path: Path, written_by: str) -> dict[str, Any]:
    """Return the JSON object in `path`, as `read_json` does. Raises UserError for any other value."""
    value = read_json(path, written_by)
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {shown(value)}, no JSON object; delete it and run `{written_by}` again")
    return value


def readable(path: Path) -> None:
    """Give a file the default permissions; safetensors writes files that only their owner can read."""
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
    """Yield an empty directory that becomes `target` when the block ends without an error.

    An existing `target` is replaced in one step, so that it always exists (in two steps on file systems without
    renameat2's RENAME_EXCHANGE). On an error it is left unchanged and the new directory is removed.
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
            elif path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:  # no link to another's file
                readable(path)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        _replace(target, unfinished)
        sync_directory(target.parent)
    except OSError as error:
        # Arrow's errors name no file, others the unfinished one.
        error.filename = str(error.filename or target).replace(str(unfinished), str(target))
        raise
    finally:
        _remove(unfinished)


def describe(directory: Path, hashes: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return `{relative name: {"sha256", "bytes"}}` for each file below `directory` except its manifest.

    `hashes` has known SHA-256 values by relative name. Raises UserError for a name that is not UTF-8.
    """
    known, result = hashes or {}, {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            name = checked_name(path).relative_to(directory).as_posix()
            result[name] = {"sha256": known.get(name) or sha256(path), "bytes": path.stat().st_size}
    return result


def checked_name(path: Path) -> Path:
    """Return `path`. Raises UserError if its name is not UTF-8, since JSON and logs could not contain it, or has
    control characters, which a terminal would obey."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{os.fsencode(path)!r}: the file's name is not UTF-8; rename it") from None
    if CONTROLS.search(str(path)):
        raise UserError(f"{str(path)!r}: the file's name has control characters; rename it")
    return path


def _unfinished(target: Path) -> Path:
    """Return the name of `target` while this process writes it."""
    return target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}.tmp")


def _sweep(target: Path) -> None:
    """Remove unfinished versions of `target` left by dead processes of this machine."""
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
    """Rename `new` to `target`, and an existing `target` to `new`."""
    if not os.path.lexists(target):
        new.rename(target)
    elif not _exchange(new, target):
        old = new.with_name(new.name.removesuffix(".tmp") + ".old.tmp")
        target.rename(old)
        new.rename(target)
        old.rename(new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step. Return whether the system and file system support it."""
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
    """Return the process's umask, from /proc or else by briefly changing it."""
    try:
        match = UMASK.search(Path("/proc/self/status").read_text(encoding="ascii", errors="replace"))
    except OSError:
        match = None
    if match:
        return int(match[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


@contextmanager
def locked(folder: Path, running: str) -> Iterator[None]:
    """Lock a folder in the block, made if it is missing. Raises UserError, with the text `running`, if another process
    has locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: {running}") from None
        yield
    finally:
        os.close(handle)
