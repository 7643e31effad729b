"""Searches: chosen values, bounds, outcomes, and refusals."""

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from zerolora.config.file import load
from zerolora.config.schema import Range, Search
from zerolora.config.settings import TrainSettings
from zerolora.config.studies import StopAbove, Study, Trial, path_of, read_study, write_study
from zerolora.errors import UserError
from zerolora.files import write_json, write_text
from zerolora.search.outcomes import Outcome, outcomes, table
from zerolora.search.trial_values import FEWEST, bounds, choose
from zerolora.train.validation import Validations

OVER: dict[str, Any] = {
    "train.learning_rate": {"low": 1e-5, "high": 1e-3, "log": True},
    "train.lora.r": [8, 16],
    "train.warmup_steps": {"low": 0, "high": 10, "step": 5},
    "train.lora.targets": {"qv": ["q_proj", "v_proj"], "all": "all-linear"},
    "train.lora.dropout": {"low": 0.0, "high": 0.5, "step": 0.25},
}


def search(**more: Any) -> Search:
    return Search.model_validate({"dataset": "rows", "over": OVER, **more})


def with_loss(loss: float, state: Any = "complete") -> Outcome:
    return Outcome(state, loss, [(5, loss + 1), (10, loss)])


WAITING = Outcome("waiting")


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_values_are_within_the_search(sampler: str) -> None:
    trials = choose(search(sampler=sampler), [], [], 20)
    for trial in trials:
        rate = trial.values["train.learning_rate"]
        assert 1e-5 <= rate <= 1e-3 and rate == float(f"{rate:.4g}")
        assert trial.values["train.lora.r"] in (8, 16)
        assert trial.values["train.warmup_steps"] in (0, 5, 10)
        assert trial.values["train.lora.targets"] in (["q_proj", "v_proj"], "all-linear")
        assert trial.values["train.lora.dropout"] in (0.0, 0.25, 0.5)
        assert not trial.failed and not trial.stop_above
    assert len({trial.values["train.learning_rate"] for trial in trials}) == 20
    assert {trial.values["train.lora.r"] for trial in trials} == {8, 16}


def test_same_trials_lead_to_the_same_values() -> None:
    first = choose(search(), [], [], 3)
    assert choose(search(), [], [], 3) == first != choose(search(seed=1), [], [], 3)
    assert choose(search(), first, [WAITING] * 3, 3) != first


def test_tpe_approaches_low_losses() -> None:
    """The loss is the distance of the rate from 1e-4: the last 10 of 30 trials are closer than the first 10."""
    wanted = search(over={"train.learning_rate": OVER["train.learning_rate"]}, trials=30)

    def loss(trial: Trial) -> float:
        return abs(math.log10(trial.values["train.learning_rate"]) + 4)

    trials: list[Trial] = []
    while len(trials) < 30:
        trials += choose(wanted, trials, [with_loss(loss(each)) for each in trials], 2)
    distances = [loss(trial) for trial in trials]
    assert sum(distances[-10:]) < 0.5 * sum(distances[:10])


def test_failed_waiting_and_other_trials_are_accepted() -> None:
    failed, waiting, pruned = choose(search(), [], [], 3)
    without_keys = Trial(values={"train.lora.r": 8})
    of_another_value = Trial(values={**waiting.values, "train.lora.r": 64})
    off_the_grid = Trial(values={**waiting.values, "train.warmup_steps": 3})
    of_another_kind = Trial(values={**waiting.values, "train.learning_rate": "fast"})
    trials = [failed, waiting, pruned, without_keys, of_another_value, off_the_grid, of_another_kind]
    actual = [Outcome("failed"), WAITING, with_loss(2.0, "pruned"), *[with_loss(1.0)] * 4]
    assert len(choose(search(), trials, actual, 2)) == 2


LOSSES = st.lists(st.floats(0, 10, allow_nan=False), min_size=3, max_size=3)


@given(complete=st.lists(LOSSES, min_size=0, max_size=8), ours=LOSSES)
def test_pruning_matches_optunas_median_pruner(complete: list[list[float]], ours: list[float]) -> None:
    steps = (5, 10, 15)
    trials = [Outcome("complete", losses[-1], list(zip(steps, losses, strict=True))) for losses in complete]
    settings = {"device": "cpu", "validation_steps": 5, "stop_above": [each.model_dump() for each in bounds(trials)]}
    validations = Validations(TrainSettings.model_validate(settings), 100)
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=FEWEST))
    for trial in trials:
        frozen = optuna.trial.create_trial(value=trial.loss, intermediate_values=dict(trial.validations))
        study.add_trial(frozen)
    theirs = study.ask()
    for step, loss in zip(steps, ours, strict=True):
        validations.add(step, {"loss": loss})
        theirs.report(loss, step)
        assert validations.above_bar == theirs.should_prune()


def test_study_file_reads_back_and_has_a_key_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    earlier = choose(search(), [], [], FEWEST)
    study = Study(trials=choose(search(prune=True), earlier, [with_loss(1.5)] * FEWEST, 2))
    assert [(bar.step, bar.loss) for bar in study.trials[0].stop_above] == [(5, 2.5), (10, 1.5)]
    write_study("tune", study)
    assert read_study("tune") == study
    assert re.search(r'^ +"train.lora.r": (8|16),?$', path_of("tune").read_text(encoding="utf-8"), re.MULTILINE)
    assert read_study("other") == Study()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "Invalid JSON: EOF while parsing"),
        ("[]", "Input should be an object"),
        ('{"trials": [{"values": {}, "failed": 1}]}', "trials.0.failed: Input should be a valid string"),
    ],
)
def test_broken_study_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path_of("tune").parent.mkdir(parents=True)
    path_of("tune").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="config/searches/tune.json: ") as error:
        read_study("tune")
    assert expected in str(error.value) and "\n" not in str(error.value)


CONFIG: dict[str, Any] = {
    "hardware": {"device": "cpu", "host_memory": "4GiB"},
    "fetch": {"directory": {"tiny": {"path": "model", "license": "MIT"}}},
    "prepare": {"rows": {"model": "tiny", "path": "rows.json", "split": {"validation": 2, "test": 2}}},
    "train": {"validation_steps": 5},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config.yaml"


def write(config: Path, **values: Any) -> None:
    config.write_text(yaml.safe_dump({**CONFIG, **values}, sort_keys=False), encoding="utf-8")


def test_trials_are_runs_with_their_values_and_bounds(config: Path) -> None:
    write(config, searches={"tune": {"dataset": "rows", "over": OVER, "train": {"lora": {"alpha": 4.0}}}})
    bar = {"step": 5, "loss": 1.5}
    values = {"train.learning_rate": 2e-4, "train.lora.r": 16}
    trials = [{"values": values, "stop_above": [bar]}, {"values": values, "failed": "train: no"}]
    write_study("tune", Study.model_validate({"trials": trials}))
    checked = load(config)
    assert list(checked.all_runs) == ["tune-0"]
    train = checked.all_runs["tune-0"].train
    assert train == {"learning_rate": 2e-4, "lora": {"alpha": 4.0, "r": 16}, "stop_above": [bar]}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"over": {"train.lr": [1.0]}}, "searches.tune.over.train.lr: there is no such key; use train.learning_rate"),
        ({"over": {"train.lora.r": {"low": 8, "high": 8}}}, "low 8 is not below high 8"),
        ({"over": {"train.learning_rate": {"low": 0.0, "high": 1.0, "log": True}}}, "low 0.0 has no logarithm"),
        ({"over": {"train.lora.r": {"low": 8, "high": 16, "step": 9}}}, "step 9 is not between 0 and high - low"),
        ({"over": {"train.lora.r": {"low": 8, "high": 16, "step": 2, "log": True}}}, "exclude each other"),
        ({"over": {"train.lora.r": []}}, "use at least one entry"),
        ({"over": {"train.lora.r": [8, 8]}}, "8 occurs twice"),
        ({"over": {"train.lora.r": [8]}, "train": {"lora": {"r": 8}}}, "the search also sets train.lora.r: 8"),
        ({"over": {"train.lora.r": [8]}, "prune": True, "train": {"validation_steps": None}}, "searches.tune.prune"),
        ({"over": {"train.dpo.beta": [0.1, 0.5]}}, "over.train.dpo.beta: changes the loss itself"),
        ({"over": {"train.objective": ["sft"]}}, "over.train.objective: changes the loss itself"),
        ({"over": {"train.lora.r": [8]}, "sampler": "best"}, "'best' is not valid; use 'tpe' or 'random'"),
        (
            {"over": {"train.lora.r": [8]}},
            "or all trials failed; run `zerolora search tune -- COMMAND`",
        ),
    ],
)
def test_mistake_in_a_search_is_one_line(config: Path, asked: dict[str, Any], expected: str) -> None:
    write(config, searches={"tune": {"dataset": "rows", **asked}})
    with pytest.raises(UserError) as error:
        load(config)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{config}:") and expected in line


def test_trial_value_that_cannot_run_names_its_key(config: Path) -> None:
    over = {"train.global_batch": [8, 7]}
    write(config, searches={"tune": {"dataset": "rows", "over": over, "train": {"ranks_per_node": 2}}})
    write_study("tune", Study(trials=[Trial(values={"train.global_batch": 7})]))
    with pytest.raises(UserError, match="searches.tune.over.train.global_batch: 7 is not a multiple of 2 ranks"):
        load(config)


def test_run_with_a_trials_name_is_refused(config: Path) -> None:
    write(config, runs={"tune-0": {"dataset": "rows"}}, searches={"tune": {"dataset": "rows", "over": OVER}})
    write_study("tune", Study(trials=[Trial(values={"train.lora.r": 8})]))
    with pytest.raises(UserError, match="searches.tune: has a run tune-0, but so has another section"):
        load(config)


def test_ranges_are_whole_if_all_values_are() -> None:
    assert Range(low=1, high=8).is_whole and Range(low=1, high=9, step=2).is_whole
    assert not Range(low=1, high=8.0).is_whole and not Range(low=1, high=8, step=0.5).is_whole


def result_of(run: str, losses: dict[int, float], steps: int, planned: int) -> None:
    """Write the metrics of a training."""
    metrics = Path("results") / run / "metrics"
    rows = [f"{step},1.0,0.001,{losses.get(step, '')}" for step in range(1, steps + 1)]
    write_text(metrics / "loss.csv", "\n".join(["step,loss,learning_rate,loss_validation", *rows, ""]))
    trained = {"steps": steps, "planned_steps": planned, "loss_validation": min(losses.values())}
    write_json(metrics / "train.json", trained)


def test_outcomes_match_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bar = [StopAbove(step=2, loss=1.0)]
    study = Study(trials=[Trial(values={}, stop_above=bar) for _ in range(4)])
    study.trials.append(Trial(values={}, failed="train: no"))
    result_of("tune-0", {2: 0.9, 4: 0.8}, 4, 4)
    result_of("tune-1", {2: 1.1}, 2, 4)
    result_of("tune-2", {2: 1.1}, 2, 2)  # a bar at the end stops nothing
    study.trials.append(Trial(values={}))
    result_of("tune-5", {2: float("nan")}, 2, 2)
    actual = outcomes("tune", study)
    assert [each.state for each in actual] == ["complete", "pruned", "complete", "waiting", "failed", "failed"]
    assert [each.loss for each in actual] == [0.8, 1.1, 1.1, None, None, None]
    assert actual[0].validations == [(2, 0.9), (4, 0.8)]
    Path("results/tune-1/metrics/loss.csv").write_text("step\n1\n", encoding="utf-8")
    with pytest.raises(UserError, match="results/tune-1/metrics: train.json and loss.csv are not those of one"):
        outcomes("tune", study)


def test_table_starts_with_the_lowest_loss_and_explains_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trials = choose(search(), [], [], 3)
    study = Study(trials=[*trials, trials[2].model_copy(update={"failed": "train: [it] is out of memory"})])
    result_of("tune-0", {2: 2.0}, 2, 2)
    result_of("tune-1", {2: 1.0}, 2, 2)
    text = table("tune", study)
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:] if line.startswith("tune-")][:4] == [
        "tune-1",
        "tune-0",
        "tune-2",
        "tune-3",
    ]
    assert "tune-3: train: [it] is out of memory" in lines
    assert "lowest validation loss is that of tune-1" in text
    assert max(map(len, lines)) <= 120


def test_signal_while_the_command_starts_is_forwarded() -> None:
    """Otherwise the engine would outlive the search."""
    script = """
import os, subprocess
from zerolora.search.rounds import run_to_end
start = subprocess.Popen
def interrupted(command, **options):
    os.kill(os.getpid(), 15)
    return start(command, **options)
subprocess.Popen = interrupted
print(run_to_end(["sleep", "20"])[0])
"""
    search = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=600)
    assert search.stdout == f"{-signal.SIGINT}\n"


@pytest.mark.parametrize(
    ("asked", "before"),
    [(signal.SIGINT, "default_int_handler"), (signal.SIGTERM, "default_int_handler"), (signal.SIGTERM, "SIG_IGN")],
)
def test_signal_lets_the_command_end_itself(asked: signal.Signals, before: str) -> None:
    """So an engine can save a checkpoint. Ctrl-C reaches the whole group; SIGTERM is forwarded as a SIGINT, in whose
    handler Snakemake takes no lock, also by a search in a shell's background, which ignores Ctrl-C."""
    engine = "trap 'kill $!; exit 7' INT; trap 'kill $!; exit 8' TERM; sleep 20 & echo runs; wait"
    script = f"from zerolora.search.rounds import run_to_end; print(run_to_end(['sh', '-c', {engine!r}])[0])"
    with subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(2, signal.{before}); {script}"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as search:
        assert search.stdout and search.stdout.readline() == "runs\n"
        (os.killpg if asked == signal.SIGINT else os.kill)(search.pid, asked)
        assert search.stdout.readline() == "7\n"
        os.killpg(search.pid, signal.SIGKILL)
