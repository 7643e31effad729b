"""The store of base weights: one copy for all clones, experiments and users of a machine.

It is the directory in ZEROLORA_STORE, or zerolora/weights in the user's cache:

    blobs/SHA256       a file of a model, read-only
    pins/KEY.json      name, sha256 and size of each file of a pinned model, written after its files
    downloads/KEY.UID  an unfinished download, which the user's next process resumes
    locks/KEY          locked while a process downloads this pin

Files enter by a rename after they were hashed, so readers need no lock and never see an incomplete one. A project has
hard links to the blobs, or symbolic links where the file system does not allow those. Permissions of what is added
follow from those of the store's directory, so a directory that a group can write is a store for the group.
"""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.files import Stamp, cache_folder, read_object, sha256, staged_directory, stamp, sync_directory, write_json
from zerolora.log import LOGGER
from zerolora.model.manifest import is_weight

VARIABLE = "ZEROLORA_STORE"
_digests: dict[tuple[int, Stamp | None], str] = {}


def store_folder() -> Path:
    """Return the directory of the store, which may not exist yet. Raises UserError if its name is not absolute."""
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_absolute():
            raise UserError(f"{VARIABLE}={shown(named)}: is not an absolute path; use one, as in /data/zerolora")
        if Path(named).exists() and not Path(named).is_dir():
            raise UserError(f"{VARIABLE}={shown(named)}: is not a directory; give the path of one")
        return Path(named)
    try:
        return cache_folder() / "weights"
    except RuntimeError:
        raise UserError(f"this user has no home directory; set {VARIABLE} to a directory for base weights") from None


def digest(path: Path) -> str:
    """Return the sha256 of a file, which is computed once in a process while its stamp remains."""
    key = _identity(path)
    if key not in _digests:
        _digests[key] = sha256(path)
    return _digests[key]


def _identity(path: Path) -> tuple[int, Stamp | None]:
    return path.stat().st_dev, stamp(path)


def link_pin(key: str, weights: Path) -> bool:
    """Make `weights` a directory with the files of a pinned model. Return False if the store lacks any of them."""
    pin = store_folder() / "pins" / f"{key}.json"
    return pin.is_file() and link_files(read_object(pin, "zerolora stage fetch")["files"], weights)


def link_files(files: Mapping[str, Mapping[str, Any]], weights: Path) -> bool:
    """Make `weights` a directory with these files, `{name: {"sha256", "bytes"}}`, of the store.

    Return False if the store lacks one. A damaged file, which sha256 detects, is removed from it.
    """
    blobs = {name: store_folder() / "blobs" / file["sha256"] for name, file in files.items()}
    if not all(_is_intact(blobs[name], file["sha256"], file["bytes"]) for name, file in files.items()):
        return False
    with staged_directory(weights) as staged:
        for name, blob in blobs.items():
            if is_weight(name):
                link(blob, staged / name)
                _digests[_identity(staged / name)] = files[name]["sha256"]  # a link gives the file another stamp
            else:
                shutil.copyfile(blob, staged / name)
    return True


@contextlib.contextmanager
def downloading(key: str) -> Iterator[Path]:
    """Yield the directory to download a pinned model to, in which an interrupted download may be, and lock the pin.

    Raises OSError if the store cannot be written.
    """
    root = _folder(store_folder())
    lock = os.open(_folder(root / "locks") / key, os.O_RDWR | os.O_CREAT)
    try:
        _share(root / "locks" / key, root, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            LOGGER.info("another process downloads this model to %s; waiting for it", root)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield _folder(_folder(root / "downloads") / f"{key}.{os.getuid()}")
    finally:
        os.close(lock)


def publish(key: str, directory: Path, paths: Iterable[Path]) -> None:
    """Move the files of a downloaded model into the store, and then its pin. Removes `directory`."""
    root = store_folder()
    blobs = _folder(root / "blobs")
    files = {}
    for path in paths:
        name, size = digest(path), path.stat().st_size
        files[path.name] = {"sha256": name, "bytes": size}
        if not _is_intact(blobs / name, name, size):
            _share(path, root, 0o444)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.resolve().replace(blobs / name)  # may be linked (fetch/dequantize.py)
            _digests[_identity(blobs / name)] = name  # as above
    sync_directory(blobs)
    pin = _folder(root / "pins") / f"{key}.json"
    write_json(pin, {"files": files})
    _share(pin, root, 0o444)
    shutil.rmtree(directory)


def _is_intact(blob: Path, expected: str, size: int) -> bool:
    if not blob.is_file():
        return False
    if blob.stat().st_size == size and digest(blob) == expected:
        return True
    LOGGER.warning("%s: is damaged, and is fetched again", blob)
    with contextlib.suppress(OSError):  # of another user, in a store that only its owner can change
        blob.unlink()
    return False


def link(file: Path, path: Path) -> None:
    """Make `path` a link to a file: another file system, or one of another user, allows no hard link."""
    try:
        path.hardlink_to(file)
    except OSError:
        path.symlink_to(file)


def _folder(path: Path) -> Path:
    """Create a directory of the store with the permissions of the store's directory, and return it."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        if path != store_folder():
            _share(path, store_folder(), 0o7777)
    return path


def _share(path: Path, root: Path, most: int) -> None:
    """Give one's own file the permissions of the store's directory, of which it gets those in `most`."""
    if path.stat().st_uid == os.getuid():
        path.chmod(stat.S_IMODE(root.stat().st_mode) & most)
