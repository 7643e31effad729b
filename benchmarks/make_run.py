"""Measure a newcomer's `make run`: the figures of docs/tutorial.md and the README.

    python3 benchmarks/make_run.py

Clones the last commit twice into empty folders with an empty HOME (pip's cache is kept, PIP_CACHE_DIR), runs `make run`
in each and once more in the first, and compares the two results byte for byte. Then dvc_diff.py runs the first clone
with half the learning rate. Writes benchmarks/results/make_run.json. Takes about 25 minutes on two cores.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import RESULTS, ROOT, Timed, timed

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
MACHINE = "import json, measuring; print(json.dumps(measuring.machine()))"


def main() -> None:
    """Run, compare, write."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first", Path(folder) / "second"
        install, run = clone_and_run(first)
        again = make(first, "run", "Nothing to be done")
        clone_and_run(second)
        different = [name for name in SAME if (first / name).read_bytes() != (second / name).read_bytes()]
        results, python = first / "results/default", first / ".venv/bin/python"
        figures: dict[str, Any] = {
            "machine": json.loads(timed([python, "-c", MACHINE], ROOT / "benchmarks").stdout),
            "install_seconds": round(install.wall_seconds),
            "run_seconds": round(run.wall_seconds),
            "second_run_seconds": round(again.wall_seconds, 1),
            "accuracy_before": read(first / "results/base/reference/evaluate.json")["accuracy"],
            "accuracy_after": read(results / "metrics/evaluate.json")["accuracy"],
            "train": read(results / "metrics/train.json"),
            "train_resources": read(results / "metrics/train_resources.json"),
            "evaluate_resources": read(results / "metrics/evaluate_resources.json"),
            "predicted_host_bytes": read(results / "render.json")["choice"]["ranked"][0]["host_bytes"],
            "adapter_megabytes": round((results / "adapter/adapter_model.safetensors").stat().st_size / 1e6, 1),
            "merged_megabytes": round((first / "work/merged/default/model.safetensors").stat().st_size / 1e6),
            "files_that_differ_between_two_clones": different,
        }
        timed([python, "dvc_diff.py", first], ROOT / "benchmarks")
        figures["metrics_diff"] = read(RESULTS / "dvc.json")["outputs"]["dvc metrics diff"]
    text = json.dumps(figures, indent=2, sort_keys=True)
    (RESULTS / "make_run.json").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    sys.exit(bool(different))


def clone_and_run(directory: Path) -> tuple[Timed, Timed]:
    """Return the times of installing and of the first run in a fresh clone."""
    timed(["git", "clone", "--quiet", ROOT, directory], ROOT)
    return make(directory, ".venv/installed"), make(directory, "run")


def make(directory: Path, target: str, expected: str = "") -> Timed:
    """Run make with an empty HOME."""
    home = directory.with_name(f"{directory.name}-home")
    home.mkdir(exist_ok=True)
    cache = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip"))
    return timed(["make", target], directory, expected, HOME=str(home), PIP_CACHE_DIR=cache)


def read(path: Path) -> Any:
    """Return the JSON value in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
