"""Measure the memory of prepare on inputs of growing size: it must not grow with them.

    .venv/bin/python benchmarks/prepare_memory.py [rows ...]

Needs a tokenizer: run `make run` first (or `zerolora fetch`). Takes about ten minutes for the default of 50 thousand,
500 thousand and 5 million short rows, and 8 GB of disk. Memory is the proportional set (PSS) of all processes, sampled
twice a second, less what is file pages that the kernel can drop. Writes benchmarks/results/prepare_memory.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from machine import machine

from zerolora.config.schema import Prepare
from zerolora.files import canonical, write_json

RESULT = Path("benchmarks/results/prepare_memory.json")
MODEL = Path("resources/models/smollm2-135m-instruct")
SIZES = (50_000, 500_000, 5_000_000)


def main() -> None:
    """Prepare each size and write down the peak."""
    sizes = [int(text) for text in sys.argv[1:]] or list(SIZES)
    results = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(size, Path(folder)))
        print(results[-1], flush=True)
    first, last = results[0], results[-1]
    grown = last["peak_bytes"] - first["peak_bytes"]
    result = {
        "machine": machine(),
        "runs": results,
        "bytes_more_per_row": round(grown / max(1, last["rows"] - first["rows"]), 1),
    }
    write_json(RESULT, result)
    print(json.dumps(result, indent=2))


def measure(size: int, folder: Path) -> dict[str, Any]:
    """Return the peak memory of preparing `size` rows."""
    rows = folder / "rows.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for number in range(size):
            file.write(f'{{"instruction": "What comes after {number}?", "output": "{number + 1} does."}}\n')
    settings = Prepare.model_validate(
        {"model": "smollm2", "path": str(rows), "split": {"validation": 100, "test": 100}}
    ).model_dump(exclude={"check"})
    command = ["prepare", "--settings", canonical(settings), "--model", str(MODEL / "manifest.json")]
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "zerolora", *command, "--output", str(folder / "out")])
    peak = 0
    while process.poll() is None:
        peak = max(peak, held(process.pid))
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(f"prepare ended with {process.returncode}")
    return {
        "rows": size,
        "input_bytes": rows.stat().st_size,
        "output_bytes": sum(path.stat().st_size for path in (folder / "out").iterdir()),
        "peak_bytes": peak,
        "seconds": round(time.monotonic() - started, 1),
        "processes": 1 + len(os.sched_getaffinity(0)),
    }


def held(pid: int) -> int:
    """Return the bytes that a process and its children hold, shared pages counted once, file pages not at all."""
    total = 0
    try:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            for line in Path(f"/proc/{each.pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
    except (psutil.Error, OSError):
        return total
    return total


if __name__ == "__main__":
    main()
