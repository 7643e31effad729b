"""What code fingerprints leave out changes no output: the pipeline runs as it is, and with those modules altered."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Project
from engines import edit_config

from zerolora.config.fingerprint import LEFT_OUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# What is added to the end of each module that observes or tells, so that it does so no more, or wrongly.
ALTERED = {
    "model.base_check": "check_base = check_settings = check_shared = lambda *_: None",
    "data.formats.mappings": "mapping_text = lambda *_: ''",
    "errors": "explained = lambda error: 'it failed'",
    "evaluate.batches": "PromptBatches.rows = lambda self, prompt, left: 1",
    "probe.listed_trial": "check = lambda *_: None",
    "probe.meta_trial": "check = lambda *_: None",
    "methods.adapter_check": "check_adapter = check_whole = check_finite = lambda *_: None",
    "log": "LOGGER.disabled = True\nresult = lambda text: None",
    "machine.parents": "end_with_engine = end_with_parent = end_at_parents_death = lambda: None",
    "machine.peak_memory": "_own = PeakMemory.of_all_ranks\n"
    "PeakMemory.of_all_ranks = lambda self: dict.fromkeys(_own(self), 7)",
    "progress": "Progress.update = lambda self, amount=1, text='': None",
    "train.launch.heartbeat": "_Monitor.run = _Monitor.exchange = lambda self: None",
    "train.telemetry.health": "Health.judge = lambda self, row: ['all is lost']",
    "train.telemetry.stopwatch": "_own = Stopwatch.seconds\n"
    "Stopwatch.seconds = lambda self: {part: 1.0 for part in _own(self)}\n"
    "Collectives.add = lambda self, *_: None",
    "train.telemetry.stragglers": "ForwardTimer.taken = lambda self: 1.0",
    "train.telemetry.system_monitor": "_own = SystemMonitor.now\n"
    "SystemMonitor.now = lambda self: dict.fromkeys(_own(self))\n"
    "EnergyMeter.since_last = EnergyMeter.of_all_ranks = lambda self: 7.0",
    "train.telemetry.trackers": "TrackedRun.log = TrackedRun.close = lambda self, *_: None",
    "units": "byte_size = gib = lambda count: 'much'",
}
# These pass their arguments on, which an alteration would break; their reasons are in LEFT_OUT.
HAND_ON = {"", "cli", "commands", "config", "files", "types"}
HAND_ON |= {"machine.devices", "planner.machine_limits", "model.foreign", "json_file"}
# No stage calls these.
BY_HAND = {"imports"}
# Files that hold times, memory or sizes as text, and what is made of them.
MEASURED = {
    "default/metrics/telemetry.csv",
    "default/metrics/train_resources.json",
    "default/metrics/evaluate_resources.json",
    "base/rows/evaluate_resources.json",
    "default/render.json",
    "default/report.html",
    "default/timings.json",
    *(f"compare/{name}" for name in ("index.html", "metrics.json", "rows/default.json", "table.csv", "table.md")),
    "default/usage.json",
}
# Files of losses, which depend on the rows of a batch by rounding: oneDNN's kernels differ by the number of rows.
ROUNDED = {"base/rows/evaluate.json", "default/metrics/evaluate.json", "default/metrics/difference.json"}
ROUNDED |= {"default/summary.json", "default/tasks/held_out.metrics.json"}


def test_every_module_that_is_left_out_is_altered_or_hands_on() -> None:
    assert set(ALTERED) | HAND_ON | BY_HAND == set(LEFT_OUT)
    assert not set(ALTERED) & (HAND_ON | BY_HAND)


def is_close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_close(each, other[name]) for name, each in one.items())
    return bool(one == other or (isinstance(one, float) and one == pytest.approx(other, rel=1e-6)))


def test_altered_they_change_no_output(make_project: Callable[[str], Project]) -> None:
    """Two runs of the whole pipeline, each with a server of its own code, which takes half a minute."""
    actual = {}
    for name in ("as-it-is", "altered"):
        project = make_project(name)
        edit_config(
            project,
            **{
                "train.ranks_per_node": 2,
                "train.micro_batch": 1,
                "train.validation_steps": 1,
                "train.tracker": "tensorboard",
            },
        )
        if name == "altered":
            for module, text in ALTERED.items():
                path = project.directory / "src/zerolora" / module.replace(".", "/")
                path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
                path.write_text(f"{path.read_text()}\n{text}\n")
        project.snakemake("all")
        results = project.directory / "results"
        actual[name] = {
            str(path.relative_to(results)): path.read_bytes()
            for path in results.rglob("*")
            if path.is_file() and path.relative_to(results).parts[0] != "logs"
        }
    one, other = actual["as-it-is"], actual["altered"]
    assert one.keys() == other.keys() > MEASURED
    # Receipts have the hashes of these files, and of the code.
    one, other = ({name: text for name, text in each.items() if name[:9] != "receipts/"} for each in (one, other))
    different = {name for name in one if one[name] != other[name]}
    assert different <= MEASURED | ROUNDED
    assert all(is_close(json.loads(one[name]), json.loads(other[name])) for name in different & ROUNDED)
    resources = [json.loads(each["default/metrics/train_resources.json"]) for each in (one, other)]
    assert [each["peak_host_bytes_all_ranks"] == 7 for each in resources] == [False, True]
    assert ["all_reduce_calls_per_step" in each for each in resources] == [True, False]
