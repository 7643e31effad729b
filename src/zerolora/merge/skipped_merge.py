"""What stands for a merged model where merge.enabled is false: a manifest without weights."""

from pathlib import Path

from zerolora.files import MANIFEST, staged_directory, write_json
from zerolora.log import result


def leave_out(output: Path) -> None:
    """Write a manifest that says that nothing was merged to `output`/manifest.json, in the place of what was there."""
    with staged_directory(output) as staged:
        write_json(staged / MANIFEST, {"enabled": False, "files": {}})
    result("nothing merged: merge.enabled is false")
