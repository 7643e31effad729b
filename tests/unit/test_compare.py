"""The comparison of all runs: rows, columns, terminal output."""

import csv
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from comparison import GPU, results_of, row, settings_of, write_settings
from conftest import ROOT, served
from finished_run import FinishedRun
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import CompareSettings
from zerolora.errors import UserError
from zerolora.files import write_json
from zerolora.report.comparison import compare, compare_all
from zerolora.report.comparison_charts import front, sections
from zerolora.report.comparison_rows import all_runs, reason_in
from zerolora.report.comparison_terminal import show
from zerolora.report.run_settings import settings_of_run

ONLY_ON_GPUS = {"mfu", "gpu_percent", "predicted_gpu_bytes", "measured_gpu_bytes", "gpu_hours", "energy_joules"}


def made(results: Path) -> Path:
    output = results / "compare"
    compare(CompareSettings.model_validate_json(settings_of(results)), output / "rows", output)
    return output


def table(output: Path) -> list[dict[str, str]]:
    with (output / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_inapplicable_columns_are_omitted(tmp_path: Path) -> None:
    on_cpu = made(results_of(tmp_path / "cpu", {"one": row(), "two": row(1)}))
    assert not ONLY_ON_GPUS & table(on_cpu)[0].keys()
    assert "GPU" not in (on_cpu / "table.md").read_text()
    gpu = row() | GPU
    del gpu["rank_hours"]
    mixed = made(results_of(tmp_path / "mixed", {"one": gpu, "two": row(1)}))
    assert table(mixed)[0].keys() >= ONLY_ON_GPUS
    assert [each["energy_joules"] for each in table(mixed)] == ["4100000.0", ""]
    assert "1,138.9 Wh" in (mixed / "table.md").read_text()


def test_row_of_a_real_run(tmp_path: Path) -> None:
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
    task = {"accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75, "other": 1.0}
    values = {f"task.arc.{name}": value for name, value in task.items()}
    output = made(results_of(tmp_path, {"one": row() | values, "two": row(1)}))
    head, _, first, second = (output / "table.md").read_text().splitlines()[:4]
    titles = [title.strip() for title in head.split("|")]
    cells = [[text.strip() for text in line.split("|")] for line in (first, second)]
    column = titles.index("arc: accuracy")
    assert [line[column] for line in cells] == ["0.5 (0.25–0.75)", ""]
    assert "arc: other" not in titles  # one metric for each task
    assert table(output)[0].items() >= {key: str(value) for key, value in values.items()}.items()
    assert json.loads((output / "metrics.json").read_text())["runs.one.task.arc.accuracy"] == 0.5


def test_overridden_settings_are_columns(tmp_path: Path) -> None:
    rows = {"a": row(), "b": row(1)}
    ours = {"a": {"train.lora.r": 8, "render.strategy": "zero2"}, "b": {"train.lora.targets": ["q_proj", "v_proj"]}}
    output = made(results_of(tmp_path, rows, **ours))
    one, two = table(output)
    assert "render.strategy" not in one  # the column of strategies has it
    assert (one["train.lora.r"], one["train.lora.targets"]) == ("8", "")
    assert json.loads(two["train.lora.targets"]) == ["q_proj", "v_proj"]
    assert "`train.lora.r`" in (output / "table.md").read_text().splitlines()[0]


def test_rows_are_in_natural_order(tmp_path: Path) -> None:
    names = ["sweep-r8", "8b", "sweep-r64", "sweep", "sweep-r8-x"]
    output = made(results_of(tmp_path, {name: row() for name in names}))
    assert [each["run"] for each in table(output)] == ["8b", "sweep", "sweep-r8", "sweep-r8-x", "sweep-r64"]


def test_metrics_are_flat_and_dvc_shows_their_changes(tmp_path: Path) -> None:
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


def test_missing_row_is_one_line_and_stale_rows_are_deleted(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"stale": row(), "current": row()}, ["current"])
    made(results)
    assert [path.name for path in (results / "compare/rows").iterdir()] == ["current.json"]
    results_of(tmp_path, {}, ["current", "lost"])
    command = ("zerolora", "stage", "compare", "--settings", settings_of(results))
    failed = served(*command, "--rows", str(results / "compare/rows"), "--output", str(tmp_path / "new"))
    assert failed.returncode == 2
    assert failed.stderr.splitlines() == [
        f"zerolora: {results}/compare/rows/lost.json: there is no such file; `zerolora stage report` writes it"
    ]
    assert not (tmp_path / "new").exists()


def test_refused_run_shows_renders_message(tmp_path: Path) -> None:
    results = results_of(tmp_path / "results", {"good": row()}, ["good", "large", "later"])
    (tmp_path / "estimate.json").write_text("{}")
    log = results / "logs/render/large.log"
    settings = resolve(load(ROOT / "config/config.yaml")).runs["default"].render
    refused = served(
        *("zerolora", "--log", str(log), "stage", "render", "--estimate", str(tmp_path / "estimate.json")),
        *("--settings", settings.model_dump_json()),
        *("--output", str(tmp_path / "zero.json"), "--reasons", str(tmp_path / "render.json")),
    )
    assert refused.returncode == 2
    rows, _ = all_runs(results)
    assert {each["run"]: each["status"] for each in rows} == {"good": "done", "large": "refused", "later": "not run"}
    said = log.read_text().strip().removeprefix("zerolora: ")
    assert rows[1]["reason"] == f"render: {said}"
    assert "run `zerolora stage estimate` again" in said
    assert rows[1]["strategy"] == "zero3"  # from the config
    summary = compare_all(results, tmp_path / "work")
    assert summary == f"{tmp_path}/work/index.html: 3 runs: 1 done, 1 refused, 1 not run"
    assert said.split(":")[0] in (tmp_path / "work/table.md").read_text()
    shown = " ".join(show(results, colour=False).split())  # unwrapped
    assert f"large: refused: render: {said[:20]}" in shown
    # The old message no longer counts once a later run has written the output.
    (results / "large").mkdir()
    (results / "large/zero.json").write_text("{}")
    assert all_runs(results)[0][1]["status"] == "not run"


def test_run_on_answers_says_why_there_are_none(tmp_path: Path) -> None:
    """And one that learns from the answers of a run, or continues it, that this run is not there."""
    results = results_of(tmp_path, {"good": row()}, ["good", "round1", "round2", "round3"])
    config = json.loads((results / "config.json").read_text())
    for number in (1, 2):
        config["prepare"][f"round{number}"] = {"model": "tiny", "selections": [f"round{number}"]}
        config.setdefault("selections", {})[f"round{number}"] = {"samples": f"round{number}"}
        of = {"run": "round1" if number == 2 else "good"}
        config.setdefault("samples", {})[f"round{number}"] = {"dataset": "rows", "of": of}
    write_json(results / "config.json", config)
    settings = {run: settings_of_run(results, run) for run in ("good", "round1", "round2", "round3")}
    for number in (1, 2):
        settings[f"round{number}"]["dataset"] = f"round{number}"
    settings["round3"]["train"] = {"from_adapter": "results/round2/adapter"}
    write_settings(results, settings)
    (results / "good/adapter").mkdir(parents=True)
    (results / "good/adapter/manifest.json").write_text("{}")
    log = results / "logs/select/round1.log"
    write_json(log.with_suffix(".status.json"), {"stage": "select", "ended": "x"})
    log.write_text("zerolora: selections.round1: no row is left\n")
    reasons = {each["run"]: (each["status"], each["reason"]) for each in all_runs(results)[0]}
    assert reasons == {
        "good": ("done", ""),
        "round1": ("failed", "select: selections.round1: no row is left"),
        "round2": ("not run", "waits for round1, failed"),
        "round3": ("not run", "waits for round2, not run"),
    }


def test_outdated_run_shows_no_results(tmp_path: Path) -> None:
    results = results_of(tmp_path, {"good": row(), "other": row()})
    rows, _ = all_runs(results, {"other": "train"})
    assert [each["status"] for each in rows] == ["done", "not run"]
    assert "train has to run again" in rows[1]["reason"]
    assert "loss" not in rows[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("chatter\nzerolora: GPU memory is too small; use zero3\n", "GPU memory is too small; use zero3"),
        ("zerolora: rank 1 is slow\nstep 3\nzerolora: loss is nan at step 4", "loss is nan at step 4"),
        (
            "zerolora: rank 1 failed with exit code 1; its last lines:\nzerolora: Traceback\nzerolora: OSError: full",
            "rank 1 failed with exit code 1: OSError: full",
        ),
        ("zerolora: loss is nan at step 2\nzerolora: rank 0 failed with exit code 2", "loss is nan at step 2"),
        (
            "Traceback\nKeyError: 1\nzerolora: rank 0 failed with exit code 1",
            "rank 0 failed with exit code 1: KeyError: 1",
        ),
        (
            "step 60\nzerolora: rank 0 failed with signal SIGKILL (out of memory?)",
            "rank 0 failed with signal SIGKILL (out of memory?)",
        ),
        (
            "zerolora: loss is nan at step 2\nzerolora: rank 0 failed with signal SIGKILL (out of memory?)",
            "loss is nan at step 2",
        ),
        (
            "zerolora: nothing fits, not even with the smallest:\nzerolora:   strategy  GPU  host\n"
            "zerolora:   zero3: 5 GiB are more than 3 GiB\nzerolora: add to the run:\nzerolora:   render:",
            "nothing fits, not even with the smallest: 5 GiB are more than 3 GiB",
        ),
        ("zerolora: rank 1 is slow\nKilled", ""),
        ("", ""),
    ],
)
def test_reason_is_the_last_message_of_a_log(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.log").write_text(text)
    assert reason_in(tmp_path / "a.log", "zero3") == reason


@pytest.mark.parametrize(
    ("name", "text", "progress", "status", "reason"),
    [
        # A stage that ended well, with a warning at the end of its log and its outputs removed since.
        ("train/one", "zerolora: rank 1 is slow\n", {"result": "loss 4.8 -> 0.1"}, "not run", ""),
        (
            "train/one",
            "step 60/100\n",
            {"done": 60, "total": 100},
            "failed",
            "train: runs, or ended without a message at 60 of 100; see LOG",
        ),
        ("train/one", "", {"ended": "job 12: CANCELLED"}, "failed", "train: job 12: CANCELLED; see LOG"),
        *(
            (
                name,
                "zerolora: data/s.jsonl:3: too long\n",
                {},
                "failed",
                f"{name.split('/')[0]}: data/s.jsonl:3: too long",
            )
            for name in ("task/one-sums", "task_base/rows-sums", "task_rows/sums")
        ),
    ],
)
def test_unfinished_run_has_status_and_reason_from_its_logs(
    tmp_path: Path, name: str, text: str, progress: dict[str, Any], status: str, reason: str
) -> None:
    results = results_of(tmp_path, {}, ["one"])
    log = results / f"logs/{name}.log"
    log.parent.mkdir(parents=True)
    log.write_text(text)
    log.with_suffix(".status.json").write_text(json.dumps({"started": 1} | progress))
    (only,), _ = all_runs(results)
    assert (only["status"], only["reason"]) == (status, reason.replace("LOG", str(log)))


def test_terminal_table_has_120_columns_and_names_the_omitted(tmp_path: Path) -> None:
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


def test_terminal_table_folds_long_names(tmp_path: Path) -> None:
    text = show(results_of(tmp_path, {"n" * 100: row(), "b": row()}), colour=False)
    assert max(map(cell_len, text.splitlines())) <= 120
    assert "\x1b" not in text
    coloured = show(results_of(tmp_path, {"n" * 100: row(), "b": row()}), colour=True)
    assert "\x1b[32m" in coloured


def test_texts_are_escaped_in_markdown_and_html(tmp_path: Path) -> None:
    reason = "evaluate.fail_if: a | b <script>alert(1)</script> `x` [l](javascript:alert(1))"
    output = made(results_of(tmp_path, {"one": row(status="failed", reason=reason), "two": row()}))
    lines = (output / "table.md").read_text().splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "``evaluate.fail_if: a \\| b <script>alert(1)</script> `x` [l](javascript:alert(1))``" in lines[2]
    page = (output / "index.html").read_text()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_best_of_several_runs_is_called_partly_luck(tmp_path: Path) -> None:
    several, alone = (
        (made(results_of(tmp_path / name, runs)) / "index.html").read_text()
        for name, runs in (("several", {"one": row(), "two": row(1), "three": row(2)}), ("alone", {"one": row()}))
    )
    assert "The best of 3 runs on the same rows is partly luck" in several
    assert "partly luck" not in alone


@pytest.mark.parametrize("runs", [1, 2])
def test_axes_of_runs_with_one_value_have_ticks(runs: int) -> None:
    rows = [{"run": name, **row(2)} for name in "ab"[:runs]]
    (chart,) = (chart for charts in sections(rows).values() for chart in charts if chart.name == "front")
    ticks = [float(text) for text in re.findall(r"<text[^>]*>([0-9.]+)</text>", chart.svg())]
    seconds, memory = rows[0]["step_seconds"], rows[0]["measured_host_bytes"] / 2**30
    for value in (seconds, memory):
        near = {tick for tick in ticks if abs(tick - value) <= value / 5}
        assert len(near) >= 3 and min(near) < value < max(near), ticks


def test_page_without_finished_runs_has_no_chart(tmp_path: Path) -> None:
    results = results_of(tmp_path, {}, ["one", "two"])
    compare_all(results, tmp_path / "work")
    page = (tmp_path / "work/index.html").read_text()
    assert "<figure" not in page and "not run" in page
    with pytest.raises(UserError, match="config.json: there is no such file"):
        all_runs(tmp_path / "none")


def test_results_of_another_version_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"runs": {"default": {"dataset": "rows"}}}')
    said = served("zerolora", "show", "--results", str(tmp_path))
    line = f"zerolora: {tmp_path}/config.json: was written by another version; run `zerolora stage resolve` again"
    assert (said.returncode, said.stderr.splitlines()[-1]) == (2, line)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_front_is_the_undominated_points(points: list[tuple[int, int]]) -> None:
    named = [(*point, str(index)) for index, point in enumerate(points)]
    actual = {points[int(name)] for name in front(named)}

    def beaten(point: tuple[int, int]) -> bool:
        return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)

    assert actual == {point for point in points if not beaten(point)}
