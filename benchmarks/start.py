"""How long commands take that have nothing to do: a no-op `make run`, and `zerolora --help`.

    python3 benchmarks/start.py --project DIR

DIR is a copy of the project whose pipeline has run (the working directory if left out). Each command takes turns with
what it is compared to: Snakemake on one rule whose file is there, and Python importing typer. Writes the CPU seconds of
the fastest of several runs, and their ratio, to benchmarks/results/start.json, and what the code fingerprints of all
stages add to a start, with and without their cache. CPU seconds are little disturbed by other processes of the machine.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import machine

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/start.json"
BIN = Path(sys.executable).parent
TURNS = 7
SNAKEFILE = 'rule one:\n    output: "one.txt"\n    shell: "touch {output}"\n'
NOTHING = "Nothing to be done"


def cpu_seconds(command: list[str], directory: Path, expected: str = "") -> float:
    """Return user and system seconds of a command and its children; `expected` must be in its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode or expected not in result.stdout:
        sys.exit(f"{' '.join(command)} in {directory}: {result.stdout[-2000:]}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def compared(ours: list[str], directory: Path, theirs: list[str], other: Path, expected: str = "") -> dict[str, float]:
    """Return the least CPU seconds of two commands that take turns, and their ratio."""
    pairs = [(cpu_seconds(ours, directory, expected), cpu_seconds(theirs, other, expected)) for _ in range(TURNS)]
    seconds, bare = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    return {"cpu_seconds": round(seconds, 3), "bare_cpu_seconds": round(bare, 3), "ratio": round(seconds / bare, 3)}


FINGERPRINTS = """
import sys, time
from zerolora.config import fingerprint
if sys.argv[1:]:
    fingerprint.CACHE.unlink(missing_ok=True)
before = time.process_time()
fingerprint.fingerprints()
print(time.process_time() - before)
"""


def fingerprint_seconds(*options: str) -> float:
    """Return the least CPU seconds in which a process has the fingerprints of all stages."""
    command = [sys.executable, "-c", FINGERPRINTS, *options]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(TURNS)]
    return round(min(float(text) for text in runs), 3)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", type=Path, default=Path())
    project = parser.parse_args().project.resolve()
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder)
        (one / "Snakefile").write_text(SNAKEFILE, encoding="utf-8")
        snakemake = str(BIN / "snakemake")
        bare = [snakemake, "--cores", "1"]
        subprocess.run(bare, cwd=one, check=True, capture_output=True)
        run = [snakemake, "--profile", "profiles/local", "all"]
        figures = {
            "machine": machine(("snakemake", "typer", "pydantic")),
            "turns": TURNS,
            "nothing_to_do": compared(run, project, bare, one, NOTHING),
            "fingerprints": {
                "parsed_cpu_seconds": fingerprint_seconds("without the cache"),
                "cached_cpu_seconds": fingerprint_seconds(),
            },
            "help": compared([str(BIN / "zerolora"), "--help"], one, [sys.executable, "-c", "import typer"], one),
        }
    RESULT.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
