"""The comparison of all runs: its rows, its columns, and what it looks like as text."""

import csv
import json
import re
import subprocess
from pathlib import Path

import pytest
from comparison import GPU, results_of, row, settings_of
from conftest import ROOT, served
from finished_run import FinishedRun
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import CompareSettings
from zerolora.errors import UserError
from zerolora.report.comparison import compare, compare_all
from zerolora.report.comparison_charts import front
from zerolora.report.comparison_rows import all_runs, reason_in
from zerolora.report.comparison_terminal import show

ONLY_ON_GPUS = {
    *("mfu", "gpu_percent", "predicted_gpu_bytes", "measured_gpu_bytes", "gpu_hours", "energy_joules"),
}


def made(results: Path) -> Path:
    """Return the directory of the stage's output."""
    output = results / "compare"
    compare(CompareSettings.model_validate_json(settings_of(results)), output / "rows", output)
    return output


def table(output: Path) -> list[dict[str, str]]:
    with (output / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_columns_that_apply_to_no_run_are_left_out(tmp_path: Path) -> None:
    on_cpu = made(results_of(tmp_path / "cpu", {"one": row(), "two": row(1)}))
    assert not ONLY_ON_GPUS & table(on_cpu)[0].keys()
    assert "GPU" not in (on_cpu / "table.md").read_text()
    gpu = row() | GPU
    del gpu["rank_hours"]
    mixed = made(results_of(tmp_path / "mixed", {"one": gpu, "two": row(1)}))
    assert table(mixed)[0].keys() >= ONLY_ON_GPUS
    assert [each["energy_joules"] for each in table(mixed)] == ["4100000.0", ""]
    assert "1,138.9 Wh" in (mixed / "table.md").read_text()


def test_the_row_of_a_real_run_has_its_figures(tmp_path: Path) -> None:
    """The files of a finished run of SmolLM2-135M (tests/finished_run/), and the same as if on GPUs."""
    run = FinishedRun(tmp_path)
    run.page()
    actual, measured = (
        json.loads((tmp_path / name).read_text())
        for name in ("compare/rows/default.json", "default/metrics/train_resources.json")
    )
    assert (actual["status"], actual["reason"], actual["strategy"]) == ("done", "", "zero2")
    assert actual["wall_seconds"] == measured["total_seconds"]
    assert actual["accuracy_low"] < actual["accuracy"] == 0.995 < actual["accuracy_high"]
    assert sum(actual["parts"].values()) == pytest.approx(actual["step_seconds"], rel=0.02)
    assert actual["curve"][0][0] == 1 and actual["curve"][-1][0] == actual["steps"] == 100
    assert actual["adapter_bytes"] > 4 * actual["trainable_parameters"]
    assert 90 < actual["cpu_percent"] <= 100
    assert actual["communication_bytes"] == sum(measured[f"all_{what}_bytes_per_step"] for what in ("gather", "reduce"))
    assert not ONLY_ON_GPUS & actual.keys()
    run.on_gpus()
    run.edit("default/metrics/train_resources.json", lambda each: each.update(energy_joules=7200.0))
    run.page(fail_if="accuracy < 1")
    gpu = json.loads((tmp_path / "compare/rows/default.json").read_text())
    assert gpu["status"] == "failed" and gpu["reason"].startswith("evaluate.fail_if: accuracy < 1: accuracy ")
    assert gpu.keys() >= ONLY_ON_GPUS and "rank_hours" not in gpu
    assert (gpu["gpu_percent"], gpu["energy_joules"]) == (pytest.approx(87), 7200)


def test_further_tasks_are_columns_with_their_interval(tmp_path: Path) -> None:
    asked = {
        "task.arc.accuracy": 0.5,
        "task.arc.accuracy_low": 0.25,
        "task.arc.accuracy_high": 0.75,
        "task.arc.other": 1.0,
    }
    output = made(results_of(tmp_path, {"one": row() | asked, "two": row(1)}))
    head, _, first, second = (output / "table.md").read_text().splitlines()[:4]
    titles = [title.strip() for title in head.split("|")]
    cells = [[text.strip() for text in line.split("|")] for line in (first, second)]
    place = titles.index("arc: accuracy")
    assert [line[place] for line in cells] == ["0.5 (0.25–0.75)", ""]
    assert "arc: other" not in titles  # one metric a task, where there is little room
    assert table(output)[0].items() >= {key: str(value) for key, value in asked.items()}.items()
    assert json.loads((output / "metrics.json").read_text())["runs.one.task.arc.accuracy"] == 0.5


def test_what_runs_override_is_a_column(tmp_path: Path) -> None:
    rows = {"a": row(), "b": row(1)}
    ours = {"a": {"train.lora.r": 8, "render.strategy": "zero2"}, "b": {"train.lora.targets": ["q_proj", "v_proj"]}}
    output = made(results_of(tmp_path, rows, **ours))
    one, two = table(output)
    assert "render.strategy" not in one  # the column of strategies has it
    assert (one["train.lora.r"], one["train.lora.targets"]) == ("8", "")
    assert json.loads(two["train.lora.targets"]) == ["q_proj", "v_proj"]
    assert "`train.lora.r`" in (output / "table.md").read_text().splitlines()[0]


def test_rows_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = ["sweep-r8", "8b", "sweep-r64", "sweep", "sweep-r8-x"]
    output = made(results_of(tmp_path, {name: row() for name in names}))
    assert [each["run"] for each in table(output)] == ["8b", "sweep", "sweep-r8", "sweep-r8-x", "sweep-r64"]


def test_metrics_are_flat_and_dvc_shows_their_changes(tmp_path: Path) -> None:
    """Also from a commit to the next, with a run more."""
    results = results_of(tmp_path / "results", {"default": row()})
    actual = json.loads((made(results) / "metrics.json").read_text())
    assert actual["runs.default.loss"] == 0.5
    assert all(isinstance(value, int | float) for value in actual.values())
    assert {name.rsplit(".", 1)[0] for name in actual} == {"runs.default"}
    git = ("git", "-c", "user.name=me", "-c", "user.email=me@example.org")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    served("dvc", "init", "--quiet", directory=tmp_path, DVC_NO_ANALYTICS="1").check_returncode()
    subprocess.run([*git, "add", "--all"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "one"], cwd=tmp_path, check=True)
    made(results_of(results, {"default": row(loss=0.25), "other": row()}))
    command = ("dvc", "metrics", "diff", "--json", "--targets", "results/compare/metrics.json")
    changes = json.loads(served(*command, directory=tmp_path, DVC_NO_ANALYTICS="1").stdout)
    changed = changes["results/compare/metrics.json"]
    assert changed["runs.default.loss"] == {"old": 0.5, "new": 0.25, "diff": -0.25}
    assert changed["runs.other.loss"]["new"] == 0.5
    assert "runs.default.accuracy" not in changed


def test_a_missing_row_is_one_line_and_stale_ones_go(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"gone": row(), "kept": row()}, ["kept"])
    made(results)
    assert [path.name for path in (results / "compare/rows").iterdir()] == ["kept.json"]
    results_of(tmp_path, {}, ["kept", "lost"])
    command = ("zerolora", "compare", "--settings", settings_of(results), "--rows", str(results / "compare/rows"))
    failed = served(*command, "--output", str(tmp_path / "new"))
    assert failed.returncode == 2
    assert failed.stderr.splitlines() == [
        f"zerolora: {results}/compare/rows/lost.json: there is no such file; `zerolora report` writes it"
    ]
    assert not (tmp_path / "new").exists()


def test_a_refused_run_has_renders_line_as_its_reason(tmp_path: Path) -> None:
    """The stages' own commands and logs: an estimate that another version wrote, which render refuses."""
    results = results_of(tmp_path / "results", {"good": row()}, ["good", "large", "later"])
    (tmp_path / "estimate.json").write_text("{}")
    log = results / "logs/render/large.log"
    settings = resolve(load(ROOT / "config/config.yaml")).runs["default"].render
    refused = served(
        *("zerolora", "--log", str(log), "render", "--estimate", str(tmp_path / "estimate.json")),
        *("--settings", settings.model_dump_json()),
        *("--output", str(tmp_path / "zero.json"), "--reasons", str(tmp_path / "render.json")),
    )
    assert refused.returncode == 2
    rows, _ = all_runs(results)
    assert [(each["run"], each["status"]) for each in rows] == [
        ("good", "done"),
        ("large", "refused"),
        ("later", "not run"),
    ]
    said = log.read_text().strip().removeprefix("zerolora: ")
    assert rows[1]["reason"] == f"render: {said}"
    assert "run `zerolora estimate` again" in said
    assert rows[1]["strategy"] == "zero3"  # as the config has it
    told = compare_all(results, tmp_path / "work")
    assert told == f"{tmp_path}/work/index.html: 3 runs: 1 done, 1 refused, 1 not run"
    assert said.split(":")[0] in (tmp_path / "work/table.md").read_text()
    shown = " ".join(show(results, colour=False).split())  # a long path begins a line of its own
    assert f"large: refused: render: {said[:20]}" in shown
    # Once a later run has made its output, the old message is no reason any more.
    (results / "large").mkdir()
    (results / "large/zero.json").write_text("{}")
    assert all_runs(results)[0][1]["status"] == "not run"


def test_a_run_that_waits_for_its_jobs_has_no_results_of_before(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"good": row(), "other": row()})
    rows, _ = all_runs(results, {"other": "train"})
    assert [each["status"] for each in rows] == ["done", "not run"]
    assert "train has to run again" in rows[1]["reason"]
    assert "loss" not in rows[1]


def test_a_stage_that_ended_well_is_no_reason(tmp_path: Path) -> None:
    """Its outputs were removed since, and its log has a warning at its end."""
    results = results_of(tmp_path, {}, ["one"])
    log = results / "logs/train/one.log"
    log.parent.mkdir(parents=True)
    log.write_text("zerolora: rank 1 is slow\n")
    log.with_suffix(".status.json").write_text(json.dumps({"started": 1, "result": "loss 4.8 -> 0.1"}))
    (only,), _ = all_runs(results)
    assert (only["status"], only["reason"]) == ("not run", "")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["chatter", "zerolora: GPU memory is too small; write zero3", ""], "GPU memory is too small; write zero3"),
        (["zerolora: rank 1 is slow", "step 3", "zerolora: loss is nan at step 4"], "loss is nan at step 4"),
        (
            [
                *("step 1", "zerolora: rank 1 failed with exit code 1; its last lines:", "zerolora: Traceback"),
                "zerolora: RuntimeError: out of memory",
            ],
            "rank 1 failed with exit code 1: RuntimeError: out of memory",
        ),
        (["zerolora: loss is nan at step 2", "zerolora: rank 0 failed with exit code 2"], "loss is nan at step 2"),
        (
            ["Traceback", "OSError: disk full", "zerolora: rank 0 failed with exit code 1"],
            "rank 0 failed with exit code 1: OSError: disk full",
        ),
        (["step 60", "zerolora: rank 0 failed with signal SIGKILL"], "rank 0 failed with signal SIGKILL"),
        (
            [
                *("zerolora: nothing fits, not even with the smallest:", "zerolora:   strategy  GPU  host"),
                *(
                    "zerolora:   zero3: 5 GiB are more than 3 GiB",
                    "zerolora: write into the run:",
                    "zerolora:   render:",
                ),
            ],
            "nothing fits, not even with the smallest: 5 GiB are more than 3 GiB",
        ),
        (["zerolora: rank 1 is slow", "Killed"], ""),
        ([], ""),
    ],
)
def test_the_reason_is_the_last_message_of_a_log(tmp_path: Path, lines: list[str], reason: str) -> None:
    (tmp_path / "a.log").write_text("\n".join(lines))
    assert reason_in(tmp_path / "a.log", "zero3") == reason


def test_a_stage_that_was_killed_is_told_with_how_far_it_was(tmp_path: Path) -> None:
    results = results_of(tmp_path, {}, ["one"])
    log = results / "logs/train/one.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 60/100\n")
    log.with_suffix(".status.json").write_text(json.dumps({"started": 1, "done": 60, "total": 100}))
    (only,), _ = all_runs(results)
    assert (only["status"], only["reason"]) == (
        "failed",
        f"train: runs, or ended without a message at 60 of 100; see {log}",
    )


@pytest.mark.parametrize(("stage", "log"), [("task", "one-sums"), ("task_base", "rows-sums"), ("task_rows", "sums")])
def test_a_further_task_that_fails_is_why_a_run_has_no_report(tmp_path: Path, stage: str, log: str) -> None:
    results = results_of(tmp_path, {}, ["one"])
    path = results / f"logs/{stage}/{log}.log"
    path.parent.mkdir(parents=True)
    path.write_text("zerolora: data/sums.jsonl:3: the prompt has 9,000 tokens\n")
    path.with_suffix(".status.json").write_text(json.dumps({"started": 1}))
    (only,), _ = all_runs(results)
    assert (only["status"], only["reason"]) == ("failed", f"{stage}: data/sums.jsonl:3: the prompt has 9,000 tokens")


def test_a_terminal_gets_120_columns_and_is_told_what_is_left_out(tmp_path: Path) -> None:
    runs = {f"run-{index:03}": row(index) | GPU for index in range(12)}
    ours = {name: {"train.lora.r": 8, "train.learning_rate": 0.002} for name in runs}
    text = show(results_of(tmp_path, runs, **ours), colour=False)
    assert max(map(cell_len, text.splitlines())) <= 120
    header = text.splitlines()[0]
    for title in ("run", "status", "strategy", "accuracy", "loss", "wall time"):
        assert title in header
    (left_out,) = re.findall(r"Left out for room: ([^;]*);", " ".join(text.split()))
    assert left_out.split(", ")[-1] == "steps"
    assert not set(left_out.split(", ")) & set(re.split(r"  +", header))
    # With few columns there is room for all of them.
    bare = {"status": "done", "reason": "", "strategy": "ddp", "loss": 1.0}
    assert "Left out" not in show(results_of(tmp_path / "few", {"one": bare, "two": bare}), colour=False)


def test_a_terminal_folds_names_and_escapes_nothing_into_it(tmp_path: Path) -> None:
    text = show(results_of(tmp_path, {"n" * 100: row(), "b": row()}), colour=False)
    assert max(map(cell_len, text.splitlines())) <= 120
    assert "\x1b" not in text
    coloured = show(results_of(tmp_path, {"n" * 100: row(), "b": row()}), colour=True)
    assert "\x1b[32m" in coloured


def test_markdown_means_nothing_but_itself(tmp_path: Path) -> None:
    reason = "evaluate.fail_if: a | b <script>alert(1)</script> `x` [l](javascript:alert(1))"
    output = made(results_of(tmp_path, {"one": row(status="failed", reason=reason), "two": row()}))
    lines = (output / "table.md").read_text().splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "``evaluate.fail_if: a \\| b <script>alert(1)</script> `x` [l](javascript:alert(1))``" in lines[2]
    page = (output / "index.html").read_text()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_a_page_of_runs_that_all_failed_has_no_chart(tmp_path: Path) -> None:
    results = results_of(tmp_path, {}, ["one", "two"])
    compare_all(results, tmp_path / "work")
    page = (tmp_path / "work/index.html").read_text()
    assert "<figure" not in page and "not run" in page
    with pytest.raises(UserError, match="config.json: there is no such file"):
        all_runs(tmp_path / "none")


def test_results_of_an_older_version_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"runs": {"default": {"dataset": "rows"}}}')
    said = served("zerolora", "show", "--results", str(tmp_path))
    assert (said.returncode, said.stderr.splitlines()[-1]) == (
        2,
        f"zerolora: {tmp_path}/config.json: was written by another version; run `zerolora resolve` again",
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_front_is_what_no_other_run_beats(points: list[tuple[int, int]]) -> None:
    named = [(*point, str(index)) for index, point in enumerate(points)]
    kept = {points[int(name)] for name in front(named)}

    def beaten(point: tuple[int, int]) -> bool:
        return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)

    assert kept == {point for point in points if not beaten(point)}
