"""The rows of `zerolora check`: what is here, what the config needs, and the remedy where the two differ."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zerolora.check.machine import Driver, GpuHere, Machine, Partition
from zerolora.machine import devices
from zerolora.units import GIB, byte_size, counted, gib

if TYPE_CHECKING:  # a job's log has the rows without needs, and reads no config
    from zerolora.check.needs import Gpus, Needs

Mark = Literal["right", "missing", "note"]

MEMORY_SHARE = 0.9
"""Share of a config's memory that must be there: drivers and kernels reserve some (planner/hardware.py, Gpu.memory)."""
LISTED = 3  # packages in a remedy


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    mark: Mark
    """`missing`: a run of the config cannot work without it. `note`: not needed, or not to be judged from here."""
    here: str
    needed: str = ""
    """What the config needs; empty without a config, or if it needs none."""
    remedy: str = ""


def rows(machine: Machine, needs: "Needs | None") -> list[Check]:
    """Return all rows, in the order of the table."""
    return [
        _python(machine),
        *_lock(machine),
        *_uninstalled(machine, needs),
        _torch(machine, needs),
        _driver(machine, needs),
        *_gpus(machine, needs),
        *_compilers(machine, needs),
        *_disks(machine, needs),
        _memory(machine, needs),
        *_slurm(machine, needs),
    ]


def _python(machine: Machine) -> Check:
    return Check("python", "right", machine.python)


def _lock(machine: Machine) -> Iterator[Check]:
    """Yield the comparison with the lock, where there is one."""
    if machine.lock is None:
        return
    lock, needed = machine.lock, "envs/requirements.lock"
    here = f"{lock.pinned - len(lock.missing) - len(lock.other)} of {counted(lock.pinned, 'package')}"
    if lock.missing:
        yield Check("packages", "missing", here, needed, f"{_some(lock.missing)} missing; run `make`")
    elif lock.other:
        text = f"{_some(lock.other)}; the lock's versions are the tested ones: run `make`"
        yield Check("packages", "note", here, needed, text)
    else:
        yield Check("packages", "right", here, needed)


def _uninstalled(machine: Machine, needs: "Needs | None") -> Iterator[Check]:
    for package, why in needs.uninstalled.items() if needs else ():
        yield _judged("package", "none", package, why, machine)


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _torch(machine: Machine, needs: "Needs | None") -> Check:
    torch = machine.torch
    if torch is None:
        return Check("torch", "missing", "none", "torch", "torch is not installed; run `make`")
    built = f"CUDA {torch.cuda}" if torch.cuda else "no CUDA"
    kernels = f", kernels for {', '.join(torch.architectures)}" if torch.architectures else ""
    here = f"{torch.release}, {built}{kernels}"
    if needs is None or needs.gpus is None:
        return Check("torch", "right", here)
    from zerolora.planner.machine_limits import without_kernels

    reason = torch.fault or next(filter(None, map(without_kernels, needs.hardware)), None)
    needed = f"CUDA, kernels for {needs.gpus.capability}"
    return _judged("torch", here, needed, reason, machine)


def _driver(machine: Machine, needs: "Needs | None") -> Check:
    driver = machine.driver
    here = "none" if driver is None else _driver_text(driver)
    if needs is None or needs.gpus is None:
        return Check("driver", "note" if driver is None else "right", here)
    built = machine.torch.cuda if machine.torch else None
    needed = "an NVIDIA driver" if built is None else f"CUDA {built.partition('.')[0]}"
    if driver is None:
        reason = f"no NVIDIA driver found ({devices.LIBRARY}); run where the GPUs are, or set hardware.device: cpu"
        return _judged("driver", here, needed, reason, machine)
    return _judged("driver", here, needed, driver.fault, machine)


def _driver_text(driver: Driver) -> str:
    version = driver.version or "version unknown"
    return version if driver.cuda is None else f"{version}, up to CUDA {driver.cuda[0]}.{driver.cuda[1]}"


def _gpus(machine: Machine, needs: "Needs | None") -> Iterator[Check]:
    """Yield a row for the GPUs of each kind."""
    wanted = needs.gpus if needs else None
    needed = "" if wanted is None else f"{wanted.count} × {gib(wanted.memory)}, {wanted.capability}"
    if not machine.gpus:
        names = os.environ.get(devices.VISIBLE)
        here = "none" if names is None else f"none visible ({devices.VISIBLE}={names})"
        reason = None if wanted is None else f"{counted(wanted.count, 'GPU')} needed; run where the GPUs are"
        yield _judged("GPUs", here, needed, reason, machine) if wanted else Check("GPUs", "note", here)
        return
    kinds: dict[tuple[str, int, tuple[int, int]], list[GpuHere]] = {}
    for gpu in machine.gpus:
        kinds.setdefault((gpu.name, gpu.memory, gpu.capability), []).append(gpu)
    for kind in kinds.values():
        here = _kind_text(kind)
        reason = None if wanted is None else _unfit(machine, kind[0], wanted)
        if wanted is None:
            yield Check("GPUs", "right", here)
        elif reason is None and any((gpu.used or 0) > GIB for gpu in kind):
            text = "other programs use their memory; jobs of this project wait only for each other (nvidia-smi)"
            yield Check("GPUs", "note", here, needed, text)
        else:
            yield _judged("GPUs", here, needed, reason, machine)


def _kind_text(gpus: list[GpuHere]) -> str:
    used = [gpu.used for gpu in gpus]
    if None in used:
        load = ""
    else:
        busy = [byte_size(each) for each in used if each is not None and each > GIB]
        load = f", {'; '.join(busy)} in use" if busy else ", free"
    first = gpus[0]
    capability = devices.capability_text(first.capability)
    return f"{len(gpus)} × {first.name}, {gib(first.memory)}, {capability}{load}"


def _unfit(machine: Machine, gpu: GpuHere, wanted: "Gpus") -> str | None:
    """Return why GPUs of this kind do not fit the config."""
    if gpu.fault:
        return gpu.fault
    if len(machine.gpus) < wanted.count:
        needed = counted(wanted.count, "GPU")
        return f"{needed} needed and {len(machine.gpus)} visible; ask for more, or use fewer train.ranks_per_node"
    if gpu.memory < MEMORY_SHARE * wanted.memory:
        return f"less memory than hardware.gpu_memory; set gpu_memory: {int(gpu.memory / GIB)}GiB"
    capability = float(devices.capability_text(gpu.capability))
    if capability < wanted.capability:
        return f"lower than hardware.compute_capability; set compute_capability: {capability}"
    return None


def _compilers(machine: Machine, needs: "Needs | None") -> Iterator[Check]:
    here = ", ".join(machine.tools) or "none"
    compiling = needs.compiling if needs else ()
    if not compiling:
        yield Check("compilers", "right" if machine.tools else "note", here)
    for each in compiling:
        if each.fault and not each.certain:
            yield Check("compilers", "note", here, each.what, f"render.strategy: auto may choose it: {each.fault}")
        else:
            yield _judged("compilers", here, each.what, each.fault, machine)


def _disks(machine: Machine, needs: "Needs | None") -> Iterator[Check]:
    for disk in machine.disks:
        here = f"{gib(disk.free)} free for {', '.join(disk.folders)}"
        if needs is None:
            yield Check("disk", "right", here)
            continue
        needed = sum(size for folder, size in needs.written.items() if folder in disk.folders)
        ours = {"work", "results"} & {*disk.folders}
        unknown = [f"{_some(needs.unknown)}, known once fetched"] if needs.unknown and ours else []
        if needs.unprepared and ours:
            unknown.append(f"a teacher's probabilities on {_some(needs.unprepared)}, known once prepared")
        text = " and ".join([*([gib(needed)] if needed or not unknown else []), *unknown])
        if needed > disk.free:
            remedy = f"{gib(needed - disk.free)} short; free some, or put these folders on a larger disk"
            yield Check("disk", "missing", here, text, remedy)
        else:
            yield Check("disk", "right", here, text)


def _memory(machine: Machine, needs: "Needs | None") -> Check:
    here = f"{gib(machine.memory)}, {gib(machine.available)} of it available; {counted(machine.cores, 'core')}"
    if needs is None:
        return Check("memory", "right", here)
    short = machine.memory < MEMORY_SHARE * needs.host_memory
    remedy = f"less than hardware.host_memory; set host_memory: {int(machine.memory / GIB)}GiB" if short else None
    return _judged("memory", here, gib(needs.host_memory), remedy, machine)


def _slurm(machine: Machine, needs: "Needs | None") -> Iterator[Check]:
    slurm = machine.slurm
    if slurm is None:
        yield Check("Slurm", "note", "sbatch is not installed")
        return
    if slurm.fault:
        text = f"jobs cannot be submitted from here (sinfo: {slurm.fault}); profiles/local needs no Slurm"
        yield Check("Slurm", "note", "does not answer", "", text)
        return
    wanted = needs.gpus if needs else None
    nodes = needs.nodes if needs else 1
    kinds = [each for each in slurm.partitions if wanted is None or each.gpus >= wanted.count]
    names = [_partition_text(each) for each in slurm.partitions]
    needed = "" if wanted is None else f"{counted(nodes, 'node')} × {counted(wanted.count, 'GPU')}"
    if needs is not None and not any(each.nodes >= nodes for each in kinds):
        remedy = f"no partition has {counted(nodes, 'such node')}; correct hardware, or use another cluster"
        yield Check("Slurm", "missing", "; ".join(names), needed or counted(nodes, "node"), remedy)
    else:
        yield Check("Slurm", "right", "; ".join(names), needed)
    if not slurm.accounting:
        text = "sacct does not answer, so the report cannot compare requests with use (docs/slurm.md)"
        yield Check("accounting", "note", "none", "", text)


def _partition_text(partition: Partition) -> str:
    gpus = f" × {counted(partition.gpus, 'GPU')}" if partition.gpus else ""
    return f"{partition.name}: {counted(partition.nodes, 'node')}{gpus}"


def _judged(name: str, here: str, needed: str, reason: str | None, machine: Machine) -> Check:
    """Return a row that is missing for a reason, if any; on a machine that only submits jobs, a note."""
    if reason is None:
        return Check(name, "right", here, needed)
    if machine.submits:
        return Check(name, "note", here, needed, f"nodes may differ, and each job checks its own; here {reason}")
    return Check(name, "missing", here, needed, reason)
