"""Installs the build of torch that this machine's NVIDIA driver can run, and its GPU libraries; called by the Makefile.

    python3 -m zerolora.machine.torch_install wheel .venv/bin/python [cpu|cu12|cu13]
    python3 -m zerolora.machine.torch_install libraries .venv/bin/python

It runs before anything is installed, so with Python's standard library alone. Without an argument the driver chooses.
PyPI has one build of each release; others come from the indexes in pip's own settings (PIP_EXTRA_INDEX_URL).
"""

import hashlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zerolora.errors import UserError, explained
from zerolora.machine import devices

PREFIX = "zerolora: "  # as in log.py, whose libraries are not installed yet
LOCK = Path("envs/requirements.hashes")
LIBRARIES = {12: Path("envs/cu12.hashes"), 13: Path("envs/cu13.hashes")}
"""Hashes of the GPU libraries of torch's builds, by major version of CUDA."""
QUIET = ("--quiet", "--disable-pip-version-check")
NAME = re.compile(r"^([A-Za-z0-9._-]+)==", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Run one of the two steps; return 2 on an error."""
    step, python, *chosen = arguments
    try:
        if step == "wheel":
            install_wheel(python, chosen[0] if chosen else None)
        else:
            install_libraries(python)
    except UserError as error:
        _say(str(error))
    except OSError as error:
        _say(explained(error))
    else:
        return 0
    return 2


def install_wheel(python: str, asked: str | None) -> None:
    """Install torch in the environment of `python`, with the build that was `asked` for, or that fits the driver.

    Raises UserError if that build cannot be had, or if its wheel has an unknown hash that was not asked for.
    """
    if asked is not None and asked not in devices.BUILDS:
        raise UserError(f"TORCH={asked} is not a build; use one of {', '.join(devices.BUILDS)}")
    release = pinned()
    build = asked or fitting()
    folder = Path(python).parents[1] / "torch"
    wheel = _downloaded(python, requirements(release, build), folder)
    if wheel is None and asked is None and build is not None:
        _say(unavailable(release, build) + "; installing the build that pip has, which cannot use this machine's GPUs")
        build, wheel = None, _downloaded(python, requirements(release, None), folder)
    if wheel is None:
        raise UserError(unavailable(release, build))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest not in hashes_of_torch():
        if build is None or wheel.name.split("-")[1] == release:
            raise UserError(
                f"{wheel.name} has none of the hashes in {LOCK}; pip's settings name an index that changed it"
            )
        _say(f"{wheel.name} comes from an index in pip's settings, and {LOCK} has no hash of it: sha256 {digest}")
    _pip(python, "install", "--no-compile", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    shutil.rmtree(folder)


def install_libraries(python: str) -> None:
    """Install the GPU libraries of the torch in the environment of `python`, and remove those of another build.

    Raises UserError if torch needs libraries of a CUDA version without a lock.
    """
    needed = _required(python)
    major = next((int(each[1]) for each in map(re.compile(r"cuda-toolkit.*==(\d+)").match, needed) if each), None)
    if major is not None and major not in LIBRARIES:
        raise UserError(f"torch needs libraries of CUDA {major}, of which there is no lock; set TORCH=cu12 or cu13")
    keep = _names(LIBRARIES[major]) if major else set()
    # pip would warn of each that is not there.
    if others := sorted((set().union(*map(_names, LIBRARIES.values())) - keep) & _installed(python)):
        _pip(python, "uninstall", "--yes", *others)
    if major is None:
        return
    _pip(python, "install", "--no-compile", "--no-deps", "--require-hashes", "--requirement", str(LIBRARIES[major]))
    if major == 12 and (conflicts := _conflicts(python)):
        _say(
            f"{LIBRARIES[major]} differs from what this torch requires, which is installed without hashes: {conflicts}"
        )
        _pip(python, "install", "--no-compile", "--only-binary", ":all:", f"torch=={_version(python)}")


def fitting() -> str | None:
    """Return the build for this machine's driver; None for the one that pip prefers: without a driver, as on a login
    node or a laptop, and for a driver that no build supports."""
    newest = devices.newest_cuda(devices.driver_library())
    if newest is None:
        return None
    majors = {int(cuda.partition(".")[0]): name for name, cuda in devices.BUILDS.items() if cuda}
    return next((majors[major] for major in sorted(majors, reverse=True) if newest[0] >= major), None)


def pinned() -> str:
    """Return the release of torch in the lock. Raises UserError if it has none, as if it was cut off."""
    release = re.search(r"^torch==([0-9.]+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if release is None:
        raise UserError(f"{LOCK} has no line torch==VERSION; restore it (git checkout {LOCK})")
    return release[1]


def requirements(release: str, build: str | None) -> list[str]:
    """Return pip's requirements for a build, the first of which that can be had is taken.

    PyPI's own builds have no suffix: those for CUDA 13 on Linux, and for CPUs elsewhere. `===` excludes suffixes.
    """
    if build is None:
        return [f"torch=={release}"]
    cuda = devices.BUILDS[build]
    suffixed = f"torch=={release}+{'cpu' if cuda is None else 'cu' + cuda.replace('.', '')}"
    of_pypi = (cuda == devices.DEFAULT_CUDA) if platform.system() == "Linux" else cuda is None
    return [f"torch==={release}", suffixed] if of_pypi else [suffixed]


def unavailable(release: str, build: str | None) -> str:
    """Return the message for a build that none of pip's indexes has."""
    suffixed = requirements(release, build)[-1].replace("==", " ")
    reason = f"pip has no {suffixed} for Python {platform.python_version()}"
    newest = devices.newest_cuda(devices.driver_library())
    if newest is not None and build is not None:
        driver = devices.driver_version() or "here"
        reason = f"the NVIDIA driver {driver} goes up to CUDA {newest[0]}.{newest[1]}, and {reason}"
    return (
        f"{reason}; set PIP_EXTRA_INDEX_URL to an index that has it (named by PyTorch's installation page; docs/gpu.md)"
    )


def hashes_of_torch() -> set[str]:
    """Return the hashes of torch's wheels in the lock."""
    entry = re.search(r"^torch==(?:.*\\\n)+.*$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    return set(re.findall(r"sha256:([0-9a-f]{64})", entry[0])) if entry else set()


def _downloaded(python: str, wanted: Sequence[str], folder: Path) -> Path | None:
    """Return the wheel of the first requirement that pip can download; None if it has none of them."""
    for requirement in wanted:
        shutil.rmtree(folder, ignore_errors=True)
        command = ("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement)
        done = subprocess.run([python, "-m", "pip", *command, *QUIET], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return next(folder.glob("torch-*.whl"))
        if "No matching distribution" not in done.stderr:
            sys.stderr.write(done.stderr)  # e.g. no network, no space
            raise UserError(f"pip cannot download {requirement}; see above")
    return None


def _pip(python: str, *command: str) -> None:
    """Run pip. Raises UserError if it fails; its own words are above."""
    if subprocess.run([python, "-m", "pip", *command, *QUIET], check=False).returncode:
        raise UserError(f"pip {command[0]} failed; see above")


def _names(hashes: Path) -> set[str]:
    """Return the names of the packages in a file of hashes."""
    return set(NAME.findall(hashes.read_text(encoding="utf-8")))


def _asked(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


def _required(python: str) -> list[str]:
    """Return the requirements of the installed torch."""
    return _asked(python, "import importlib.metadata as m; print(*m.requires('torch') or (), sep='\\n')").splitlines()


def _installed(python: str) -> set[str]:
    """Return the names of the installed packages, as the files of hashes have them."""
    code = "import importlib.metadata as m; print(*(each.metadata['Name'] for each in m.distributions()), sep='\\n')"
    return {re.sub(r"[-_.]+", "-", name).lower() for name in _asked(python, code).splitlines()}


def _version(python: str) -> str:
    """Return the version of the installed torch."""
    return _asked(python, "import importlib.metadata as m; print(m.version('torch'))").strip()


def _conflicts(python: str) -> str:
    """Return torch's requirements that are not met, as pip reports them; empty if there are none."""
    done = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    return "; ".join(line for line in done.stdout.splitlines() if line.startswith("torch "))


def _say(text: str) -> None:
    print(f"{PREFIX}{text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
