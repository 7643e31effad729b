"""torch's build for CUDA, as the lock pins it, in a folder of the user's cache: `tests/cuda/install` makes it.

The folder comes before the packages of this environment in the path of a process, which then is one of a machine with
GPUs, but for the driver. An environment whose own torch is that build needs no folder.
"""

import fcntl
import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import requires, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HASHES = {name: ROOT / f"envs/{name}.hashes" for name in ("requirements", "cu13")}
SECONDS = 900
"""After which an installation gives up: 2.7 GB are downloaded."""
OTHERWISE = "the tests marked cuda are skipped"


def is_own() -> bool:
    """Return whether the torch of this environment is built for CUDA."""
    return "cuda-toolkit" in str(requires("torch"))


def pinned() -> str:
    """Return torch's entry of the lock with its hashes, for that version without a local label: of the builds of a
    version, the package index's own, wherever pip looks for others."""
    entry = re.search(r"^torch==(?:.*\\\n)*.*\n", HASHES["requirements"].read_text(), re.MULTILINE)
    assert entry
    return entry[0].replace("torch==", "torch===")


def folder() -> Path:
    """Return the folder of the lock's build for this interpreter."""
    release = f"{sys.version_info.major}.{sys.version_info.minor} {platform.system()} {platform.machine()}"
    key = hashlib.sha256("\n".join([pinned(), HASHES["cu13"].read_text(), release]).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "zerolora" / f"cuda-{key[:12]}"


def path() -> list[str]:
    """Return what comes before this environment's packages in the path of a process with torch's build for CUDA."""
    return [] if is_own() else [str(folder())]


def missing() -> str | None:
    """Return why there is no build for CUDA, in a line; None if there is one."""
    if is_own() or folder().is_dir():
        return None
    return f"torch {version('torch')} is not built for CUDA, and {folder()} is not there: run tests/cuda/install"


def lacking() -> str | None:
    """Return why there is no build for CUDA, once an installation that is under way has ended; None if there is one."""
    lock = folder().parent / f"{folder().name}.lock"
    if lock.exists():
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)
    return missing()


def install() -> str | None:
    """Make the folder, if it is missing; return why it cannot be made, in a line."""
    if missing() is None:
        return None
    target = folder()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return None if target.is_dir() else _install(target)
    except OSError as error:
        return str(error)


def _install(target: Path) -> str | None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=target.name) as work:
        made, requirements = Path(work) / "made", Path(work) / "torch.txt"
        requirements.write_text(pinned())
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--no-compile", "--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
        command += ["--retries", "1", "--target", str(made), "--requirement", str(requirements)]
        command += ["--requirement", str(HASHES["cu13"])]
        try:
            result = subprocess.run(
                command,
                env=os.environ | {"TMPDIR": work},
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"pip has not finished in {SECONDS} s"
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR: ")]
            return lines[0].removeprefix("ERROR: ") if lines else f"pip ended with exit code {result.returncode}"
        if not runpy.run_path(str(made / "torch/version.py"))["cuda"]:
            return f"the package index's torch for {platform.machine()} is not built for CUDA"
        shutil.move(made, target)
    return None


if __name__ == "__main__":
    if reason := install():
        print(f"tests/cuda: {OTHERWISE}: {reason}", file=sys.stderr)
