"""Checkpoints: the whole adapter, its moments and the loop's place in one small file of any stage and world size.

    work/checkpoints/<run>/<key>/step-00000060.safetensors

`key` is a hash of everything that the losses depend on (identity.py), so what is found in a folder may be resumed. The
file's header carries a manifest: the step, a sha256 of each tensor, and what was trained on what. A file appears whole
or not at all (written beside, fsync, rename), and is written by a thread while training goes on.
"""

import fcntl
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zerolora.errors import UserError, shown
from zerolora.files import canonical, readable

KEPT = 2
LOCK_SECONDS = 10  # that a predecessor may take to die
FORMAT = 2
SUFFIX = ".safetensors"
FINISHED = "finished"  # beside the checkpoints of a run whose adapter is published


class CorruptCheckpoint(Exception):
    """A file that is no whole checkpoint; the message says why."""


@dataclass
class State:
    """Where training stands after `step` optimizer steps."""

    step: int
    parts: dict[str, dict[str, torch.Tensor]]
    """Adapter weights and moments: {part: {parameter: fp32 tensor}}."""
    updates: int
    """Updates of the optimizer; fewer than steps if fp16 overflowed."""
    loop: dict[str, torch.Tensor]
    """What the loop has added up: fp64 tensors."""
    seconds: float
    """Seconds of training so far, loading and pauses not counted."""
    resumes: int = 0
    best_step: int | None = None
    """The step of the lowest validation loss so far; its checkpoint is kept."""
    best: dict[str, torch.Tensor] = field(default_factory=dict)
    """The adapter after that step; empty if none is kept."""
    loss_scale: dict[str, float] = field(default_factory=dict)


def differences(recorded: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return one text for each thing that differs, as in `train.seed was 1 and is 2`."""
    return [
        f"{key} was {shown(recorded.get(key))} and is {shown(wanted.get(key))}"
        if key.startswith("train.")
        else f"the {key} is another"
        for key in sorted(recorded.keys() | wanted.keys())
        if recorded.get(key) != wanted.get(key)
    ]


class Checkpoints:
    """The checkpoints of one run and one `binding`."""

    def __init__(self, of_run: Path, bound: dict[str, Any], exact: dict[str, Any], settings: dict[str, Any]) -> None:
        """`of_run` holds the run's checkpoints; `exact` names what makes a *finished* run the same run."""
        self.of_run, self.bound, self.exact = of_run, bound, exact
        self.every_steps, self.every_seconds = settings["checkpoint_steps"], 60 * settings["checkpoint_minutes"]
        self._last = time.monotonic()
        self.folder = of_run / hashlib.sha256(canonical(bound).encode()).hexdigest()[:16]
        self._finished = self.folder / FINISHED
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def choose(self, resume: str) -> tuple[Path | None, list[str]]:
        """Return the checkpoint that training goes on from, None to start anew, and what there is to say of others.

        `resume`: auto = the newest whole one of this run and config; never; or a file. Raises UserError if that file
        is no checkpoint of this config, or the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.of_run / "lock").open("a+")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be made ({error.strerror}); checkpoints go there") from None
        self._take_lock()
        path, said = self.newest() if resume == "auto" else (None, [])
        if resume not in ("auto", "never"):
            path = self.given(Path(resume))
        if path is None:
            self._finished.unlink(missing_ok=True)
            for old in _newest_first(self.folder):
                old.unlink(missing_ok=True)
        return path, said

    def _take_lock(self) -> None:
        """Keep others from training the same run, until this process ends. Raises UserError if another one does."""
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
                who = self._lock.read().strip()
                raise UserError(
                    f"{self.of_run}: this run is being trained by {who or 'another process'}; wait for it, or end it"
                ) from None
            except OSError:  # a file system without locks
                return
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is due after `step` steps."""
        often = self.every_steps is not None and step % self.every_steps == 0
        return often or time.monotonic() - self._last >= self.every_seconds

    def newest(self) -> tuple[Path | None, list[str]]:
        """Return the newest whole checkpoint, and what there is to say about others.

        A finished run is taken up only if nothing at all has changed: what made the stage run again, as another
        strategy, is to be measured anew.
        """
        said: list[str] = []
        for path in _newest_first(self.folder):
            try:
                _, manifest = read(path)
            except CorruptCheckpoint as error:
                said.append(f"{path} is passed over: {error}")
                continue
            if self._finished.exists() and manifest["exact"] != self.exact:
                return None, [*said, f"{path} is of a finished run; training starts anew"]
            return path, said
        return None, [*said, *self._of_others()]

    def given(self, path: Path) -> Path:
        """Return `path`, a checkpoint that the config names. Raises UserError if training cannot go on from it."""
        try:
            _, manifest = read(path)
        except CorruptCheckpoint as error:
            raise UserError(f"train.resume: {path}: {error}; name another checkpoint, or write auto") from None
        faults = differences(manifest["binding"], self.bound)
        if faults:
            raise UserError(
                f"train.resume: {path} cannot be resumed, since {'; '.join(faults)}; put it back as it was, or write "
                "resume: auto to start anew"
            )
        return path

    def write(self, state: State) -> None:
        """Write `state` in a thread, and remove all but the last checkpoints. Waits for the one before."""
        self.wait()
        self._last = time.monotonic()
        self._writing = threading.Thread(target=self._write, args=(state,), daemon=False)
        self._writing.start()

    def mark_finished(self) -> None:
        """Note that what was trained is published."""
        self.wait()
        self._finished.touch()

    def wait(self) -> None:
        """Wait until what was handed to `write` is on disk. Raises UserError if it could not be written."""
        if self._writing:
            self._writing.join()
            self._writing = None
        if self._failure:
            failure, self._failure = self._failure, None
            raise UserError(f"{self.folder}: no checkpoint could be written ({failure}); make room there") from failure

    def _write(self, state: State) -> None:
        try:
            written = write(self.folder, state, self.bound, self.exact)
            others = [path for path in _newest_first(self.folder) if path != written]
            # What is newer than this was passed over; it must not push whole ones out.
            kept = [path for path in others if path < written][: KEPT - 1]
            kept += [path for path in others if state.best_step and path.name == _name(state.best_step)]
            for path in set(others) - set(kept):
                path.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            self._failure = error

    def _of_others(self) -> Iterable[str]:
        """Say why the newest unfinished checkpoint of another config is not resumed, if there is one."""
        folders = [folder for folder in self.of_run.glob("*/") if not (folder / FINISHED).exists()]
        others = [path for folder in folders if folder != self.folder for path in _newest_first(folder)]
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[:1]:
            try:
                manifest = header(path)
            except CorruptCheckpoint:
                return
            if manifest["step"] < manifest["steps"]:
                why = "; ".join(differences(manifest["binding"], self.bound))
                yield f"{path} is not resumed, since {why}; training starts anew"


def write(folder: Path, state: State, bound: dict[str, Any], exact: dict[str, Any]) -> Path:
    """Write a checkpoint, whole or not at all, and return its path."""
    tensors = {
        **{f"{part}/{name}": tensor for part, named in state.parts.items() for name, tensor in named.items()},
        **{f"best/{name}": tensor for name, tensor in state.best.items()},
        **{f"loop/{name}": tensor for name, tensor in state.loop.items()},
    }
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    manifest = {
        "format": FORMAT,
        "step": state.step,
        "steps": exact["steps"],
        "updates": state.updates,
        "seconds": state.seconds,
        "resumes": state.resumes,
        "best_step": state.best_step,
        "loss_scale": state.loss_scale,
        "binding": bound,
        "exact": exact,
        "tensors": {name: _sha256(tensor) for name, tensor in tensors.items()},
    }
    text = canonical(manifest)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _name(state.step)
    beside = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        save_file(tensors, beside, {"manifest": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
        readable(beside)
        _sync(beside)
        beside.replace(path)
        _sync(folder)
    finally:
        beside.unlink(missing_ok=True)
    return path


def read(path: Path) -> tuple[State, dict[str, Any]]:
    """Return a checkpoint and its manifest, every byte of it checked. Raises Torn if it is not whole."""
    manifest = header(path)
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpoint(f"not a whole safetensors file ({error})") from None
    for name, expected in manifest["tensors"].items():
        if name not in tensors or _sha256(tensors[name]) != expected:
            raise CorruptCheckpoint(f"{name} is not what was written")
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts.setdefault(part, {})[rest] = tensor
    loop, best = parts.pop("loop", {}), parts.pop("best", {})
    counts = {key: manifest[key] for key in ("step", "updates", "seconds", "resumes", "best_step", "loss_scale")}
    return State(parts=parts, loop=loop, best=best, **counts), manifest


def header(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest without reading its tensors. Raises Torn if it has none that is whole."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        text = metadata["manifest"]
        if hashlib.sha256(text.encode()).hexdigest() != metadata["sha256"]:
            raise CorruptCheckpoint("its manifest is not what was written")
        manifest = json.loads(text)
    except FileNotFoundError:
        raise CorruptCheckpoint("there is no such file") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CorruptCheckpoint(f"not a whole checkpoint ({error})") from None
    if manifest["format"] != FORMAT:
        raise CorruptCheckpoint(f"written in format {manifest['format']}, this version reads {FORMAT}")
    return manifest


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(step: int) -> str:
    return f"step-{step:08d}{SUFFIX}"


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"step-*{SUFFIX}"), reverse=True)


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().data).hexdigest()
