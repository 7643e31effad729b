"""Packages that neither the lock nor .venv has, in a folder of the user's cache, which tests put on PYTHONPATH."""

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SECONDS = 300
"""After which an installation gives up."""


@dataclass(frozen=True)
class PackageFolder:
    """A folder of packages."""

    name: str
    """Of the folder, and of the directory of the tests that need it, which has `install`."""
    packages: tuple[str, ...]
    """With their releases and those that they need."""

    @property
    def folder(self) -> Path:
        """Return the folder of these releases for this interpreter."""
        release = f"{sys.version_info.major}.{sys.version_info.minor}"
        key = hashlib.sha256("\n".join([*self.packages, release]).encode()).hexdigest()
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "zerolora" / f"{self.name}-{key[:12]}"

    def missing(self) -> str | None:
        """Return why these packages cannot be used, in a line; None if they can."""
        if self.folder.is_dir():
            return None
        return f"{', '.join(self.packages)} are not in {self.folder}: run tests/{self.name}/install"

    def install(self) -> None:
        """Install the packages, or print a line with the reason."""
        if (self.missing() is not None) and (reason := self._install()):
            print(f"{reason}; tests/{self.name} is skipped", file=sys.stderr)

    def _install(self) -> str | None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as temporary:
            target = Path(temporary, self.name)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
            try:
                done = subprocess.run(
                    [*pip, *self.packages], capture_output=True, text=True, check=False, timeout=SECONDS
                )
            except subprocess.TimeoutExpired:
                return f"pip took longer than {SECONDS} s for {self.name}"
            if done.returncode:
                return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            target.rename(self.folder)
        return None


SCHEDULERS = PackageFolder(
    "schedulers",
    (
        "snakemake-executor-plugin-cluster-generic==1.0.9",
        "snakemake-executor-plugin-lsf==0.3.3",
        "snakemake-executor-plugin-lsf-jobstep==0.1.10",
        "snakemake-executor-plugin-htcondor==0.3.0",
        "htcondor==25.14.1",
    ),
)
"""Snakemake's executors of other schedulers."""
SERVING = PackageFolder(
    "serving",
    (
        "fastapi==0.165.0",
        "starlette==1.10.0",
        "uvicorn==0.54.0",
        "openai==3.57.0",
        "jiter==0.19.0",
        "opentelemetry-api==1.45.2",
        "sniffio==1.3.1",
    ),
)
"""What transformers' server needs, and OpenAI's client."""

EVIDENCE = PackageFolder(
    "evidence",
    (
        "sigstore==4.5.1",
        "sigstore-models==0.0.6",
        "sigstore-rekor-types==0.0.18",
        "tuf==7.0.1",
        "securesystemslib==1.6.0",
        "rfc3161-client==1.0.9",
        "rfc8785==0.1.4",
        "id==1.6.1",
        "PyJWT==2.15.1",
        "email-validator==2.4.0",
        "dnspython==2.9.2",
        "mlcroissant==1.1.1",
        "etils==1.15.0",
        "jsonpath-rw==1.4.0",
        "ply==3.11",
        "decorator==5.3.1",
        "rdflib==7.6.0",
        "zipp==4.1.2",
    ),
)
"""The library of sigstore, and the one that reads Croissant."""

if __name__ == "__main__":
    next(each for each in (SCHEDULERS, SERVING, EVIDENCE) if each.name == sys.argv[1]).install()
