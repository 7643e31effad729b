"""The headline metrics: few enough that `dvc metrics show` fits a terminal."""

import re
import subprocess
from pathlib import Path

import yaml
from conftest import ROOT, served

from zerolora.files import write_json
from zerolora.report.row import headline

USED = {
    "measured_host_bytes": 2.9 * 2**30,
    "predicted_host_bytes": 3.1 * 2**30,
    "measured_gpu_bytes": 61.53 * 2**30,
    "predicted_gpu_bytes": 63.21 * 2**30,
}
RESOURCES = {"tokens_per_second": 123456.789, "training_seconds": 12345.678, "total_seconds": 123456.78}


def metrics() -> dict[str, float]:
    """Return metrics as wide as they become: a long training on GPUs."""
    before = {"accuracy": 0.123456, "loss": 2.3}
    after = {"accuracy": 0.98765, "accuracy_low": 0.98321, "accuracy_high": 0.99123, "loss": 0.00061234}
    return headline(before, after, {"steps": 1000}, RESOURCES, USED)


def test_they_are_what_their_names_say() -> None:
    assert metrics() == {
        "before": 0.1235,
        "accuracy": 0.9877,
        "acc_err": 0.00401,
        "loss": 0.0006123,
        "tok/s": 123457,
        "step_s": 12.35,
        "wall_s": 123457,
        "host_use": 0.9355,
        "gpu_use": 0.9734,
    }


def test_without_questions_or_gpu_there_is_nothing_to_divide() -> None:
    used = USED | {"measured_gpu_bytes": 0, "predicted_gpu_bytes": 0}
    actual = headline({"loss": 2.0}, {"loss": 1.0}, {"steps": 10}, RESOURCES, used)
    assert set(actual) == {"loss", "tok/s", "step_s", "wall_s", "host_use"}


def test_dvc_shows_two_runs_in_120_columns(tmp_path: Path) -> None:
    """Two runs, as DVC prints them from the `metrics:` of this project's dvc.yaml."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
    paths = [path for entry in stages for path in entry.get("do", entry).get("metrics", [])]
    paths = [path for path in paths if "/tasks/" not in path]  # each task's own metrics are lines of their own
    assert set(paths) == {"results/${key}/summary.json"}
    files = [paths[0].replace("${key}", run) for run in ("default", "packing")]
    for file in files:
        write_json(tmp_path / file, metrics())
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"metrics": files}))
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    served("dvc", "init", "--quiet", directory=tmp_path, DVC_NO_ANALYTICS="1").check_returncode()
    result = served("dvc", "metrics", "show", directory=tmp_path, DVC_NO_ANALYTICS="1")
    result.check_returncode()
    shown = result.stdout.splitlines()
    assert len(shown) == 3
    assert max(map(len, shown)) <= 120, "\n".join(shown)
    assert len(re.split(r"\s+", shown[0].strip())) - 1 <= 12
