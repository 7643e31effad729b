"""What a newcomer's `make run` gives and takes: the README's figures.

    python3 benchmarks/make_run.py

Clones the last commit twice into empty folders with an empty HOME (pip's cache kept warm, PIP_CACHE_DIR), runs
`make run` in each and once more in the first, and compares the two results byte for byte. Then has dvc_diff.py run the
first with half the learning rate, for what DVC prints. Writes benchmarks/results/make_run.json. Takes about 25 minutes
on two cores.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/make_run.json"
# Metrics of time and memory differ between any two runs; these must not.
SAME = [
    "resources/models/smollm2-135m-instruct/manifest.json",
    "results/data/reference/manifest.json",
    "results/data/reference/stats.json",
    "results/base/reference/evaluate.json",
    "results/default/adapter/adapter_config.json",
    "results/default/adapter/adapter_model.safetensors",
    "work/merged/default/model.safetensors",
    "results/default/metrics/train.json",
    "results/default/metrics/loss.csv",
    "results/default/metrics/evaluate.json",
]


def main() -> None:
    """Run, compare and write the figures down."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first", Path(folder) / "second"
        install, seconds = clone_and_run(first)
        started = time.monotonic()
        again = make(first, "run")
        nothing = time.monotonic() - started
        assert "Nothing to be done" in again
        clone_and_run(second)
        different = [name for name in SAME if (first / name).read_bytes() != (second / name).read_bytes()]
        results = first / "results/default"
        figures: dict[str, Any] = {
            "machine": json.loads(run([first / ".venv/bin/python", "-c", PRINT_MACHINE], ROOT / "benchmarks")),
            "install_seconds": round(install),
            "run_seconds": round(seconds),
            "second_run_seconds": round(nothing, 1),
            "accuracy_before": read(first / "results/base/reference/evaluate.json")["accuracy"],
            "accuracy_after": read(results / "metrics/evaluate.json")["accuracy"],
            "train": read(results / "metrics/train.json"),
            "train_resources": read(results / "metrics/train_resources.json"),
            "evaluate_resources": read(results / "metrics/evaluate_resources.json"),
            "predicted_host_bytes": read(results / "render.json")["choice"]["ranked"][0]["host_bytes"],
            "adapter_megabytes": round((results / "adapter/adapter_model.safetensors").stat().st_size / 1e6, 1),
            "merged_megabytes": round((first / "work/merged/default/model.safetensors").stat().st_size / 1e6),
            "files_that_differ_between_two_clones": different,
            "metrics_diff": metrics_diff(first),
        }
    RESULT.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))
    sys.exit(bool(different))


PRINT_MACHINE = "import json, machine; print(json.dumps(machine.machine()))"


def clone_and_run(directory: Path) -> tuple[float, float]:
    """Return the seconds of installing and of the first run in a fresh clone."""
    run(["git", "clone", "--quiet", str(ROOT), str(directory)], ROOT)
    started = time.monotonic()
    make(directory, ".venv/installed")
    installed = time.monotonic()
    make(directory, "run")
    return installed - started, time.monotonic() - installed


def metrics_diff(directory: Path) -> str:
    """Run again with half the learning rate, and return what `dvc metrics diff` prints."""
    run([directory / ".venv/bin/python", "dvc_diff.py", directory], ROOT / "benchmarks")
    outputs: dict[str, str] = read(ROOT / "benchmarks/results/dvc.json")["outputs"]
    return outputs["dvc metrics diff"]


def make(directory: Path, target: str) -> str:
    """Run make with an empty HOME and return what it printed."""
    home = directory.with_name(f"{directory.name}-home")
    home.mkdir(exist_ok=True)
    cache = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip"))
    return run(["make", target], directory, HOME=str(home), PIP_CACHE_DIR=cache)


def run(command: list[Any], directory: Path, **environment: str) -> str:
    """Run a command and return its output; its failure is ours."""
    result = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if command[0] == "make" else None,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(f"{command}: {result.stdout[-4000:]}")
    return result.stdout


def read(path: Path) -> Any:
    """Return the JSON value in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
