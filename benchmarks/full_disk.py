"""Fill the disk under every stage: is it one line, and does the same command then give the same bytes?

    nice .venv/bin/python benchmarks/full_disk.py

Needs root, to mount a tmpfs. A finished project of a tiny model (chaos.py) lies on a tmpfs with so many KiB left. Each
stage runs there by its command. It must end well, or with exit code 2 and one line that names the disk, with the
outputs before it unchanged; with room again, the same command must write the bytes that were there.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from chaos import SERVERS, Chaos
from conftest import Project
from measuring import RESULTS, machine, parser_of

from zerolora.files import write_json

STAGES: dict[str, tuple[str, ...]] = {
    "resolve": (),
    **{
        "fetch": ("tiny",),
        "prepare": ("rows",),
        "pack": ("default",),
        "estimate": ("default",),
        "render": ("default",),
    },
    **{"train": ("default",), "merge": ("default",), "evaluate_base": ("rows",), "evaluate": ("default",)},
    **{"report": ("default",), "compare": ()},
}
LEFT = (0, 4, 16, 64, 256)
"""KiB."""
TIMES = (
    *("resources.json", "usage.json", "summary.json", ".html", "row.json", "difference.json", "telemetry.csv", ".svg"),
    "table.csv",
)
"""Ends of names of files with times, memory or dates."""


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Return the files of results and resources without times, by name."""
    paths = (path for part in ("results", "resources") for path in (folder / part).rglob("*"))
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(paths)
        if path.is_file() and "/logs/" not in str(path) and not path.name.endswith((*TIMES, ".log"))
    }


def used(folder: Path) -> int:
    """Return the KiB that a tmpfs with these files has in use."""
    return int(subprocess.run(["df", "-k", "--output=used", folder], capture_output=True, text=True, check=True)
               .stdout.split()[-1])  # fmt: skip


def outcome(finished: Path, place: Path, stage: str, left: int) -> str:
    """Run a stage on a full disk, and again with room; return how it ended."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", place], check=True)
    try:
        project = Project(place / "project")
        subprocess.run(["cp", "-a", finished, project.directory], check=True)
        if stage == "train":  # else it has nothing to do
            shutil.rmtree(project.directory / "work/checkpoints")
        before = bytes_of(project.directory)
        subprocess.run(["mount", "-o", f"remount,size={used(place) + left}k", place], check=True)
        command = ("zerolora", "stage", stage, *STAGES[stage])
        full = project.run(*command, check=False)
        text = full.stdout + full.stderr
        lines = [line for line in full.stderr.splitlines() if line.startswith("zerolora: ")]
        if "Traceback" in text or full.returncode not in (0, 2):
            return f"exit code {full.returncode}: {text[-1500:]}"
        if full.returncode == 2 and not any("space" in line or "disk" in line for line in lines):
            return f"no line of the disk: {text[-1500:]}"
        now = bytes_of(project.directory)
        if full.returncode and (changed := [name for name in before if now.get(name) != before[name]]):
            return f"changed: {changed[:5]}"
        subprocess.run(["mount", "-o", "remount,size=1g", place], check=True)
        again = project.run(*command, check=False)
        if again.returncode:
            return f"with room again, exit code {again.returncode}: {again.stderr[-1500:]}"
        if differing := [name for name, content in bytes_of(project.directory).items() if before.get(name) != content]:
            return f"other bytes: {differing[:5]}"
        return "one line, then the same bytes" if full.returncode else "had room"
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def main() -> None:
    """Run all stages and write the counts."""
    parser = parser_of(__doc__)
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=[*STAGES])
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="full-disk"))
    place = folder / "disk"
    place.mkdir()
    ended: dict[str, dict[str, Any]] = {}
    try:
        finished = Chaos(folder).finished
        for stage in options.stages:
            ended[stage] = {str(left): outcome(finished, place, stage, left) for left in LEFT}
            print(json.dumps({stage: ended[stage]}), flush=True)
    finally:
        SERVERS.stop()
        shutil.rmtree(folder, ignore_errors=True)
    good = ("one line, then the same bytes", "had room")
    bad = [text for each in ended.values() for text in each.values() if text not in good]
    write_json(RESULTS / "full_disk.json", {"machine": machine(), "kib_left": ended})
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
