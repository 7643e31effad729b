"""Where workflow, profiles, recipes and lock file are: in a checkout, or inside the installed package."""

from pathlib import Path

PACKAGE = Path(__file__).parent
PACKAGED = PACKAGE / "project"
"""Files that setup.py copies into a wheel, with their paths in a checkout."""
IS_PACKAGED = PACKAGED.is_dir()
ROOT = PACKAGED if IS_PACKAGED else PACKAGE.parents[1]


def project_file(path: str) -> str:
    """Return a file of the project around the current directory; the file that came with the code if it has none."""
    return path if Path(path).exists() else str(ROOT / path)
