"""Measure commands that have nothing to do: a no-op `make run`, and `zerolora --help`.

    .venv/bin/python benchmarks/start.py --project DIR

DIR is a copy of the project whose pipeline has run (default: the working directory). Each command takes turns with its
baseline: Snakemake on one rule whose file is there, and Python importing typer. Writes the CPU seconds of the fastest
of several runs, and their ratio, to benchmarks/results/start.json, with the CPU seconds of computing the code
fingerprints of all stages, with and without their cache. Other processes hardly disturb CPU seconds.
"""

import os
import sys
import tempfile
from pathlib import Path

from measuring import RESULTS, ROOT, machine, parser_of, timed

from zerolora.files import as_json, write_json

BIN = Path(sys.executable).parent
TURNS = 7
SNAKEFILE = 'rule one:\n    output: "one.txt"\n    shell: "touch {output}"\n'
NOTHING = "Nothing to be done"
FINGERPRINTS = """
import sys, time
from zerolora.config import fingerprint
if sys.argv[1:]:
    fingerprint.CACHE.unlink(missing_ok=True)
before = time.process_time()
fingerprint.fingerprints()
print(time.process_time() - before)
"""


def main() -> None:
    """Measure and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--project", type=Path, default=Path())
    project = parser.parse_args().project.resolve()
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder)
        (one / "Snakefile").write_text(SNAKEFILE, encoding="utf-8")
        snakemake = str(BIN / "snakemake")
        bare = [snakemake, "--cores", "1"]
        timed(bare, one)
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
    write_json(RESULTS / "start.json", figures)
    print(as_json(figures))


def compared(ours: list[str], directory: Path, theirs: list[str], other: Path, expected: str = "") -> dict[str, float]:
    """Return the least CPU seconds of two commands that take turns, and their ratio."""
    pairs = [
        (timed(ours, directory, expected).cpu_seconds, timed(theirs, other, expected).cpu_seconds) for _ in range(TURNS)
    ]
    seconds, bare = (min(each) for each in zip(*pairs, strict=True))
    return {"cpu_seconds": round(seconds, 3), "bare_cpu_seconds": round(bare, 3), "ratio": round(seconds / bare, 3)}


def fingerprint_seconds(*options: str) -> float:
    """Return the least CPU seconds in which a process has the fingerprints of all stages."""
    command = [sys.executable, "-c", FINGERPRINTS, *options]
    return round(min(float(timed(command, ROOT).stdout) for _ in range(TURNS)), 3)


if __name__ == "__main__":
    main()
