"""Measure how long training takes from its command to its first step, and that it compiles nothing.

    .venv/bin/python benchmarks/train/start_up.py

Needs the base model: run `make run` first. Runs the stage `train` with the training settings of config/config.yaml and
one step. The step's line in the log marks its end, its seconds in telemetry.csv its beginning. The first call, whose
files may not be in the page cache, is reported separately. Before each warm one another process loads the same
libraries and reads the weights, since the machine may have dropped its page cache in between. The directories where
torch, DeepSpeed and Triton keep compiled code must be empty afterwards. Writes benchmarks/results/train_start_up.json.
"""

import csv
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from contest import QUIET, Ours, about, parser, reference, training_settings

from zerolora.files import write_json

IMPORTS = "import deepspeed, zerolora.cli, zerolora.train.rank"
CACHES = ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def main() -> None:
    """Start several times, write."""
    options = parser(__doc__, "train_start_up.json").parse_args()
    train = training_settings() | {"max_steps": 1, "precision": options.precision}
    if options.device == "cuda":
        train["ranks_per_node"] = 1
    with reference(options) as task:
        caches = task.folder / "caches"
        ours = task.ours("ours", train, {}, "zero2", "1")
        values = [started(ours, caches)]
        for _ in range(options.rounds):
            warm(task.folder)
            values.append(started(ours, caches))
        compiled = sorted(path.name for path in caches.rglob("*") if path.is_file())
    result = about(options.device) | {
        "model": options.model.stem, "ranks": ours.ranks, "compiled_files": compiled,
        **{name: judged([each[name] for each in values]) for name in values[0]},
    }  # fmt: skip
    write_json(options.output, result)
    print(result)


def warm(folder: Path) -> None:
    """Bring the files that a rank reads into the page cache."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)
    for path in folder.rglob("*.safetensors"):
        path.read_bytes()


def judged(seconds: list[float]) -> dict[str, Any]:
    """Return the first call's seconds, and the median and rounds of the others."""
    return {"first_seconds": seconds[0], "warm_seconds": statistics.median(seconds[1:]), "warm_rounds": seconds[1:]}


def started(ours: Ours, caches: Path) -> dict[str, float]:
    """Return the seconds from the command to the beginning and to the end of the first step."""
    own = {name: str(caches / name) for name in CACHES} | {"OMP_NUM_THREADS": ours.threads}
    begun = time.monotonic()
    process = subprocess.Popen(
        ours.command(), env=os.environ | QUIET | own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    lines = []
    seconds = None
    assert process.stderr
    for line in process.stderr:
        lines.append(line)
        if seconds is None and line.startswith("step 1/1"):
            seconds = time.monotonic() - begun
    if process.wait() or seconds is None:
        raise SystemExit("".join(lines[-15:]))
    with (ours.folder / "run/metrics/telemetry.csv").open(newline="") as file:
        step = float(next(csv.DictReader(file))["seconds"])
    print(f"{seconds - step:.1f} s, and the step {step:.1f} s", flush=True)
    return {"to_first_step": seconds - step, "to_its_end": seconds}


if __name__ == "__main__":
    main()
