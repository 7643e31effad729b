"""The device of a config: hides GPUs if it is cpu, and explains in one line why a GPU cannot be used.

GPUs are listed by the library of NVIDIA's driver, in a fraction of a second and without torch. A process that has done
so must not fork children that use GPUs.
"""

import ctypes
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError
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
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120")
"""Architectures of PyPI's wheels of torch 2.13.0 for Linux, built for CUDA 13.0. Source: pytorch/pytorch,
.ci/manywheel/build_cuda.sh, TORCH_CUDA_ARCH_LIST; aarch64 has some more than x86_64."""
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
NAME_BYTES = 256


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that CUDA shows this process."""

    name: str
    capability: tuple[int, int]
    uuid: str
    """Identifies the GPU on its machine, whatever CUDA_VISIBLE_DEVICES says."""


def on_gpu(device: "torch.device") -> bool:
    """Return whether this is a GPU. Other modules ask here, so that a rehearsal can name another device (GPU)."""
    return device.type == GPU


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
    release, built = torch_build()
    if built is None:
        rocm = _torch_version().get("hip")
        other = "AMD's GPUs (ROCm), which zerolora does not use" if rocm else "CPUs alone"
        return (
            f"torch {release} is built for {other}; install a torch built for CUDA (envs/requirements.lock on Linux "
            f"with PyPI's wheels), or write {otherwise}"
        )
    library = driver_library()
    if library is None:
        return f"this machine has no NVIDIA driver ({LIBRARY}); run where the GPUs are, or write {otherwise}"
    if reason := old_driver(release, built, library):
        return reason
    shown, names = visible(library), os.environ.get(VISIBLE)
    limited = "" if names is None else f" ({VISIBLE}={names})"
    if isinstance(shown, int):
        return f"its NVIDIA driver cannot start (cuInit returned {shown}){limited}; does nvidia-smi list the GPUs?"
    if len(shown) < gpus:
        wanted = "a GPU is needed" if gpus == 1 else f"{gpus} GPUs are needed"
        return f"{wanted} and {len(shown) or 'none'} visible{limited}; ask for more, or correct hardware"
    return next((reason for gpu in shown if (reason := unsupported(gpu.capability, gpu.name))), None)


def old_driver(release: str, built: str, library: Any = None) -> str | None:
    """Return a message if this machine's driver, if any, is too old for torch `release`, `built` for this CUDA."""
    library = library or driver_library()
    if library is None:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    major, minor = number.value // 1000, number.value % 1000 // 10
    needed = int(built.partition(".")[0])
    if major >= needed:
        return None
    named = DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.is_file() else "here"
    return (
        f"the NVIDIA driver {named} goes up to CUDA {major}.{minor}, and torch {release} is built for CUDA {built}, "
        f"which needs driver {DRIVERS.get(needed, 'a later one')} or later; update the driver, or install a torch "
        f"built for CUDA {major}"
    )


def visible(library: Any) -> list[VisibleGpu] | int:
    """Return the GPUs that CUDA shows this process, or the error code of a driver that cannot start."""
    no_device = 100  # CUDA_ERROR_NO_DEVICE
    if code := library.cuInit(0):
        return [] if code == no_device else int(code)
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    return [_gpu(library, number) for number in range(count.value)]


def unsupported(capability: tuple[int, int], name: str) -> str | None:
    """Return a message if torch has no kernels for a GPU of this compute capability."""
    release, built = torch_build()
    carried = _carried(built)
    if carried is None or runs_on(capability, carried):
        return None
    lowest = min(_numbers(each) for each in carried)
    carrier = f"torch {release}" if built else "the torch of envs/requirements.lock"
    return (
        f"{name} has compute capability {_text(capability)}, and {carrier} carries kernels for {_text(lowest)} "
        f"and later GPUs ({', '.join(carried)}); use such a GPU, or install a torch that is built for this one"
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
        raise UserError("torch is not installed; run `make`, which installs envs/requirements.lock")
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def visible_names(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES; None if it is unset. CUDA ignores entries from a -1 on."""
    text = environment.get(VISIBLE)
    if text is None:
        return None
    names = [each.strip() for each in text.split(",") if each.strip()]
    return names[: names.index("-1")] if "-1" in names else names


def _carried(built: str | None) -> tuple[str, ...] | None:
    """Return the architectures of torch; of a CPU build, those of the lock's wheels; None if unknown until loaded."""
    torch = sys.modules.get("torch")
    flags = getattr(getattr(torch, "_C", None), "_cuda_getArchFlags", None)
    if built is not None and flags is not None:
        return tuple(str(flags()).split())
    return ARCHITECTURES if built is None or built.startswith("13.") else None


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
    capability = []
    for attribute in (MAJOR, MINOR):
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        capability.append(value.value)
    return VisibleGpu(name.value.decode(errors="replace"), (capability[0], capability[1]), bytes(uuid).hex())


def _numbers(architecture: str) -> tuple[int, int]:
    """Return the capability of an architecture, as in sm_90a: (9, 0)."""
    digits = "".join(each for each in architecture.partition("_")[2] if each.isdigit())
    return int(digits[:-1]), int(digits[-1])


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
