"""Measure the memory of prepare on inputs of growing size: it must not grow with them.

    .venv/bin/python benchmarks/prepare_memory.py [rows ...]

Needs a tokenizer: run `make run` first. Takes about ten minutes for the default of 50 thousand,
500 thousand and 5 million short rows, and 8 GB of disk. Memory is the proportional set size (PSS) of all processes,
sampled twice a second, without file pages, which the kernel can drop. Writes benchmarks/results/prepare_memory.json.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from measuring import RESULTS, kernel_sizes, machine, wait

from zerolora.config.schema import Prepare
from zerolora.files import canonical, write_json

MODEL = Path("resources/models/smollm2-135m-instruct")
SIZES = (50_000, 500_000, 5_000_000)


def main() -> None:
    """Prepare each size and write the peaks."""
    runs = []
    for size in [int(text) for text in sys.argv[1:]] or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measured(size, Path(folder)))
        print(runs[-1], flush=True)
    first, last = runs[0], runs[-1]
    growth = (last["peak_bytes"] - first["peak_bytes"]) / max(1, last["rows"] - first["rows"])
    result = {"machine": machine(), "runs": runs, "bytes_more_per_row": round(growth, 1)}
    write_json(RESULTS / "prepare_memory.json", result)
    print(json.dumps(result, indent=2))


def measured(size: int, folder: Path) -> dict[str, Any]:
    """Return time and peak memory of preparing `size` rows."""
    rows = folder / "rows.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for number in range(size):
            file.write(f'{{"instruction": "What comes after {number}?", "output": "{number + 1} does."}}\n')
    settings = Prepare.model_validate(
        {"model": "smollm2", "path": str(rows), "split": {"validation": 100, "test": 100}}
    ).model_dump(exclude={"check", "check_settings"})
    command = ["stage", "prepare", "--settings", canonical(settings), "--model", str(MODEL / "manifest.json")]
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "zerolora", *command, "--output", str(folder / "out")])
    samples = [0]
    wait([process], every=0.5, look=lambda: samples.append(family_bytes(process.pid)))
    if process.returncode:
        raise SystemExit(f"prepare ended with {process.returncode}")
    return {
        "rows": size,
        "input_bytes": rows.stat().st_size,
        "output_bytes": sum(path.stat().st_size for path in (folder / "out").iterdir()),
        "peak_bytes": max(samples),
        "seconds": round(time.monotonic() - started, 1),
        "processes": 1 + len(os.sched_getaffinity(0)),
    }


def family_bytes(pid: int) -> int:
    """Return the bytes of a process and its children, shared pages counted once, without file pages."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        sizes = [kernel_sizes(each.pid, "smaps_rollup") for each in (process, *process.children(recursive=True))]
        return sum(each["Pss_Anon"] + each["Pss_Shmem"] for each in sizes)
    return 0


if __name__ == "__main__":
    main()
