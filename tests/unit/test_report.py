"""The page of a finished run, as text; tests/browser opens it in a browser. And the headline metrics."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import vl_convert
import yaml
from conftest import ROOT, served
from finished_run import FinishedRun

from zerolora.errors import UserError
from zerolora.evaluate.intervals import mcnemar, tango, wilson
from zerolora.files import read_json, write_json
from zerolora.report import charts
from zerolora.report.charts import POINTS, Chart, javascript, thinned
from zerolora.report.comparison_columns import columns_of
from zerolora.report.comparison_terminal import format_table
from zerolora.report.provenance import UNCOMMITTED, commands
from zerolora.report.row import headline, timings
from zerolora.report.show import before_and_after
from zerolora.report.usage import duration, table


@pytest.fixture
def run(tmp_path: Path) -> FinishedRun:
    return FinishedRun(tmp_path / "run")


def text_of(page: Path) -> str:
    """Return the page's text without scripts, styles, images and tags, with single spaces."""
    text = re.sub(r"<(script|style|svg)\b.*?</\1>", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def test_further_tasks_are_on_the_page_and_in_the_row(
    run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run.ask("capitals", base=[True, False] * 8, tuned=[True] * 12 + [False] * 4)
    run.ask("gone", base=[True], tuned=[True])
    text = text_of(run.page(tasks=["capitals"]))
    change = tango(6, 2, 16)
    shown = f"+0.25 ({change[0]:+.4g} to {change[1]:+.4g})"
    low, high = wilson(8, 16)
    assert f"capitals accuracy 0.5 ({low:.4g} to {high:.4g}) 0.75" in text and shown in text
    row = read_json(run.folder / "compare/rows/default.json", "report")
    assert {key for key in row if key.startswith("task.")} == {
        f"task.capitals.accuracy{end}" for end in ("", "_low", "_high")
    }
    assert not list(run.folder.rglob("gone*"))
    assert len(list((tmp_path / "work/removed_tasks").rglob("gone*.json"))) == 4
    assert "Further tasks" not in text_of(run.page())


def test_missing_result_of_a_task_is_one_line(run: FinishedRun) -> None:
    with pytest.raises(UserError, match=r"tasks/capitals\.json"):
        run.page(tasks=["capitals"])


def test_harness_intervals_come_from_standard_errors(run: FinishedRun) -> None:
    for folder, value in (("base", 0.5), ("default", 0.75)):
        write_json(run.folder / folder / "tasks/arc.json", {"arc_acc": value, "arc_acc_stderr": 0.1, "arc_rows": 4})
        write_json(run.folder / folder / "tasks/arc.answers.json", {"arc": []})
    text = text_of(run.page(tasks=["arc"]))
    assert "arc arc acc 0.5 (0.304 to 0.696) 0.75 (0.554 to 0.946) +0.25 " in text


def test_result_comes_before_cost_evidence_and_provenance(run: FinishedRun) -> None:
    text = text_of(run.page(fail_if="accuracy < base - 0.01"))
    marks = [
        "0.0% → 99.5%",
        "of 200 held-out rows",
        "+99.5 points",
        "95 % interval +95.7 to +99.9",
        "199 answers became right and 0 wrong",
        "p 2.5e-60",
        "✓ Accepted",
        "3 answers side by side",
        "wall time of training 2 min 55 s predicted 8 min 2 s",
        "peak host memory 2.98 GiB predicted 2.92 GiB",
        "Time of a step, by part.",
        "Peak memory of one host",
        "1 is exact: wall time 0.36, time of a step 0.40, host memory 1.02",
        "Proof of the loss mask",
        "Answers that changed",
        "Provenance",
        "How to reproduce it",
        ".venv/bin/snakemake --profile profiles/local results/default/report.html",
    ]
    places = [text.find(mark) for mark in marks]
    assert -1 not in places, marks[places.index(-1)]
    assert places == sorted(places)


def test_inapplicable_parts_are_hidden(run: FinishedRun) -> None:
    text = text_of(run.page())
    for absent in (
        "GPU memory",
        "GPU hours",
        "MFU",
        "Accepted",
        "accepted",
        "Packing:",
        "Routers",
        "accounted",
        "None",
    ):
        assert absent not in text
    run.on_gpus()
    text = text_of(run.page(fail_if="accuracy < 2"))
    for present in (
        "peak GPU memory 1.60 GiB predicted 2.00 GiB",
        "GPU hours",
        "MFU 41.0%",
        "energy of the GPUs 2 kWh",
        "a checkpoint 30 MiB",
        "on 2 GPUs",
        "✗ Not accepted",
    ):
        assert present in text
    assert "Peak memory of one GPU" in text and "GPU: mean 87 %" in text


def test_seconds_for_all_answers_are_those_of_both_models(run: FinishedRun) -> None:
    assert "answering all rows" not in text_of(run.page()), "an evaluation that continued has none"
    run.edit("base/evaluate_resources.json", lambda each: each.update(answering_seconds=25.81))
    run.edit("default/metrics/evaluate_resources.json", lambda each: each.update(answering_seconds=32.52))
    assert "answering all rows, in seconds 25.8 32.5" in text_of(run.page())


def test_loss_of_each_source_is_drawn(run: FinishedRun) -> None:
    table = run.folder / "default/metrics/loss.csv"
    assert "Loss of each source" not in text_of(run.page())
    head, *lines = table.read_text().splitlines()
    cells = [f"{line},{2.5 if index else ''},{1 / (index + 2)}" for index, line in enumerate(lines)]
    table.write_text("\n".join([f'{head},"loss.a,b.json",loss.c.json', *cells, ""]))
    text = text_of(run.page())
    assert "Loss of each source" in text
    assert "First and last loss in training: a,b.json 2.5, 2.5; c.json 0.5, 0.009901." in text
    # And in validation, also of a source that is held out as a whole.
    cells = [f"{line},{2.5},{0.25 if index == len(lines) - 1 else ''}" for index, line in enumerate(lines)]
    table.write_text("\n".join([f"{head},loss.a,loss_validation.a", *cells, ""]))
    assert "First and last loss in training: a 2.5, 2.5, validation 0.25." in text_of(run.page())
    table.write_text("\n".join([f"{head},loss.a,loss_validation.held.json", *cells, ""]))
    assert "First and last loss in training: a 2.5, 2.5; held.json validation 0.25." in text_of(run.page())


def test_scaled_learning_rate_is_computed_on_the_page(run: FinishedRun) -> None:
    assert "Peak learning rate" not in text_of(run.page())
    text = text_of(run.page(learning_rate="0.0002 = 0.0001 x 16 / 8"))
    assert "Peak learning rate, scaled with the global batch: 0.0002 = 0.0001 x 16 / 8." in text


def test_user_json_is_no_strategy_of_the_estimate(run: FinishedRun) -> None:
    run.edit("default/zero.json", lambda each: each["zerolora"].update(strategy="config/deepspeed/own.json"))
    text = text_of(run.page())
    assert "Chosen: config/deepspeed/own.json, 2.92 GiB ◇ predicted as rendered, 2.98 GiB ◆ measured" in text
    assert "yes, chosen" not in text


def without_evaluation(run: FinishedRun) -> None:
    for name in ("base", "default/metrics"):
        for file in ("evaluate", "evaluate_resources"):
            run.edit(f"{name}/{file}.json", lambda _: {"enabled": False})
    for name in ("base", "default"):
        run.edit(f"{name}/answers.json", lambda _: [])


def test_run_without_evaluation_shows_its_loss(run: FinishedRun) -> None:
    without_evaluation(run)
    text = text_of(run.page())
    assert "Not evaluated" in text and "4.816 → 0.0003569" in text
    for absent in ("Generating answers", "side by side", "Accuracy", "that changed"):
        assert absent not in text


def test_run_of_pairs_without_evaluation_shows_the_change_in_training(run: FinishedRun) -> None:
    without_evaluation(run)
    run.edit("default/metrics/train.json", lambda each: each.update(chosen_change_last=-3.5))
    page = run.page(objective="dpo")
    assert '<p class="bad"><b>✗ Training made the chosen answers less likely</b>: on the last step' in page.read_text()
    assert "changed by -3.5 nats an answer since the start of training" in text_of(page)


ENDS = ("first", "last")


@pytest.mark.parametrize("evaluated", [True, False])
def test_distilled_run_names_its_teacher_and_the_divergence(run: FinishedRun, evaluated: bool) -> None:
    if not evaluated:
        without_evaluation(run)
    figures = {"kl": (0.75, 0.25), "cross_entropy": (2.5, 1.5), "teacher_cross_entropy": (1.25, 1.0)}
    ends = {f"{name}_{end}": value for name, pair in figures.items() for end, value in zip(ENDS, pair, strict=True)}
    run.edit("default/metrics/train.json", lambda each: each.update(ends, kl_validation=0.5))
    given = {"teacher": "<large>", "adapter": "results/longer/adapter", "top_k": 4096}
    text = text_of(run.page(objective="distill", objective_settings=given))
    assert "Distilled from &lt;large&gt; with the adapter of results/longer/adapter : its 4,096 likeliest" in text
    assert "tokens at temperature 1, with alpha 0.5" in text
    assert "went from 0.75 to 0.25 (validation 0.5) and the cross-entropy of the labels from 2.5 to 1.5" in text
    assert "the teacher's was 1.25 and 1." in text
    assert "Distilled" not in text_of(run.page())


def test_free_form_answers_lead_with_the_loss(run: FinishedRun) -> None:
    """Their exact match is 0 before and after, whatever the training achieved."""
    for name, bits in (("base/evaluate.json", 1.25), ("default/metrics/evaluate.json", 0.75)):
        run.edit(name, lambda figures, bits=bits: figures | {"free_form": True, "bits_per_byte": bits})
    page = run.page()
    text = text_of(page)
    assert re.search(r"4\.843 → 0\.0007028 Loss per supervised token on 200 held-out rows", text)
    assert "1.25 and 0.75 bits per byte of the answers" in text
    assert "few equal those of the data: 0.0% before and 99.5% after" in text
    assert "right:" not in text and "wrong:" not in text and "Accuracy by group" not in text
    assert text.index("loss 4.843") < text.index("accuracy 0") < text.index("format rate 0")
    assert read_json(run.folder / "default/summary.json", "report") == {
        "loss_before": 4.843, "loss": 0.0007028, "bits_before": 1.25, "bits": 0.75
    }  # fmt: skip
    before = read_json(run.folder / "base/evaluate.json", "report")
    after = read_json(run.folder / "default/metrics/difference.json", "report")
    assert before_and_after(before, after).startswith(
        "loss 4.843 before, 0.001 after, bits a byte 1.250 before, 0.750 after, exact match 0.000 before, 0.995 after"
    )


def test_rows_without_prompts_have_a_loss_before_and_after(run: FinishedRun) -> None:
    run.edit("base/evaluate.json", lambda _: {"loss": 2.5, "rows": 200})
    run.edit("default/metrics/evaluate.json", lambda _: {"loss": 1.25, "rows": 200})
    for name in ("base", "default"):
        run.edit(f"{name}/answers.json", lambda _: [])
    text = text_of(run.page())
    assert "2.5 → 1.25" in text and "No row asks for an answer" in text
    assert "loss 2.5 1.25 -1.25" in text


def test_pairs_have_their_preference_and_a_line_in_red_when_the_chosen_became_less_likely(run: FinishedRun) -> None:
    assert "chosen answer" not in text_of(run.page())
    run.of_pairs(chosen=2.0, rejected=-1.0)
    page = run.page()
    text = text_of(page)
    low, high = wilson(200, 200)
    ends = tango(150, 0, 200)
    for shown in (
        "25.0% → 100.0%",
        f"a difference of +75.0 points (95 % interval {100 * ends[0]:+.1f} to {100 * ends[1]:+.1f})",
        f"afterwards 95 % interval {low:.1%} to {high:.1%}",
        f"Gained: 150 pairs, lost: 0 (McNemar's exact p {mcnemar(150, 0):.2g} )",
        "The longer answer wins 50.0% of the pairs.",
        "The chosen answers: their log-probability changed by +2.25 nats an answer (95 % interval +2.215 to +2.285)",
        "The rejected answers: their log-probability changed by -1 nats an answer",
        "have 8.0 tokens before and 9.0 after, the chosen ones 12.0, the rejected ones 12.0.",
        "From 0.0% to 99.5% of 200 held-out rows answered right",
        "train.objective: sft and a data set of the same file with format: prompt , columns: {completion: chosen}",
    ):
        assert shown in text, shown
    assert "Pairs whose chosen answer is more likely. Lines are Wilson" in unescape(text)
    assert "became less likely" not in page.read_text()
    row = read_json(run.folder / "compare/rows/default.json", "report")
    assert (row["preference_accuracy"], row["longer_answer_rate"], row["reason"]) == (1, 0.5, "")
    summary = read_json(run.folder / "default/summary.json", "report")
    assert (summary["pref_before"], summary["pref"], summary["chosen"]) == (0.25, 1, 2.25)

    run.of_pairs(chosen=-2.0, rejected=-9.0)
    line = '<p class="bad"><b>✗ The chosen answers became less likely</b>:'
    assert line in run.page().read_text()
    row = read_json(run.folder / "compare/rows/default.json", "report")
    assert row["reason"] == "the chosen answers became less likely, by 2.25 nats an answer"
    assert row["preference_accuracy"] == 1
    table = format_table([{"run": "default", **row}], columns_of([row], {}), {}, width=400)
    assert re.search(r"preference .* chosen change +rejected change", table) and "-2.25" in table


def test_lost_answers_are_among_the_first_three(run: FinishedRun) -> None:
    run.edit("base/answers.json", lambda rows: rows[150].update(right=True, answer="was right"))
    run.edit("default/answers.json", lambda rows: rows[150].update(right=False, answer="is wrong now"))
    text = text_of(run.page())
    assert "and 1 wrong" in text
    assert text.index("is wrong now") < text.index("Cost")


def test_three_evaluated_models_are_compared_in_pairs(run: FinishedRun) -> None:
    assert "base and adapter" not in text_of(run.page())
    ends = {
        "difference": 0.9,
        "difference_low": 0.8,
        "difference_high": 1.0,
        "p": 0.25,
        "gained": 7,
        "lost": 3,
        "texts": 5,
    }
    pairs = ("unmerged_over_base", "merged_over_unmerged")
    figures = {f"{pair}_{name}": value for pair in pairs for name, value in ends.items()}
    run.edit("default/metrics/evaluate.json", lambda each: each.update(figures))
    assert "merged base and adapter +0.900 +0.800 to +1.000 7 3 0.25 5" in text_of(run.page())


def test_same_files_give_the_same_page_anywhere(run: FinishedRun, tmp_path: Path) -> None:
    once = run.page().read_bytes()
    other = FinishedRun(tmp_path / "elsewhere/deeper")
    code = f"import pathlib, finished_run; finished_run.FinishedRun(pathlib.Path({str(other.folder)!r})).page()"
    path = os.pathsep.join(str(ROOT / name) for name in ("src", "tests", "tests/launchers", "tests/slurm"))
    elsewhere = {"PYTHONPATH": path, "PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | elsewhere, check=True)
    assert (other.folder / "default/report.html").read_bytes() == once


def test_long_trainings_do_not_make_long_pages(run: FinishedRun) -> None:
    size = run.page().stat().st_size
    for name in ("telemetry", "loss"):
        path = run.folder / f"default/metrics/{name}.csv"
        header, *rows = path.read_text().splitlines()
        cells = [row.split(",", 1)[1] for row in rows] * 100
        path.write_text("\n".join([header, *(f"{step},{rest}" for step, rest in enumerate(cells, 1))]) + "\n")
    page = run.page()
    assert "Each point is the mean of 34 steps." in text_of(page)
    assert page.stat().st_size < size + 300_000


def test_thinning_keeps_the_mean_and_skips_what_is_missing() -> None:
    rows = [{"step": float(step), **({"load": 10.0} if step % 2 else {})} for step in range(2 * POINTS + 1)]
    thin = thinned(rows)
    assert len(thin) <= POINTS
    assert thin[0] == {"step": 1.0, "load": 10.0}
    assert thinned(rows[:3]) == rows[:3]
    assert thinned([]) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.5 s"),
        (59.94, "59.9 s"),
        (61, "1 min 1 s"),
        (3599.6, "1 h 0 min"),
        (90000, "1 d 1 h"),
        (86399, "23 h 59 min"),
    ],
)
def test_durations_are_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_unused_resources_have_no_row() -> None:
    actual = {"predicted_gpu_bytes": 0, "measured_gpu_bytes": 0, "predicted_seconds": 10.0, "measured_seconds": 20.0}
    assert table(actual) == (["predicted", "measured"], {"wall time": ["10 s", "20 s"]})
    columns, rows = table(actual | {"accounted_seconds": 30, "asked_host_bytes": 2**30})
    assert columns == ["predicted", "asked", "measured", "accounted"]
    assert rows["host memory of a node"] == ["", "1.00 GiB", "", ""]


def test_commands_check_out_the_commit() -> None:
    digest = "0123456789abcdef" * 2 + "01234567"
    actual = commands(digest + UNCOMMITTED, "results/a/report.html")
    assert actual["compute it again"].splitlines()[0] == f"git checkout {digest}"
    assert any(f"make checkout REV={digest}" in command for command in actual.values())
    (only,) = commands("not in a git repository", "results/a/report.html").values()
    assert only == ".venv/bin/snakemake --profile profiles/local results/a/report.html"


def test_chart_data_cannot_end_its_script() -> None:
    spec = {
        "data": {"values": [{"a": "</script><script>alert(1)</script>", "b": 1}]},
        "mark": "bar",
        "encoding": {"x": {"field": "a"}},
    }
    chart = Chart("one", "Title.", "Summary.", spec)
    assert "<" not in chart.json()
    assert json.loads(chart.json())["data"] == spec["data"]
    assert "<script" not in chart.svg()


def test_content_policy_allows_only_both_scripts(tmp_path: Path) -> None:
    page = FinishedRun(tmp_path).page().read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].count("sha256-") == page.count("<script>") == 2
    assert policy[1].startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    assert "unsafe-eval" not in policy[1]


@pytest.mark.parametrize("cached", [b"", b"0\nalert(1)", b"\xff"], ids=["empty", "another_text", "no_text"])
def test_cached_script_is_used_only_if_complete(cached: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "BUNDLES", tmp_path)
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda *_: "script")
    assert javascript.__wrapped__() == "script"
    (path,) = tmp_path.iterdir()
    complete = path.read_bytes()
    path.write_bytes(cached)
    assert javascript.__wrapped__() == "script"
    assert path.read_bytes() == complete
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda *_: pytest.fail("bundled again"))
    assert javascript.__wrapped__() == "script"


USED = {
    "measured_host_bytes": 2.9 * 2**30,
    "predicted_host_bytes": 3.1 * 2**30,
    "measured_gpu_bytes": 61.53 * 2**30,
    "predicted_gpu_bytes": 63.21 * 2**30,
}
RESOURCES = {"tokens_per_second": 123456.789, "training_seconds": 12345.678, "total_seconds": 123456.78}


def headline_metrics(**further: tuple[float, float]) -> dict[str, float]:
    """Return the metrics of a long training on GPUs, as wide as they become; `further` are those before and after."""
    before = {"accuracy": 0.123456, "loss": 2.3} | {name: value for name, (value, _) in further.items()}
    after = {name: value for name, (_, value) in further.items()}
    after |= {"accuracy": 0.98765, "accuracy_low": 0.98321, "accuracy_high": 0.99123, "loss": 0.00061234}
    return headline(before, after)


def test_headline_metrics() -> None:
    assert headline_metrics() == {
        "before": 0.1235,
        "accuracy": 0.9877,
        "acc_err": 0.00401,
        "loss": 0.0006123,
    }


def test_timings() -> None:
    assert timings({"steps": 1000}, RESOURCES, USED) == {
        "tok/s": 123457,
        "step_s": 12.35,
        "wall_s": 123457,
        "host_use": 0.9355,
        "gpu_use": 0.9734,
    }


def test_headline_metrics_without_questions_or_gpu() -> None:
    used = USED | {"measured_gpu_bytes": 0, "predicted_gpu_bytes": 0}
    assert set(headline({"loss": 2.0}, {"loss": 1.0})) == {"loss"}
    assert set(timings({"steps": 10}, RESOURCES, used)) == {"tok/s", "step_s", "wall_s", "host_use"}


def test_headline_metrics_of_free_form_answers() -> None:
    """Their exact match is no headline."""
    actual = headline_metrics(bits_per_byte=(0.91, 0.65), free_form=(1.0, 1.0))
    assert actual == {"loss_before": 2.3, "loss": 0.0006123, "bits_before": 0.91, "bits": 0.65}


OF_PAIRS = {"preference_accuracy": (0.512345, 0.912345), "chosen_log_probability_difference": (0.0, -123.456)}
OF_LABELLED = {"desirable_log_probability_difference": (0.0, -123.456)}


def test_headline_metrics_of_preference_data() -> None:
    pairs, labelled = headline_metrics(**OF_PAIRS), headline_metrics(**OF_LABELLED)
    assert (pairs["pref_before"], pairs["pref"], pairs["chosen"]) == (0.5123, 0.9123, -123.5)
    assert (labelled["before"], labelled["accuracy"], labelled["chosen"]) == (0.1235, 0.9877, -123.5)
    assert not {"before", "accuracy", "acc_err"} & pairs.keys() and "acc_err" not in labelled


@pytest.mark.parametrize("further", [{}, OF_PAIRS, OF_LABELLED])
def test_dvc_shows_headline_metrics_in_120_columns(further: dict[str, tuple[float, float]], tmp_path: Path) -> None:
    """From the `metrics:` of this project's dvc.yaml."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
    paths = [path for entry in stages for path in entry.get("do", entry).get("metrics", [])]
    # Metrics of tasks and selections are separate lines.
    paths = [path for path in paths if "/tasks/" not in path and "/selections/" not in path]
    assert set(paths) == {"results/${key}/summary.json"}
    files = [paths[0].replace("${key}", run) for run in ("default", "packing")]
    for file in files:
        write_json(tmp_path / file, headline_metrics(**further))
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"metrics": files}))
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    served("dvc", "init", "--quiet", directory=tmp_path, DVC_NO_ANALYTICS="1").check_returncode()
    result = served("dvc", "metrics", "show", directory=tmp_path, DVC_NO_ANALYTICS="1")
    result.check_returncode()
    shown = result.stdout.splitlines()
    assert len(shown) == 3
    assert max(map(len, shown)) <= 120, "\n".join(shown)
    assert len(re.split(r"\s+", shown[0].strip())) - 1 <= 12
