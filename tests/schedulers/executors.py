"""Snakemake's executors of other schedulers, in a folder of the user's cache: `tests/schedulers/install` makes it.

They are optional dependencies, which neither the lock nor .venv has: tests put the folder on PYTHONPATH.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = (
    "snakemake-executor-plugin-cluster-generic==1.0.9",
    "snakemake-executor-plugin-lsf==0.3.3",
    "snakemake-executor-plugin-lsf-jobstep==0.1.10",
    "snakemake-executor-plugin-htcondor==0.3.0",
    "htcondor==25.14.1",
)
SECONDS = 300
"""After which an installation gives up."""


def folder() -> Path:
    """Return the folder of these releases for this interpreter."""
    release = f"{sys.version_info.major}.{sys.version_info.minor}"
    key = hashlib.sha256("\n".join([*PACKAGES, release]).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "zerolora" / f"executors-{key[:12]}"


def missing() -> str | None:
    """Return why the executors cannot be tested, in a line; None if they can."""
    return None if folder().is_dir() else f"{', '.join(PACKAGES)} are not in {folder()}: run tests/schedulers/install"


def install() -> str | None:
    """Install the executors, and return why that failed, if it did."""
    if folder().is_dir():
        return None
    folder().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder().parent) as temporary:
        target = Path(temporary, "executors")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *PACKAGES]
        try:
            done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"pip took longer than {SECONDS} s"
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        target.rename(folder())
    return None


if __name__ == "__main__":
    if reason := install():
        print(
            f"Snakemake's other executors were not installed ({reason}); tests/schedulers is skipped", file=sys.stderr
        )
