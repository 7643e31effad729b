"""Facts of this machine and this environment, gathered in a fraction of a second and without loading torch."""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerolora.errors import UserError
from zerolora.fetch.weight_store import store_folder
from zerolora.machine import devices, toolchain
from zerolora.machine.submit_host import submits
from zerolora.types import Device

LOCK = Path("envs/requirements.lock")
METADATA = re.compile(r"(.+?)-(\d[^-]*)(?:-py\d[\d.]*)?\.(?:dist|egg)-info")
"""Name and version in the name of a package's metadata; a setuptools without wheel writes egg-info."""
WEIGHT_STORE = "weight store"
FOLDERS = ("results", "work", WEIGHT_STORE, ".dvc/cache")
"""Folders that the workflow writes to: results, weights and checkpoints, base models, DVC's cache."""
SLURM_SECONDS = 5  # that Slurm's commands may take to answer


@dataclass(frozen=True)
class Torch:
    """The installed torch."""

    release: str
    cuda: str | None
    """Version of CUDA that it is built for."""
    fault: str | None
    """Why GPUs cannot use it."""
    architectures: tuple[str, ...]
    """GPU architectures that it has kernels for; empty if it is built for CPUs, or unknown."""


@dataclass(frozen=True)
class GpuHere:
    """A visible GPU."""

    name: str
    memory: int
    """Bytes."""
    capability: tuple[int, int]
    fault: str | None
    """Why torch has no kernels for it."""
    used: int | None
    """Bytes in use by any process; None if unknown."""


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver."""

    version: str | None
    """None if unknown."""
    cuda: tuple[int, int] | None
    """Newest version of CUDA that it supports; None if unknown."""
    fault: str | None
    """Why the installed torch cannot use it, or why it lists no GPUs."""


@dataclass(frozen=True)
class Lock:
    """The installed packages, compared with envs/requirements.lock."""

    pinned: int
    missing: tuple[str, ...]
    """As name==version."""
    other: tuple[str, ...]
    """Installed in another version, as in `torch 2.11.0 instead of 2.13.0`."""


@dataclass(frozen=True)
class FileSystem:
    """A file system that some folders are on."""

    folders: tuple[str, ...]
    free: int


@dataclass(frozen=True)
class Partition:
    """A partition of a Slurm cluster."""

    name: str
    nodes: int
    memory: int
    """Bytes of a node."""
    gpus: int
    """GPUs of a node."""


@dataclass(frozen=True)
class Slurm:
    """The Slurm cluster whose commands are installed."""

    partitions: tuple[Partition, ...]
    """The same name once for each kind of node."""
    fault: str | None
    """Why sinfo gives no partitions."""
    accounting: bool
    """Whether sacct answers."""


@dataclass(frozen=True)
class Machine:
    """All facts of a machine that the checks read."""

    host: str
    python: str
    lock: Lock | None
    """None where the project has no lock file."""
    torch: Torch | None
    driver: Driver | None
    gpus: tuple[GpuHere, ...]
    tools: tuple[str, ...]
    """Tools that compile, only those that are here."""
    cores: int
    memory: int
    """Bytes of host memory."""
    available: int
    """Bytes of host memory that no process uses."""
    disks: tuple[FileSystem, ...]
    slurm: Slurm | None
    submits: bool
    """Whether jobs are submitted from here to other machines, by a cluster that answers."""


def packages(lock: Path = LOCK) -> Lock | None:
    """Return the comparison of the installed packages with a lock file; None without the file."""
    if not lock.is_file():
        return None
    pins = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE))
    installed = _installed()
    missing, other = [], []
    for name, version in pins.items():
        here = installed.get(_normal(name))
        if here is None:
            missing.append(f"{name}=={version}")
        elif here.partition("+")[0] != version:  # a build of torch has a suffix, as in 2.13.0+cu126
            other.append(f"{name} {here} instead of {version}")
    return Lock(len(pins), tuple(missing), tuple(other))


def _installed() -> dict[str, str]:
    """Return the version of each installed package by its normalized name, from the names of its metadata's folder:
    reading the metadata of hundreds of packages would take longer than all other checks."""
    result: dict[str, str] = {}
    for directory in reversed(sys.path):
        folders = Path(directory).iterdir() if Path(directory).is_dir() else ()
        for name, version in (match.groups() for path in folders if (match := METADATA.fullmatch(path.name))):
            result[_normal(name)] = version
    return result


def _normal(name: str) -> str:
    """Return a package's name as the packaging specification normalizes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def torch_here() -> Torch | None:
    """Return the installed torch; None without one."""
    try:
        release, cuda = devices.torch_build()
    except UserError:
        return None
    return Torch(release, cuda, devices.build_fault(), devices.architectures(cuda) if cuda else ())


def gpus_here(torch: Torch | None) -> tuple[Driver | None, tuple[GpuHere, ...]]:
    """Return the driver and the visible GPUs."""
    library = devices.driver_library()
    if library is None:
        return None, ()
    fault = devices.old_driver(torch.release, torch.cuda, library) if torch and torch.cuda else None
    shown = devices.visible(library)
    if isinstance(shown, int):
        fault, shown = fault or devices.gpu_fault(shown), []
    used = devices.memory_in_use()
    gpus = (
        GpuHere(gpu.name, gpu.memory, gpu.capability, devices.unsupported(gpu.capability, gpu.name), used.get(gpu.uuid))
        for gpu in shown
    )
    return Driver(devices.driver_version(), devices.newest_cuda(library), fault), tuple(gpus)


def disks(folders: tuple[str, ...] = FOLDERS) -> tuple[FileSystem, ...]:
    """Return the free bytes of each file system that the folders are, or will be, on."""
    on: dict[int, list[str]] = {}
    free: dict[int, int] = {}
    for folder in folders:
        directory = store_folder() if folder == WEIGHT_STORE else Path(folder)
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        device = existing.stat().st_dev
        on.setdefault(device, []).append(folder)
        free[device] = shutil.disk_usage(existing).free
    return tuple(FileSystem(tuple(names), free[device]) for device, names in on.items())


def slurm_here() -> Slurm | None:
    """Return the Slurm cluster; None where sbatch is not installed."""
    if shutil.which("sbatch") is None:
        return None
    text, fault = _answer("sinfo", "--noheader", "--format=%R|%D|%m|%G")
    try:
        partitions = tuple(map(partition, text.splitlines()))
    except ValueError:
        partitions, fault = (), f"lists partitions in another form: {text.splitlines()[0][:80]}"
    _, unaccounted = _answer("sacct", "--allocations", "--noheader", "--user=nobody")
    return Slurm(partitions, fault or (None if partitions else "lists no partition"), unaccounted is None)


def partition(line: str) -> Partition:
    """Return a partition from sinfo's name, nodes, MB and GRES of a node, as in `gpu|4|515000+|gpu:a100:8`.

    A `+` means "at least"; a GRES counts its GPUs by type.
    """
    name, nodes, memory, resources = line.split("|", 3)
    gpus = re.findall(r"(?:^|,)gpu:(?:[^:,()]+:)?(\d+)", resources)
    return Partition(name, int(nodes), int(memory.rstrip("+")) * 2**20, sum(map(int, gpus)))


def _answer(*command: str) -> tuple[str, str | None]:
    """Return (output, fault) of one of Slurm's commands."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "", f"does not answer within {SLURM_SECONDS} s"
    except OSError:
        return "", "is not installed"
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"exit code {done.returncode}"]
    return done.stdout, last[0].removeprefix(f"{command[0]}: ") if done.returncode else None


def tools() -> tuple[str, ...]:
    """Return the names of the tools that compile here."""
    directory = toolchain.toolkit()
    version = toolchain.toolkit_version(directory) if directory else None
    headers = (toolchain.headers() / "Python.h").is_file()
    here = {"c++": toolchain.compiler(), "Python.h": headers, "ninja": toolchain.ninja(), f"CUDA {version}": version}
    return tuple(name for name, usable in here.items() if usable)


def this_machine(job: Device | None = None) -> Machine:
    """Return the facts of this machine. In a `job` on this device, compilers and Slurm are left out, whose commands
    take a while, and on CPUs the driver, too, which then stays unused."""
    torch = torch_here()
    driver, gpus = (None, ()) if job == "cpu" else gpus_here(torch)
    slurm = slurm_here() if job is None else None
    memory = psutil.virtual_memory()
    return Machine(
        host=platform.node(),
        python=platform.python_version(),
        lock=packages(),
        torch=torch,
        driver=driver,
        gpus=gpus,
        tools=tools() if job is None else (),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=memory.total,
        available=memory.available,
        disks=disks(),
        slurm=slurm,
        submits=submits() and slurm is not None and slurm.fault is None,
    )
