"""The device of a config: hides GPUs if it is cpu, and explains in one line why a GPU cannot be used.

GPUs are listed by the library of NVIDIA's driver, in a fraction of a second and without torch. A process that has done
so must not fork children that use GPUs.
"""

import ctypes
import importlib.util
import os
import platform
import runpy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError, install_command
from zerolora.types import Device

if TYPE_CHECKING:
    import torch

GPU = "cuda"
"""torch's name for the devices that are GPUs."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The GPUs that CUDA shows a process, by number or identifier, separated by commas; unset, all of them."""
LIBRARY = "libcuda.so.1"
DRIVER_VERSION = Path("/sys/module/nvidia/version")
DRIVERS = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The first Linux driver for each major version of CUDA. Source: NVIDIA, CUDA Compatibility, "Minor Version
Compatibility"."""
ARCHITECTURES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "12.6": {
        "x86_64": ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
        "aarch64": ("sm_80", "sm_90"),
    },
    "13.0": {
        "x86_64": ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
        "aarch64": ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120"),
    },
    "13.2": {
        "x86_64": ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
        "aarch64": ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120"),
    },
}
"""Architectures of torch 2.13.0's wheels for Linux, by the CUDA version that they are built for and the machine's
processor. Source: pytorch/pytorch, .ci/manywheel/build_env_setup.py, TORCH_CUDA_ARCH_LIST_TABLE."""
BUILDS: Mapping[str, str | None] = {"cpu": None, "cu13": "13.0", "cu12": "12.6"}
"""The builds of torch that `make TORCH=…` installs, with the version of CUDA of each."""
DEFAULT_CUDA = "13.0"
"""CUDA of PyPI's wheels, and so of envs/requirements.lock."""
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
NAME_BYTES = 256


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that CUDA shows this process."""

    name: str
    capability: tuple[int, int]
    uuid: str
    """Identifies the GPU on its machine, whatever CUDA_VISIBLE_DEVICES says."""
    memory: int
    """Bytes."""
    maps_memory: bool
    """Whether CUDA can map memory into reserved addresses, which virtual GPUs cannot."""


def on_gpu(device: "torch.device") -> bool:
    """Return whether this is a GPU. Other modules ask here, so that a rehearsal can name another device (GPU)."""
    return device.type == GPU


def moved(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """Return a tensor of the host on a device. A GPU copies it from pinned memory, and the host does not wait.

    torch's allocator reuses the pinned memory only after the copy (c10/core/CachingDeviceAllocator.h).
    """
    if not on_gpu(device):
        return tensor.to(device)
    return tensor.new_empty(tensor.shape, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def obey(device: Device, gpus: int = 1) -> None:
    """Restrict this process, and those that it starts, to `device`. Call it before CUDA is used.

    For cpu, all GPUs are hidden. For cuda, raises UserError if fewer than `gpus` GPUs can be used.
    """
    if device == "cpu":
        os.environ[VISIBLE] = ""
    elif reason := fault(gpus):
        raise UserError(f"hardware.device is cuda, but {reason}")


def fault(gpus: int = 1, otherwise: str = "hardware.device: cpu") -> str | None:
    """Return why torch cannot use `gpus` GPUs here, with a remedy; None if it can.

    `otherwise` is the setting to compute on the CPU.
    """
    if reason := build_fault(otherwise):
        return reason
    library = driver_library()
    if library is None:
        return f"this machine has no NVIDIA driver ({LIBRARY}); run where the GPUs are, or use {otherwise}"
    release, built = torch_build()
    assert built is not None
    return old_driver(release, built, library) or gpu_fault(visible(library), gpus)


def build_fault(otherwise: str = "hardware.device: cpu") -> str | None:
    """Return why the installed torch is of no use to GPUs, with a remedy; None if it is built for CUDA."""
    release, built = torch_build()
    if built is not None:
        return None
    rocm = _torch_version().get("hip")
    other = "AMD's GPUs (ROCm), which zerolora does not use" if rocm else "CPUs alone"
    return (
        f"torch {release} is built for {other}; install a torch built for CUDA (`make TORCH=cu13` or `make TORCH=cu12` "
        f"on Linux, docs/gpu.md), or use {otherwise}"
    )


def gpu_fault(shown: list[VisibleGpu] | int, gpus: int = 1) -> str | None:
    """Return why `gpus` of the visible GPUs, or the error code of the driver, cannot be used, with a remedy."""
    names = os.environ.get(VISIBLE)
    limited = "" if names is None else f" ({VISIBLE}={names})"
    if isinstance(shown, int):
        return f"its NVIDIA driver cannot start (cuInit returned {shown}){limited}; does nvidia-smi list the GPUs?"
    if len(shown) < gpus:
        wanted = "a GPU is needed" if gpus == 1 else f"{gpus} GPUs are needed"
        return f"{wanted} and {len(shown) or 'none'} visible{limited}; ask for more, or correct hardware"
    return next((reason for gpu in shown if (reason := unsupported(gpu.capability, gpu.name))), None)


def old_driver(release: str, built: str, library: Any = None) -> str | None:
    """Return a message if this machine's driver, if any, is too old for torch `release`, `built` for this CUDA."""
    newest = newest_cuda(library or driver_library())
    needed = int(built.partition(".")[0])
    if newest is None or newest[0] >= needed:
        return None
    major, minor = newest
    install = f"`make TORCH=cu{major}`, docs/gpu.md" if f"cu{major}" in BUILDS else "an older release"
    return (
        f"the NVIDIA driver {driver_version() or 'here'} goes up to CUDA {major}.{minor}, and torch {release} is built "
        f"for CUDA {built}, which needs driver {DRIVERS.get(needed, 'a later one')} or later; update the driver, or "
        f"install a torch built for CUDA {major} ({install})"
    )


def newest_cuda(library: Any) -> tuple[int, int] | None:
    """Return the newest version of CUDA that a driver supports, as in (13, 0); None if unknown, or without a driver."""
    number = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return number.value // 1000, number.value % 1000 // 10


def driver_version() -> str | None:
    """Return the version of the loaded NVIDIA driver, as in 580.95.05; None if there is none, or if it is unknown."""
    return DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.is_file() else None


def visible(library: Any) -> list[VisibleGpu] | int:
    """Return the GPUs that CUDA shows this process, or the error code of a driver that cannot start."""
    no_device = 100  # CUDA_ERROR_NO_DEVICE
    if code := library.cuInit(0):
        return [] if code == no_device else int(code)
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    return [_gpu(library, number) for number in range(count.value)]


def memory_in_use() -> dict[str, int]:
    """Return the bytes that any process uses on each GPU of this machine, by UUID; empty if the driver's management
    library is missing. Starts no CUDA."""
    import pynvml

    result = {}
    try:
        pynvml.nvmlInit()
        try:
            for number in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                uuid = str(pynvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-").replace("-", "")
                result[uuid] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        pass
    return result


def unsupported(capability: tuple[int, int], name: str) -> str | None:
    """Return a message if torch has no kernels for a GPU of this compute capability."""
    release, built = torch_build()
    carried = architectures(built)
    if not carried or runs_on(capability, carried):
        return None
    carrier = f"torch {release}" if built else "the torch of envs/requirements.lock"
    others = (name for name, cuda in BUILDS.items() if cuda and cuda != built and runs_on(capability, of_wheel(cuda)))
    other = next(others, None)
    install = f"`make TORCH={other}`, docs/gpu.md" if other else "none of the locks has one"
    return (
        f"{name} has compute capability {capability_text(capability)}, and {carrier} carries kernels for "
        f"{', '.join(carried)}; use such a GPU, or install a torch that is built for this one ({install})"
    )


def runs_on(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Return whether a GPU can run kernels of one of these architectures, named as by torch.cuda.get_arch_list().

    Binaries (sm_) run on GPUs of the same major version and no lower minor one; PTX (compute_) is compiled for any
    later GPU. Source: NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
    """
    for each in architectures:
        major, minor = _numbers(each)
        if each.startswith("compute_") and capability >= (major, minor):
            return True
        if each.startswith("sm_") and capability[0] == major and capability[1] >= minor:
            return True
    return False


def torch_build() -> tuple[str, str | None]:
    """Return torch's version and the CUDA version that it is built for, if any. Does not load torch."""
    version = _torch_version()
    return str(version["__version__"]), version["cuda"]


def _torch_version() -> Mapping[str, Any]:
    """Return the variables of torch's module `version`."""
    if "torch" in sys.modules:
        loaded: Mapping[str, Any] = vars(sys.modules["torch"].version)
        return loaded
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError(f"torch is not installed; run {install_command('torch')}")
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def visible_names(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES; None if it is unset. CUDA ignores entries from a -1 on."""
    text = environment.get(VISIBLE)
    if text is None:
        return None
    names = [each.strip() for each in text.split(",") if each.strip()]
    return names[: names.index("-1")] if "-1" in names else names


def architectures(built: str | None) -> tuple[str, ...]:
    """Return the architectures of the installed torch, built for this version of CUDA; of a CPU build, those of
    envs/requirements.lock. Empty if unknown until torch is loaded."""
    torch = sys.modules.get("torch")
    flags = getattr(getattr(torch, "_C", None), "_cuda_getArchFlags", None)
    if built is not None and flags is not None:
        return tuple(str(flags()).split())
    return of_wheel(built or DEFAULT_CUDA)


def of_wheel(cuda: str, machine: str | None = None) -> tuple[str, ...]:
    """Return the architectures of the locks' wheel for a version of CUDA, and this machine's kind of processor by
    default; empty if unknown."""
    return ARCHITECTURES.get(cuda, {}).get(machine or platform.machine(), ())


def driver_library() -> Any:
    """Return the driver's library; None without a driver."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def _gpu(library: Any, number: int) -> VisibleGpu:
    handle, name, uuid = ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES), (ctypes.c_ubyte * 16)()
    library.cuDeviceGet(ctypes.byref(handle), number)
    library.cuDeviceGetName(name, NAME_BYTES, handle)
    library.cuDeviceGetUuid_v2(uuid, handle)
    values = []
    for attribute in (MAJOR, MINOR, MAPS_MEMORY):
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        values.append(value.value)
    major, minor, maps = values
    memory = ctypes.c_size_t()
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    shown = name.value.decode(errors="replace")
    return VisibleGpu(shown, (major, minor), bytes(uuid).hex(), memory.value, bool(maps))


def _numbers(architecture: str) -> tuple[int, int]:
    """Return the capability of an architecture, as in sm_90a: (9, 0)."""
    digits = "".join(each for each in architecture.partition("_")[2] if each.isdigit())
    return int(digits[:-1]), int(digits[-1])


def capability_text(capability: tuple[int, int]) -> str:
    """Return a compute capability as CUDA writes it, as in 8.6."""
    return f"{capability[0]}.{capability[1]}"
