"""Rebuild the shipped run as a stranger: the figures of docs/rebuild.md.

    .venv/bin/python benchmarks/rebuild.py FOLDER

In FOLDER: clones the last commit, runs config/config.yaml there and pushes its adapter to a directory, with its rows
and checkpoints. A second clone, with an empty HOME (pip's cache is kept, PIP_CACHE_DIR), rebuilds that push: whole,
with ATen's kernels for AVX2, and each of four copies that were tampered with. Writes benchmarks/results/rebuild.json.
Both clones use this .venv. The same command continues; it takes about half an hour on two cores.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import RESULTS, ROOT, machine, parser_of, timed

RUN = "default"
ADAPTER = "adapter_model.safetensors"
KERNELS = "ATEN_CPU_CAPABILITY"
VERDICTS = (0, 1, 3)


def main() -> None:
    """Run, push, rebuild, tamper, write."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    first, second, pushed = folder / "first", folder / "second", folder / "pushed"
    figures: dict[str, Any] = {"machine": machine()}
    clone(first)
    original = timed(
        [first / ".venv/bin/snakemake", "--profile", "profiles/local", "all"], first, **variables(first)
    ).wall_seconds
    push(first, pushed)
    clone(second)
    rows = ["--rows", "data/reference.json"]
    figures["whole"] = rebuilt(second, pushed, "whole", *rows)
    figures["tampered"] = {name: of_tampered(second, pushed, name, change) for name, change in TAMPERED.items()}
    figures["other_kernels"] = rebuilt(second, pushed, "avx2", *rows, **{KERNELS: "avx2"})
    text = json.dumps(figures | {"original_seconds": round(original)}, indent=2, sort_keys=True)
    (RESULTS / "rebuild.json").write_text(f"{text}\n", encoding="utf-8")
    print(text)


def clone(directory: Path) -> None:
    """Clone the last commit, with this .venv, unless that was done."""
    if not (directory / ".venv").exists():
        timed(["git", "clone", "--quiet", ROOT, directory], ROOT)
        (directory / ".venv").symlink_to((ROOT / ".venv").resolve())


def variables(directory: Path) -> dict[str, str]:
    """Return the variables of a command in a clone: its own code, an empty HOME."""
    home = directory.with_name(f"{directory.name}-home")
    home.mkdir(exist_ok=True)
    cache = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip"))
    return {"HOME": str(home), "PIP_CACHE_DIR": cache, "PYTHONPATH": str(directory / "src")}


def zerolora(directory: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command of zerolora in a clone."""
    return subprocess.run(
        [directory / ".venv/bin/python", "-m", "zerolora", *map(str, arguments)],
        cwd=directory,
        env=os.environ | variables(directory) | more,
        capture_output=True,
        text=True,
        check=False,
    )


def push(directory: Path, pushed: Path) -> None:
    """Push the adapter with its rows and checkpoints, unless that was done."""
    if pushed.exists():
        return
    include = ("--include", "rows", "--include", "checkpoints")
    result = zerolora(directory, "push", "--run", RUN, "--what", "adapter", "--to", pushed, *include)
    if result.returncode:
        sys.exit(result.stderr)


def rebuilt(directory: Path, source: Path, name: str, *options: str, **more: str) -> dict[str, Any]:
    """Return how a rebuild ended: exit code, last line, and what rebuild.json says, if there is one."""
    output = directory / "work/rebuild" / name
    result = zerolora(directory, "rebuild", source, "--output", output, *options, **more)
    lines = (result.stdout if result.returncode in VERDICTS else result.stderr).splitlines()
    line = lines[-1].replace(f"{directory.parent}/", "") if lines else ""
    found: dict[str, Any] = {"code": result.returncode, "line": line}
    if result.returncode in VERDICTS:
        made = json.loads((output / "rebuild.json").read_text(encoding="utf-8"))
        found |= {key: made[key] for key in ("verdict", "first_difference", "bounds", "machine")}
        found["products"] = len(made["products"])
        found["equal"] = sum(each["equal"] for each in made["products"])
        found["seconds"] = round(made["seconds"])
    return found


def of_tampered(directory: Path, pushed: Path, name: str, change: Callable[[Path], list[str]]) -> dict[str, Any]:
    """Return how the rebuild of a tampered copy ends. A checkpoint is compared with that of the whole rebuild, which is
    continued."""
    copy = directory.parent / f"tampered-{name}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(pushed, copy)
    options = change(copy)
    return rebuilt(directory, copy, "whole" if name == "checkpoint" else f"tampered-{name}", *options)


def row(copy: Path) -> list[str]:
    """Change an answer in a copy of the rows, which is brought."""
    (rows,) = (copy / "rows").iterdir()
    changed = json.loads(rows.read_text(encoding="utf-8"))
    changed[4]["output"] += "0"
    file = copy.with_name("reference.json")
    file.write_text(json.dumps(changed), encoding="utf-8")
    return ["--rows", str(file)]


def key(copy: Path) -> list[str]:
    """Change a key of the recorded config, and what the push lists to match."""
    record = json.loads((copy / "record.json").read_text(encoding="utf-8"))
    record["config"]["train"]["learning_rate"] *= 2
    (copy / "record.json").write_text(json.dumps(record), encoding="utf-8")
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    content = (copy / "record.json").read_bytes()
    manifest["files"]["record.json"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (copy / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return []


def checkpoint(copy: Path) -> list[str]:
    """Change a byte of the last checkpoint."""
    flip(max((copy / "checkpoints").iterdir()))
    return []


def adapter(copy: Path) -> list[str]:
    """Change a byte of the adapter."""
    flip(copy / ADAPTER)
    return []


def flip(path: Path) -> None:
    """Change the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


TAMPERED = {"row": row, "key": key, "checkpoint": checkpoint, "adapter": adapter}


if __name__ == "__main__":
    main()
