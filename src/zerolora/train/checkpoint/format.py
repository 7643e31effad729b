"""A checkpoint's file: tensors, and a manifest with a sha256 of each.

One safetensors file holds the whole fp32 adapter, its moments and the state of the loop, independent of ZeRO stage and
world size. Its header has the manifest: the step, the sha256 of each tensor, and the identity of the run. A file is
written beside its path, flushed and renamed, so it is never partial.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zerolora.errors import REMEDIES, UserError, shown
from zerolora.files import canonical, readable, sync_directory

VERSION = 3
SUFFIX = ".safetensors"
PAUSES = (1.0, 3.0, 6.0)
"""Seconds before reading again after an error of the operating system, such as a restart of the file server."""
CHUNK = 2**20
COUNTS = ("step", "updates", "seconds", "resumes", "best_step", "loss_scale")
"""Fields of State that are in the manifest."""
Read = TypeVar("Read")


class CorruptCheckpoint(Exception):
    """A file is not a complete checkpoint; the message has the reason."""


class UnreadCheckpoint(UserError):
    """A checkpoint cannot be read, but may be complete."""

    def __init__(self, path: Path, why: str, remedy: str) -> None:
        super().__init__(f"{path}: {why}; {remedy}")
        self.why = why


class OtherVersion(UnreadCheckpoint):
    """A complete checkpoint was written by another version of zerolora."""


class Manifest(BaseModel):
    """A checkpoint's manifest, without its format."""

    model_config = ConfigDict(strict=True)

    step: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=0)]
    updates: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    resumes: Annotated[int, Field(ge=0)]
    best_step: Annotated[int, Field(ge=0)] | None
    loss_scale: dict[str, float]
    resume_key: dict[str, Any]
    run_fingerprint: dict[str, Any]
    tensors: dict[str, str]


@dataclass
class State:
    """The state of training after `step` optimizer steps."""

    step: int
    parts: dict[str, dict[str, torch.Tensor]]
    """Adapter weights and moments: {part: {parameter: fp32 tensor}}."""
    updates: int
    """Updates of the optimizer; fewer than steps if fp16 overflowed."""
    loop: dict[str, torch.Tensor]
    """Losses, metrics and validations of the loop: fp64 tensors."""
    seconds: float
    """Seconds of training so far, without loading and pauses."""
    resumes: int = 0
    best_step: int | None = None
    """The step of the best validation so far, whose checkpoint is kept."""
    best: dict[str, torch.Tensor] = field(default_factory=dict)
    """The adapter after that step; empty if none is kept."""
    loss_scale: dict[str, float] = field(default_factory=dict)


def write(folder: Path, state: State, resume_key: dict[str, Any], run_fingerprint: dict[str, Any]) -> Path:
    """Write a checkpoint atomically and return its path. Raises OSError or SafetensorError."""
    tensors = {
        **{f"{part}/{name}": tensor for part, named in state.parts.items() for name, tensor in named.items()},
        **{f"best/{name}": tensor for name, tensor in state.best.items()},
        **{f"loop/{name}": tensor for name, tensor in state.loop.items()},
    }
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    manifest = {
        "format": VERSION,
        "steps": run_fingerprint["steps"],
        **{name: getattr(state, name) for name in COUNTS},
        "resume_key": resume_key,
        "run_fingerprint": run_fingerprint,
        "tensors": {name: _sha256(tensor) for name, tensor in tensors.items()},
    }
    text = canonical(manifest)
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, state.step)
    beside = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        save_file(tensors, beside, {"manifest": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
        readable(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
        sync_directory(folder)
    finally:
        beside.unlink(missing_ok=True)
    return path


def read(path: Path) -> tuple[State, dict[str, Any]]:
    """Return a checkpoint and its manifest, after checking every byte.

    Raises CorruptCheckpoint, OtherVersion, or UnreadCheckpoint if the operating system repeatedly fails to read it.
    """
    return _patiently(_read, path)


def read_chosen(path: Path, rank: int) -> State:
    """Return a checkpoint that rank 0 has chosen or written. Raises UserError if this rank cannot use it."""
    try:
        return read(path)[0]
    except CorruptCheckpoint as error:
        here = f"rank {rank} on {socket.gethostname()}"
        raise UserError(
            f"{path}: rank 0 has chosen it, and {here} cannot use it: {error}; put work/ on a file system that all "
            "nodes share, then run it again"
        ) from None


def header(path: Path, pauses: Sequence[float] | None = None) -> dict[str, Any]:
    """Return a checkpoint's manifest without reading its tensors. Raises as `read` does."""
    return _patiently(_header, path, pauses)


def _read(path: Path) -> tuple[State, dict[str, Any]]:
    manifest = _header(path)
    # A page of safetensors' mapping that cannot be read would kill the process (SIGBUS); here it is an OSError.
    with path.open("rb", buffering=0) as file:
        while file.read(CHUNK):
            pass
    try:
        with safe_open(path, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no dict)
    except SafetensorError as error:
        raise CorruptCheckpoint(f"not a whole safetensors file ({error})") from None
    if tensors.keys() != manifest["tensors"].keys():
        raise CorruptCheckpoint("its tensors are not those of its manifest")
    for name, expected in manifest["tensors"].items():
        if _sha256(tensors[name]) != expected:
            raise CorruptCheckpoint(f"{name} is not what was written")
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts.setdefault(part, {})[rest] = tensor
    loop, best = parts.pop("loop", {}), parts.pop("best", {})
    return State(parts=parts, loop=loop, best=best, **{name: manifest[name] for name in COUNTS}), manifest


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb", buffering=0) as file:
        file.read(CHUNK)  # raises OSError, which safetensors would report as a broken file
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
        text = metadata["manifest"]
        if hashlib.sha256(text.encode()).hexdigest() != metadata["sha256"]:
            raise CorruptCheckpoint("its manifest is not what was written")
        manifest: Any = json.loads(text)
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"not a whole checkpoint ({error})") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version != VERSION:
        formats = f"format {shown(version)}; this version reads {VERSION}"
        raise OtherVersion(
            path,
            f"another version of zerolora wrote this checkpoint ({formats})",
            "finish the run with that version, or set train.resume: never to train from the beginning",
        )
    if version != VERSION:
        raise CorruptCheckpoint(f"its format is {shown(version)}")
    try:
        Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise CorruptCheckpoint(f"{key} of its manifest: {first['msg']}") from None
    result: dict[str, Any] = manifest
    return result


def _patiently(action: Callable[[Path], Read], path: Path, pauses: Sequence[float] | None = None) -> Read:
    """Return the result of `action`, repeated after PAUSES while the operating system fails to read `path`."""
    for pause in (*(PAUSES if pauses is None else pauses), None):
        try:
            return action(path)
        except FileNotFoundError:
            raise CorruptCheckpoint("there is no such file") from None
        except OSError as error:
            if pause is None:
                remedy = REMEDIES.get(error.errno or 0, "look at that file, and run it again")
                why = error.strerror or str(error)
                raise UnreadCheckpoint(path, why, f"{remedy}; train.resume: never trains from the beginning") from None
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}{SUFFIX}"


def newest_first(folder: Path) -> list[Path]:
    """Return the paths of a folder's checkpoints; none if the folder does not exist.

    Raises UserError if the operating system cannot list it; Path.glob would return none.
    """
    try:
        paths = _patiently(lambda path: sorted(path.iterdir(), reverse=True), folder)
    except CorruptCheckpoint:
        return []
    return [path for path in paths if fnmatch(path.name, f"step-*{SUFFIX}")]


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()  # NumPy has no bf16
