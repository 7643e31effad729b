"""The checkpoints of a run on disk: the one to resume, the time of the next, those to keep.

    work/checkpoints/<run>/<key>/step-00000060.safetensors

`key` is a hash of the resume key (resume_key.py), so any checkpoint of a folder may be resumed. Another version of
zerolora may hash the same key differently: a folder of another name also belongs to this run if the key in its
checkpoints is equivalent. A thread writes checkpoints while training continues.

Only complete checkpoints older than the kept ones are deleted. A damaged one is renamed to `damaged-step-…`. When a run
starts over, its old ones are renamed to `earlier-step-…`, until it has as many new ones. One that cannot be read, or
that another version wrote, ends the run.
"""

import fcntl
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError

from zerolora.config.compared import filled
from zerolora.config.settings import TrainingPlan
from zerolora.errors import UserError, shown
from zerolora.files import canonical
from zerolora.train.checkpoint.format import (
    SUFFIX,
    CorruptCheckpoint,
    State,
    UnreadCheckpoint,
    header,
    newest_first,
    path_of,
    read,
    write,
)

LOCK_SECONDS = 10
"""How long a predecessor may take to die: Slurm starts a requeued job while it kills the old one's last task."""
DAMAGED, EARLIER = "damaged", "earlier"
"""Prefixes of the names of checkpoints that are set aside."""
SETTING = "train."
"""Prefix of settings in a resume key."""
FINISHED = "finished"
"""File beside the checkpoints of a run whose adapter is published."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        of_run: Path,
        resume_key: dict[str, Any],
        run_fingerprint: dict[str, Any],
        *,
        every_steps: int | None = None,
        every_minutes: float,
        keep: int = 2,
    ) -> None:
        """`of_run` has a folder for each resume key. Checkpoints are due after `every_steps` steps and when the last
        one is `every_minutes` old. The last `keep` and that of the best step are kept."""
        self.of_run, self.resume_key, self.run_fingerprint = of_run, resume_key, run_fingerprint
        self.every_steps, self.every_seconds, self.keep = every_steps, 60 * every_minutes, keep
        self._last = time.monotonic()
        self.folder = self._folder()
        self._finished = self.folder / FINISHED
        self._named: Path | None = None
        self._lock: IO[str] | None = None
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.size = 0
        """Bytes of the last checkpoint that this process wrote; 0 before."""

    def _folder(self) -> Path:
        """Return the folder of this key's checkpoints: the one with its name, unless only another folder has some.

        Every rank decides by itself, before any of them writes.
        """
        own = self.of_run / hashlib.sha256(canonical(self.resume_key).encode()).hexdigest()[:16]
        if not self.of_run.is_dir() or newest_first(own):
            return own
        for path in self._newest_of_each(folder for folder in self.of_run.glob("*/") if folder != own):
            for each in newest_first(path.parent):
                with suppress(CorruptCheckpoint, UnreadCheckpoint):
                    if not differences(header(each, pauses=())["resume_key"], self.resume_key):
                        return path.parent
                    break
        return own

    def choose(self, resume: str) -> tuple[Path | None, list[str]]:
        """Return the checkpoint to resume, None to start over, and lines about others that are not resumed.

        `resume`: auto = the newest complete one of this run and config; never; or a file to start from, or from a newer
        checkpoint that continues it. Raises UserError if that file is not a checkpoint of this config, one of the
        folder cannot be read or was written by another version, or the folder cannot be written.
        """
        self.claim()
        path, lines = self.newest() if resume == "auto" else (None, [])
        if resume not in ("auto", "never"):
            path, lines = self.onward(Path(resume))
        if path is None:
            self._finished.unlink(missing_ok=True)
            for old in newest_first(self.folder):
                set_aside(old, EARLIER)
        return path, lines

    def claim(self) -> None:
        """Lock the run for this process, before anything is written to the folder.

        Raises UserError if another process trains the run, or the folder cannot be written.
        """
        if self._lock:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.of_run / "lock").open("a+")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be made ({error.strerror}); checkpoints go there") from None
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.5)
                    continue
                self._lock.seek(0)
                owner = self._lock.read().strip()
                raise UserError(
                    f"{self.of_run}: this run is being trained by {owner or 'another process'}; wait for it, or end it"
                ) from None
            except OSError:  # a file system without locks
                return
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        return by_steps or time.monotonic() - self._last >= self.every_seconds

    def newest(self) -> tuple[Path | None, list[str]]:
        """Return the newest complete checkpoint, and lines about others that are not resumed.

        A finished run is resumed only if nothing has changed: the stage runs again to measure, say, another strategy.
        """
        lines: list[str] = []
        for path, _, manifest in self._whole(lines):
            if self._of_other_finished(manifest):
                return None, [*lines, f"{path} is of a finished run; training starts over"]
            return path, lines
        return None, [*lines, *self._of_other_configs()]

    def onward(self, named: Path) -> tuple[Path, list[str]]:
        """Return the newest complete checkpoint that continues from `named`, or `named` itself, and lines about others.

        So a preempted run, restarted with the same command, keeps its progress. `named` is never deleted. Raises
        UserError if training cannot resume from it.
        """
        try:
            begin, manifest = read(named)
        except CorruptCheckpoint as error:
            raise UserError(f"train.resume: {named}: {error}; name another checkpoint, or use auto") from None
        if faults := differences(manifest["resume_key"], self.resume_key):
            raise UserError(
                f"train.resume: {named} cannot be resumed, since {'; '.join(faults)}; put it back as it was, or set "
                "resume: auto to start over"
            )
        self._named = named.resolve()
        lines: list[str] = []
        for path, state, manifest in self._whole(lines, after=begin.step):
            if self._of_other_finished(manifest):
                lines.append(f"{path} is of a finished run; training starts over from {named}")
                self._finished.unlink()
                for newer in newest_first(self.folder):
                    if newer > path_of(self.folder, begin.step):
                        set_aside(newer, EARLIER)
                break
            # All checkpoints of a folder share the resume key, but not their history, so the losses are compared.
            if torch.equal(state.loop["loss"][: begin.step], begin.loop["loss"]):
                return path, [*lines, f"{path} continues from {named}, which train.resume names"]
            aside = set_aside(path, EARLIER).name
            why = f"it does not continue from {named}, which train.resume names"
            lines.append(f"{path} is passed over: {why}; it is now {aside}")
        return named, lines

    def _whole(self, lines: list[str], after: int = 0) -> Iterator[tuple[Path, State, dict[str, Any]]]:
        """Yield complete checkpoints after step `after`, the newest first; set damaged ones aside, with a line."""
        for path in newest_first(self.folder):
            if path <= path_of(self.folder, after):
                return
            try:
                yield path, *read(path)
            except CorruptCheckpoint as error:
                aside = set_aside(path, DAMAGED).name
                lines.append(f"{path} is passed over: {error}; it is now {aside}")

    def _of_other_finished(self, manifest: dict[str, Any]) -> bool:
        """Return whether this run is finished, and something has changed since the checkpoint of this manifest."""
        return self._finished.exists() and bool(manifest["run_fingerprint"] != self.run_fingerprint)

    def write(self, state: State) -> None:
        """Write `state` in a thread, and delete checkpoints older than the kept ones. Waits for the previous write."""
        self.wait()
        self._last = time.monotonic()
        self._writing = threading.Thread(target=self._write, args=(state,), daemon=False)
        self._writing.start()

    def mark_finished(self) -> None:
        """Record that the adapter is published."""
        self.wait()
        self._finished.touch()

    def wait(self) -> None:
        """Wait until the last `write` is on disk. Raises UserError if it failed."""
        if self._writing:
            self._writing.join()
            self._writing = None
        if self._failure:
            failure, self._failure = self._failure, None
            raise UserError(f"{self.folder}: no checkpoint could be written ({failure}); make room there") from failure

    def _write(self, state: State) -> None:
        try:
            written = write(self.folder, state, self.resume_key, self.run_fingerprint)
            self.size = written.stat().st_size
            own = [path for path in newest_first(self.folder) if path <= written]
            kept = [*own[: self.keep], *([path_of(self.folder, state.best_step)] if state.best_step else [])]
            earlier = self.folder.glob(f"{EARLIER}-*{SUFFIX}") if len(own) >= self.keep else []
            for path in [*own, *earlier]:
                if path not in kept and path.resolve() != self._named and _is_whole(path):
                    path.unlink(missing_ok=True)
        except (OSError, SafetensorError, UserError) as error:
            self._failure = error

    def _of_other_configs(self) -> Iterator[str]:
        """Yield a line on why the newest unfinished checkpoint of another config is not resumed, if there is one."""
        others = [each for each in self.of_run.glob("*/") if each != self.folder and not (each / FINISHED).exists()]
        for path in self._newest_of_each(others)[:1]:
            try:
                manifest = header(path, pauses=())
            except CorruptCheckpoint as error:
                yield f"{path} is not resumed: {error}; training starts over"
            except UnreadCheckpoint as error:
                yield f"{path} is not resumed: {error.why}; training starts over"
            else:
                if manifest["step"] < manifest["steps"]:
                    why = "; ".join(differences(manifest["resume_key"], self.resume_key))
                    yield f"{path} is not resumed, since {why}; training starts over"

    def _newest_of_each(self, folders: Iterable[Path]) -> list[Path]:
        """Return the last written checkpoint of each folder, the newest first."""
        written = [
            max(paths, key=lambda path: path.lstat().st_mtime)
            for folder in folders
            if (paths := [*folder.glob(f"step-*{SUFFIX}")])
        ]
        return sorted(written, key=lambda path: path.lstat().st_mtime, reverse=True)


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint so that it is not resumed, and return its new path; `why` is DAMAGED or EARLIER."""
    names = (f"{why}-{path.name}", *(f"{why}-{path.stem}.{number}{SUFFIX}" for number in range(1, 10_000)))
    target = next(each for name in names if not os.path.lexists(each := path.with_name(name)))
    path.rename(target)
    return target


def _is_whole(path: Path) -> bool:
    """Return whether a file is a complete checkpoint, which may be deleted when it is old."""
    try:
        header(path, pauses=())
    except (CorruptCheckpoint, UserError):
        return False
    return True


def differences(recorded: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return a text for each difference of two resume keys, as in `train.seed was 1 and is 2`.

    An omitted key has its neutral value.
    """
    return [_difference(*each) for each in _differing(_whole(recorded), _whole(wanted))]


def _whole(resume_key: dict[str, Any]) -> dict[str, Any]:
    """Return a resume key with its omitted settings."""
    settings = {key.removeprefix(SETTING): value for key, value in resume_key.items() if key.startswith(SETTING)}
    others = {key: value for key, value in resume_key.items() if not key.startswith(SETTING)}
    return others | {f"{SETTING}{key}": value for key, value in filled(TrainingPlan, settings).items()}


def _differing(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, other value) of each difference of two objects, down to the keys of their sections."""
    if isinstance(before, dict) and isinstance(now, dict) and before and now:
        for inner in sorted(before.keys() | now.keys()):
            yield from _differing(before.get(inner), now.get(inner), f"{key}.{inner}" if key else inner)
    elif before != now:
        yield key, before, now


def _difference(key: str, before: Any, now: Any) -> str:
    if not key.startswith(SETTING):
        return f"the {key} is another"
    if shown(before) == shown(now):  # both are cut
        return f"{key} is another"
    return f"{key} was {shown(before)} and is {shown(now)}"
