"""The made-up package of tests/made_up_package, visible as if installed, without being installed."""

import shutil
import tomllib
from pathlib import Path

SOURCE = Path(__file__).with_name("made_up_package")
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENTRY_POINTS: dict[str, dict[str, str]] = PROJECT["entry-points"]


def install(folder: Path, entry_points: dict[str, dict[str, str]] = ENTRY_POINTS, name: str = "made-up") -> Path:
    """Write the package and its metadata to a folder for PYTHONPATH, and return the folder."""
    shutil.copytree(SOURCE / "made_up", folder / "made_up", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / f"{name.replace('-', '_')}-{PROJECT['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {PROJECT['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{entry} = {value}\n" for entry, value in entries.items())
        for group, entries in entry_points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder
