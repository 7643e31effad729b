"""The canary: a setting that computes something else is stopped before the run, a sound one continues."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, metrics

from zerolora.config.settings import TrainSettings
from zerolora.machine import identity
from zerolora.planner.zero_json import ZeroJson
from zerolora.strategies import STRATEGIES
from zerolora.train.launch.canary_verdict import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # real ranks, seconds each

# In the process that forks the ranks: gradients of this strategy are twice as large, which AdamW hides in the losses.
SCALED = """
from zerolora.train.engines import engine
def init(self, model, config, plan, device, init=engine.TorchEngine.__init__):
    init(self, model, config, plan, device)
    if plan.strategy == "ddp_risky":
        self.divisor *= 2
engine.TorchEngine.__init__ = init
"""


@pytest.fixture
def risky(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a strategy that is DDP, and says that it is risky."""
    strategy = replace(STRATEGIES["ddp"], name="ddp_risky", risk="a test says so")
    monkeypatch.setitem(STRATEGIES, strategy.name, strategy)
    return strategy.name


def kept(bench: Bench, name: str) -> Path:
    (result,) = (bench.folder / "canary" / name).glob("*.json")
    return result


def test_a_strategy_that_scales_gradients_is_stopped_with_both_curves(bench: Bench, risky: str) -> None:
    command = bench.command("scaled", risky, canary=3)
    result = bench.server.run(command, bench.folder, bench.environment, SCALED)
    assert result.returncode == 2, result.stderr[-2000:]
    curves = json.loads(kept(bench, "scaled").read_text())["curves"]
    assert curves["risky"]["loss"] == pytest.approx(curves["safe"]["loss"], rel=1e-4)
    assert curves["risky"]["gradient_norm"] == pytest.approx(
        [2 * norm for norm in curves["safe"]["gradient_norm"]], rel=1e-3
    )
    last = result.stderr.splitlines()[-1]
    assert "train.canary: the first 3 steps under ddp_risky (a test says so) are not those of a safe setting" in last
    for curve in curves.values():
        assert ", ".join(f"{norm:.5g}" for norm in curve["gradient_norm"]) in last
    assert "set render.strategy: ddp " in last and "Traceback" not in result.stderr
    assert not (bench.folder / "scaled/adapter").exists()
    again = bench.server.run(command, bench.folder, bench.environment, SCALED)
    assert again.returncode == 2 and again.stderr.splitlines()[-1] == last
    assert "twice" in result.stderr and "twice" not in again.stderr
    assert not (bench.home / "cache/zerolora/canary").exists()


def test_sound_strategy_continues_and_is_not_compared_again(
    bench: Bench, reference: dict[str, Any], risky: str
) -> None:
    command = bench.command("sound", risky, canary=2)
    result = bench.server.run(command, bench.folder, bench.environment)
    assert result.returncode == 0 and "canary: the first 2 steps, twice: a test says so" in result.stderr
    actual = json.loads(kept(bench, "sound").read_text())
    assert len(actual["curves"]["risky"]["loss"]) == 2 and actual["seconds"] > 0
    assert metrics(bench.folder / "sound")["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert not kept(bench, "sound").with_suffix("").exists()
    again = bench.server.run(command, bench.folder, bench.environment)
    assert again.returncode == 0 and "canary" not in again.stderr

    # Another run of the same setting, with other rates and seed, shares the verdict.
    (verdict,) = (bench.home / "cache/zerolora/canary").glob("*.json")
    record = json.loads(verdict.read_text())
    assert record["curves"] == actual["curves"]
    command = bench.command("shared", risky, canary=2, seed=7, learning_rate=3e-4, max_steps=2)
    shared = bench.server.run(command, bench.folder, bench.environment)
    assert shared.returncode == 0 and "twice" not in shared.stderr, shared.stderr[-2000:]
    assert f"canary: passed on {record['date']} on this machine, with these versions and setting" in shared.stderr
    assert json.loads(kept(bench, "shared").read_text())["passed"] == record["date"]
    # A failure in its place, or a damaged one, is not read as a pass: the canary runs again.
    record["curves"]["risky"]["loss"][0] *= 2
    verdict.write_text(json.dumps(record))
    command = bench.command("doubted", risky, canary=2, seed=8, max_steps=2)
    doubted = bench.server.run(command, bench.folder, bench.environment)
    assert doubted.returncode == 0 and "canary: the first 2 steps, twice" in doubted.stderr
    assert json.loads(verdict.read_text())["curves"]["risky"]["loss"][0] != record["curves"]["risky"]["loss"][0]


def test_a_verdict_holds_for_one_machine_versions_and_setting(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(bench.folder / "other-cache"))
    command = bench.command("verdicts")
    option = {name.removeprefix("--"): value for name, value in zip(command[3::2], command[4::2], strict=True)}
    settings, zero = TrainSettings.model_validate_json(option["settings"]), ZeroJson.read(Path(option["zero"]))
    paths = {name: Path(option[name]) for name in ("data", "packing", "weights", "checkpoints")}

    def path(settings: TrainSettings = settings, zero: ZeroJson = zero) -> Path:
        return Verdict(settings, zero, paths).path

    first = path()
    assert first.is_relative_to(bench.folder / "other-cache")
    assert path(settings.model_copy(update={"seed": 9, "learning_rate": 1.0, "epochs": 7})) == first
    others = [
        path(settings.model_copy(update={"optimizer": "lion"})),
        path(zero=ZeroJson(options={**zero.options, "overlap_comm": True}, choice=zero.choice)),
        path(zero=ZeroJson(options=zero.options, choice=zero.choice.model_copy(update={"attention": "eager"}))),
    ]
    with monkeypatch.context() as changed:
        changed.setattr(identity, "processor", lambda: "another")
        others.append(path())
    with monkeypatch.context() as changed:
        versions = {**identity.versions(), "torch": "2.13.1"}
        changed.setattr(identity, "versions", lambda: versions)
        others.append(path())
    weights = json.loads(paths["weights"].read_text())
    name = next(iter(weights["files"]))
    other_weights = bench.folder / "other-weights.json"
    other_weights.write_text(json.dumps({**weights, "files": {f"other-{name}": weights["files"][name]}}))
    others.append(Verdict(settings, zero, {**paths, "weights": other_weights}).path)
    assert len({first, *others}) == 1 + len(others)

    verdict = Verdict(settings, zero, paths)
    for damaged in ("", "[]", "{}", '{"date": "2026-01-01", "curves": {"risky": {"loss": [1.0]}}}'):
        verdict.path.parent.mkdir(parents=True, exist_ok=True)
        verdict.path.write_text(damaged)
        assert verdict.read() is None
