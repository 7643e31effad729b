"""Run a command on GPUs that no other command of this machine uses:

    python -m zerolora.machine.assigned_gpus EACH_NODE NODES GRANTED COMMAND …

EACH_NODE is the number of GPUs that the command needs on each of NODES nodes, GRANTED the total that Snakemake granted
its job. Snakemake only counts GPUs (the resource `gpu`); this chooses them, by a lock file for each that the command
inherits, and CUDA_VISIBLE_DEVICES. GPUs that the user or a scheduler made invisible are never chosen. All projects of a
user on a machine share the locks.
"""

import contextlib
import fcntl
import os
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from zerolora.errors import EXPECTED, UserError, message_of
from zerolora.machine import devices
from zerolora.units import counted

PREFIX = "zerolora: "  # as in log.py, which takes longer to load than all of this
POLL_SECONDS = 0.2
TURN = "turn.lock"
"""Locked while a command looks for free GPUs, so that two that need several never wait for each other."""


def main(arguments: list[str]) -> int:
    """Lock the GPUs and become the command; return 2 on an error."""
    each_node, nodes, granted = (int(text) for text in arguments[:3])
    command = arguments[3:]
    try:
        check_granted(each_node * nodes, granted)
        if not placed_by_srun(os.environ):
            gpus = lockable()
            check_visible(each_node, len(gpus))
            os.environ[devices.VISIBLE] = ",".join(take(each_node, gpus, lock_folder()))
        os.execvp(command[0], command)  # noqa: S606 (the rule's own command)
    except EXPECTED as error:
        print(f"{PREFIX}{message_of(error)}", file=sys.stderr)
    return 2


def check_visible(needed: int, visible: int) -> None:
    """Raise UserError if this machine shows too few GPUs."""
    if visible < needed:
        names = os.environ.get(devices.VISIBLE)
        limited = "" if names is None else f" ({devices.VISIBLE}={names})"
        raise UserError(
            f"{counted(needed, 'GPU')} needed, and this machine shows {visible}{limited}; run where there are more, or "
            "correct hardware and train.ranks_per_node"
        )


def check_granted(needed: int, granted: int) -> None:
    """Raise UserError if Snakemake granted a job fewer GPUs than it needs: it caps requests silently."""
    if granted < needed:
        raise UserError(
            f"this job needs {counted(needed, 'GPU')}, and Snakemake may give it {granted} (--resources gpu={granted}, "
            f"in the command or the profile); set gpu={needed} or more, or fewer train.ranks_per_node"
        )


def placed_by_srun(environment: Mapping[str, str]) -> bool:
    """Return whether srun started several tasks on each node, and so divided the GPUs among them itself."""
    tasks, nodes = (int(environment.get(name, "1")) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"))
    return tasks > nodes


def take(count: int, gpus: Mapping[str, str], folder: Path) -> list[str]:
    """Lock `count` of the `gpus` for this process and the command that it becomes, and return their names.

    Waits until enough are free. Raises UserError if the folder is not this user's alone.
    """
    check_own(folder)
    waited = False
    while True:
        turn = _opened(folder / TURN)
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if taken := _free(count, gpus, folder):
                return taken
        finally:
            os.close(turn)
        if not waited:
            print(
                f"{PREFIX}waiting for {count} of {counted(len(gpus), 'GPU')}, which other jobs use now",
                file=sys.stderr,
                flush=True,
            )
            waited = True
        time.sleep(POLL_SECONDS)


def lockable() -> dict[str, str]:
    """Return the lock name of each visible GPU by its name in CUDA_VISIBLE_DEVICES.

    Without a working driver the lock names are made of those in CUDA_VISIBLE_DEVICES.
    """
    names = devices.visible_names()
    library = devices.driver_library()
    gpus = devices.visible(library) if library is not None else []
    if isinstance(gpus, int) or not gpus:
        return {name: f"gpu-{name.replace('/', '_')}" for name in names or []}
    if names is None:
        names = [str(number) for number in range(len(gpus))]
    return {name: f"gpu-{gpu.uuid}" for name, gpu in zip(names, gpus, strict=False)}


def lock_folder() -> Path:
    return Path(tempfile.gettempdir(), f"zerolora-gpus-{os.getuid()}")


def check_own(folder: Path) -> None:
    """Create the folder of lock files. Raises UserError if it exists and other users could write to it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode):
        what = "is a link" if stat.S_ISLNK(seen.st_mode) else "is not a directory"
    elif seen.st_uid != os.getuid():
        what = f"belongs to user {seen.st_uid}"
    elif seen.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        what = f"is open to other users (mode {stat.S_IMODE(seen.st_mode):o})"
    else:
        return
    raise UserError(f"{folder}: {what}, so locks of GPUs are not safe there; remove it, or set another TMPDIR")


def _opened(file: Path) -> int:
    # Never truncated. A link is refused: it could name a file that is not ours to open.
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _free(count: int, gpus: Mapping[str, str], folder: Path) -> list[str]:
    """Lock `count` GPUs and return their names; none if fewer are free."""
    taken: dict[str, int] = {}
    for name, key in gpus.items():
        descriptor = _opened(folder / f"{key}.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        os.set_inheritable(descriptor, True)
        taken[name] = descriptor
        if len(taken) == count:
            return list(taken)
    for descriptor in taken.values():
        os.close(descriptor)
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
