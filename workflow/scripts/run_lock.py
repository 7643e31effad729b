"""One run at a time in a working directory; a lock whose owner died is taken over.

Snakemake's own lock is a list of files that stays behind when the process is killed, and it is written only after the
jobs are planned, so two runs that start together can both pass it. Here a run first takes a kernel lock (flock), which
ends with its process, and notes who it is. Whoever gets the kernel lock on the same machine therefore knows that the
owner of whatever Snakemake lock is still there has died.
"""

import fcntl
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO, Any

LOCK = Path(".snakemake/run.lock")
SNAKEMAKE_LOCKS = Path(".snakemake/locks")

_held: list[IO[str]] = []  # open as long as the process lives


class Taken(Exception):
    """Another process holds the lock; the message says which."""


def acquire(temporary: Path) -> None:
    """Take the lock for the rest of this process's life, and remove what a dead owner left.

    `temporary` is this process's temporary directory, which the next owner removes if this process is killed.
    Raises Taken if a live process holds the lock. On a file system without kernel locks nothing is done: Snakemake's
    own lock is then the only one.
    """
    LOCK.parent.mkdir(exist_ok=True)
    file = LOCK.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Taken(f"another run works in this directory: {_name(_read(file))}; wait for it, or end it") from None
    except OSError:
        file.close()
        return
    _take_over(_read(file))
    _write(
        file,
        {
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "temporary": str(temporary),
        },
    )
    _held.append(file)


def is_free() -> bool:
    """Tell whether no live process holds the lock."""
    if not LOCK.exists():
        return True
    with LOCK.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
    return True


def _take_over(owner: dict[str, Any]) -> None:
    if owner.get("host") == os.uname().nodename:
        if SNAKEMAKE_LOCKS.is_dir() and any(SNAKEMAKE_LOCKS.iterdir()):
            print(f"{_name(owner)} was killed; its lock is taken over", file=sys.stderr)
            for path in SNAKEMAKE_LOCKS.iterdir():
                path.unlink()
        temporary = Path(owner.get("temporary", ""))
        if temporary.name.startswith("snakemake") and temporary.is_dir() and temporary.stat().st_uid == os.getuid():
            shutil.rmtree(temporary, ignore_errors=True)
    elif owner and SNAKEMAKE_LOCKS.is_dir() and any(SNAKEMAKE_LOCKS.iterdir()):
        print(f"the lock here is of {_name(owner)}; if it has ended: snakemake --unlock", file=sys.stderr)


def _name(owner: dict[str, Any]) -> str:
    if not owner:
        return "a process that has just started"
    return f"process {owner['pid']} on {owner['host']}, started {owner['started']}"


def _read(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        owner = json.loads(file.read())
        return owner if {"host", "pid", "started"} <= owner.keys() else {}
    except (ValueError, AttributeError):
        return {}


def _write(file: IO[str], owner: dict[str, Any]) -> None:
    file.truncate(0)
    file.write(json.dumps(owner))
    file.flush()
