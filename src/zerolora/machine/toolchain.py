"""The tools with which DeepSpeed and Triton compile where something is first used, and what a machine lacks of them.

A rank compiles when training starts, possibly hours after its job was submitted. Sources: DeepSpeed,
op_builder/builder.py (jit_load, installed_cuda_version) and async_io.py; torch, utils/cpp_extension.py; Triton,
runtime/build.py.
"""

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from zerolora.types import Device

TOOLKIT = Path("/usr/local/cuda")
"""Where torch looks for the CUDA toolkit if neither CUDA_HOME nor CUDA_PATH is set and nvcc is not on PATH."""
UNCHECKED = "DS_SKIP_CUDA_CHECK"
"""With 1, DeepSpeed compiles with a CUDA toolkit of another version than torch's."""
LINKS_LIBAIO = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0) == 1; }\n"


def lacking(operation: str, device: Device, cuda: str | None) -> list[str]:
    """Return what this machine lacks to compile one of DeepSpeed's operations, each with a remedy.

    `cuda` is the version of CUDA that torch is built for, if any. Empty for an operation that DeepSpeed was installed
    with.
    """
    return [] if _installed(operation) else list(_lacking(operation, device, cuda))


def lacking_for_triton() -> list[str]:
    """Return what this machine lacks to compile what starts Triton's kernels, each with a remedy."""
    named = os.environ.get("CC")
    path = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    compiled_by = f"CC is {named}, which is not on PATH" if named else "no C compiler (gcc, clang) is on PATH"
    missing = [] if path else [f"{compiled_by}; install one (apt-get install gcc), or load its module"]
    return missing + list(_headers_fault())


def _headers_fault() -> Iterator[str]:
    if not (headers() / "Python.h").is_file():
        yield f"{headers()} has no Python.h; install Python's headers (apt-get install python3-dev)"


def _lacking(operation: str, device: Device, cuda: str | None) -> Iterator[str]:
    if compiler() is None:
        name = os.environ.get("CXX")
        named = f"CXX is {name}, which is not on PATH" if name else "no C++ compiler (c++) is on PATH"
        yield f"{named}; install one (apt-get install g++), or load its module"
    yield from _headers_fault()
    if ninja() is None:
        yield "ninja is not installed; it is in envs/requirements.lock: run `make`"
    if operation == "async_io" and compiler() is not None and not links_libaio():
        yield "libaio cannot be linked; install its headers (apt-get install libaio-dev; dnf install libaio-devel)"
    if device == "cuda" and cuda is not None and (reason := toolkit_fault(cuda)):
        yield reason


def compiler() -> str | None:
    """Return the path of the C++ compiler that torch would call."""
    return shutil.which(os.environ.get("CXX", "c++"))


def headers() -> Path:
    """Return the directory of Python's headers."""
    return Path(sysconfig.get_paths()["include"])


def ninja() -> str | None:
    """Return the path of ninja: on PATH, or beside this Python, where the workflow's jobs look, too."""
    return shutil.which("ninja", path=os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)]))


def links_libaio() -> bool:
    """Return whether a program that calls libaio can be compiled, with the flags in CFLAGS and LDFLAGS."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    command = [str(compiler()), "-x", "c", *flags[0], "-", "-o", os.devnull, *flags[1], "-laio"]
    return subprocess.run(command, input=LINKS_LIBAIO, text=True, capture_output=True, check=False).returncode == 0


def toolkit() -> Path | None:
    """Return the directory of the CUDA toolkit, as torch looks for it."""
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(named)
    if path := shutil.which("nvcc"):
        return Path(path).parents[1]
    return TOOLKIT if TOOLKIT.exists() else None


def toolkit_version(directory: Path) -> str | None:
    """Return the CUDA version of a toolkit's nvcc, as in 12.6; None if it does not run."""
    try:
        text = subprocess.run([str(directory / "bin/nvcc"), "-V"], text=True, capture_output=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", text)
    return release[1] if release else None


def toolkit_fault(cuda: str) -> str | None:
    """Return why the CUDA toolkit here, if any, cannot compile for a torch built for this CUDA version."""
    remedy = f"install the CUDA toolkit {cuda}, or load its module, and set CUDA_HOME"
    directory = toolkit()
    if directory is None:
        return f"no CUDA toolkit is here (CUDA_HOME is not set, nvcc is not on PATH); {remedy}"
    version = toolkit_version(directory)
    if version is None:
        return f"{directory} has no nvcc that runs; {remedy}"
    # DeepSpeed accepts another minor version of CUDA 12, but not yet of 13 (builder.py, cuda_minor_mismatch_ok).
    same = version == cuda or (version.startswith("12.") and cuda.startswith("12."))
    if same or os.environ.get(UNCHECKED) == "1":
        return None
    return f"the CUDA toolkit in {directory} is {version}, and torch is built for CUDA {cuda}; {remedy}"


def _installed(operation: str) -> bool:
    """Return whether DeepSpeed was installed with this operation compiled. Does not load DeepSpeed."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return False
    written = Path(spec.origin).with_name("git_version_info_installed.py")
    return written.is_file() and runpy.run_path(str(written)).get("installed_ops", {}).get(operation) is True
