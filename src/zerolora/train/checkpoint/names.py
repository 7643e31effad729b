"""The names of checkpoints on disk, without reading them: work/checkpoints/<run>/<key>/step-00000060.safetensors."""

import re
from pathlib import Path

STEP = re.compile(r"step-(\d{8,})\.safetensors")


def steps_of(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by step, in order; none if it does not exist."""
    found = {path: STEP.fullmatch(path.name) for path in folder.glob("step-*.safetensors")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def newest_run_folder(of_run: Path) -> Path | None:
    """Return the folder of a run with the checkpoint that was written last; None if there is none."""
    written = [path for path in of_run.glob("*/step-*.safetensors") if STEP.fullmatch(path.name)]
    return max(written, key=lambda path: path.stat().st_mtime).parent if written else None
