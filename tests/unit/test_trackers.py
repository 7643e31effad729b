"""Every installed tracker records a run of two steps."""

import importlib.util
from pathlib import Path

import pytest
from conftest import ROOT

from zerolora.config.schema import Train
from zerolora.config.values import NO_TRACKER
from zerolora.errors import UserError
from zerolora.train.telemetry.trackers import TRACKERS, TrackedRun, check


@pytest.mark.parametrize("name", TRACKERS)
def test_tracker_is_in_config_and_docs_and_records_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert name in Train.model_json_schema()["properties"]["tracker"]["enum"]
    assert f"| `{name}` |" in (ROOT / "docs/telemetry.md").read_text()
    package = TRACKERS[name].package
    if package and importlib.util.find_spec(package) is None:
        with pytest.raises(UserError, match=f"train.tracker is {name}, .*pip install {package}"):
            check(name)
        return
    check(name)
    for variable in TRACKERS[name].offline:
        monkeypatch.setenv(variable, TRACKERS[name].offline[variable])
    monkeypatch.chdir(tmp_path)
    run = TrackedRun(name, tmp_path / "mine", {"learning_rate": 0.01})
    for step in (1, 2):
        run.log({"step": step, "loss": 1 / step, "mfu": None})
    run.close()
    assert any(path.is_file() and path.stat().st_size for path in (tmp_path / "mine" / name).rglob("*"))
    assert not caplog.records


def test_no_tracker_writes_nothing(tmp_path: Path) -> None:
    check(NO_TRACKER)
    run = TrackedRun(NO_TRACKER, tmp_path / "mine", {})
    run.log({"step": 1, "loss": 1.0})
    run.close()
    assert list(tmp_path.iterdir()) == []
