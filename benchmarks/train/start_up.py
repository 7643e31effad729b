"""Measure how long training takes from its command to its first step, and that it compiles nothing.

    .venv/bin/python benchmarks/train/start_up.py

Needs the base model: run `make run` first. `zerolora train` is called with the training settings of config/config.yaml
and one step: its line in the log tells its end, and the seconds that it took, in telemetry.csv, its beginning. The
first call, which may find no file in the page cache, is told apart. Before each warm one another process loads the same
libraries and reads the weights, as a machine may give its page cache to others in the meantime. Where torch, DeepSpeed
and Triton keep what they compile, nothing may lie afterwards. Writes benchmarks/results/train_start_up.json.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from against_reference import VALIDATED, reference_task
from contest import QUIET, RESULTS, ROOT, Ours, about, add_options, model_of

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.files import write_json

IMPORTS = "import deepspeed, zerolora.cli, zerolora.train.rank"
CACHES = ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def main() -> None:
    """Start several times, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "train_start_up.json")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a row")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = resolve(load(ROOT / "config/config.yaml")).model_dump(mode="json")["runs"]["default"]["train"]
        if options.device == "cuda":
            train["ranks_per_node"] = 1
        del train["device"]
        task = reference_task(folder, model_of(options, folder), options, VALIDATED)
        ours = task.ours("ours", {**train, "max_steps": 1, "precision": options.precision}, {}, "zero2", "1")
        values = [started(ours, folder / "caches")]
        for _ in range(options.rounds):
            warm(task.folder)
            values.append(started(ours, folder / "caches"))
        compiled = sorted(path.name for path in (folder / "caches").rglob("*") if path.is_file())
    result = about(options.device) | {
        "model": options.model.stem, "ranks": ours.ranks, "compiled_files": compiled,
        **{name: judged([each[name] for each in values]) for name in values[0]},
    }  # fmt: skip
    write_json(options.output, result)
    print(result)


def warm(folder: Path) -> None:
    """Have what a rank reads in the page cache."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)
    for path in folder.rglob("*.safetensors"):
        path.read_bytes()


def judged(seconds: list[float]) -> dict[str, Any]:
    """Return the first call's seconds, and the median and rounds of the others."""
    return {"first_seconds": seconds[0], "warm_seconds": statistics.median(seconds[1:]), "warm_rounds": seconds[1:]}


def started(ours: Ours, caches: Path) -> dict[str, float]:
    """Return the seconds from the command to the beginning of the first step, and to its end."""
    own = {name: str(caches / name) for name in CACHES} | {"OMP_NUM_THREADS": ours.threads}
    begun = time.monotonic()
    process = subprocess.Popen(
        ours.command(), env=os.environ | QUIET | own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    lines = []
    taken = None
    assert process.stderr
    for line in process.stderr:
        lines.append(line)
        if taken is None and line.startswith("step 1/1"):
            taken = time.monotonic() - begun
    if process.wait() or taken is None:
        raise SystemExit("".join(lines[-15:]))
    with (ours.folder / "run/metrics/telemetry.csv").open(newline="") as file:
        step = float(next(csv.DictReader(file))["seconds"])
    print(f"{taken - step:.1f} s, and the step {step:.1f} s", flush=True)
    return {"to_first_step": taken - step, "to_its_end": taken}


if __name__ == "__main__":
    main()
