"""`zerolora compare FIRST SECOND`: two runs on the same rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import served

from zerolora.errors import UserError
from zerolora.evaluate.intervals import mcnemar, tango
from zerolora.files import write_json
from zerolora.report.pair import compare_pair


def finished(results: Path, run: str, right: list[int], split: str = "test", task: list[int] | None = None) -> None:
    """Write what a run leaves that answered rows right (1) or wrong (0), and of a further task."""
    rows = [
        {"question": f"{split} {at}", "expected": "", "answer": "", "format": True, "right": bool(value)}
        | {"prompt_tokens": 5, "f1": value / 2}
        for at, value in enumerate(right)
    ]
    accuracy = sum(right) / len(right)
    write_json(
        results / run / "metrics/evaluate.json", {"rows": len(right), "accuracy": accuracy, "loss": 2 - accuracy}
    )
    write_json(results / run / "answers.json", rows)
    if task:
        of_task = [{"place": at, "right": bool(value)} for at, value in enumerate(task)]
        write_json(results / run / "tasks/sums.json", {"accuracy": sum(task) / len(task)})
        write_json(results / run / "tasks/sums.answers.json", of_task)
    write_json(results / "config.json", {"compare": {"runs": {}}})
    settings = {"dataset": "rows", "evaluate": {"split": split}, "report": {"tasks": ["sums"]}}
    write_json(results / f"settings/runs/{run}.json", {"runs": {run: settings}})
    runs = sorted((results / "settings/runs").glob("*.json"))
    write_json(results / "settings/manifest.json", {"files": {f"runs/{each.name}": {} for each in runs}})


def lines_of(text: str) -> dict[str, list[str]]:
    return {line.split("  ")[0]: line.split()[-6:] for line in text.splitlines() if line}


def test_two_runs_are_compared_row_by_row(tmp_path: Path) -> None:
    finished(tmp_path, "one", [1] * 20 + [0] * 20, task=[1, 0, 1, 0])
    finished(tmp_path, "two", [0] * 2 + [1] * 30 + [0] * 8, task=[1, 1, 1, 0])
    text = compare_pair(tmp_path, "one", "two")
    assert text.startswith("one and two on split test of rows, 40 rows\n")
    low, high = tango(12, 2, 40)
    of = lines_of(text)
    assert of["accuracy"] == ["0.5", "0.75", "+0.25", f"{low:+.4g}", "to", f"{high:+.4g}"]
    low, high = tango(1, 0, 4)
    assert of["sums accuracy"] == ["0.5", "0.75", "+0.25", f"{low:+.4g}", "to", f"{high:+.4g}"]
    assert of["loss"] == ["loss", "1.5", "1.25", "-0.25"], "a loss of all rows has no interval"
    assert text.endswith(f"2 right in one alone; 12 right in two alone; McNemar's exact p {mcnemar(12, 2):.2g}")


def test_runs_that_rows_do_not_tell_apart_are_called_so(tmp_path: Path) -> None:
    finished(tmp_path, "one", [0] * 200)
    finished(tmp_path, "two", [1] * 4 + [0] * 196)
    text = compare_pair(tmp_path, "one", "two")
    assert "The interval and p disagree, since few answers differ; p is exact.\nNot distinguishable" in text


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("one", "lost", "compare: 'lost' is not a run of the config; use two of elsewhere, off, one"),
        ("one", "elsewhere", "one was evaluated on split test of rows, and elsewhere on split validation of rows"),
        ("one", "off", "compare: off is not evaluated; set evaluate.enabled: true, and hold out rows"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, first: str, second: str, said: str) -> None:
    finished(tmp_path, "one", [1, 0])
    finished(tmp_path, "elsewhere", [1, 0], split="validation")
    finished(tmp_path, "off", [1, 0])
    write_json(tmp_path / "off/metrics/evaluate.json", {"enabled": False})
    with pytest.raises(UserError) as raised:
        compare_pair(tmp_path, first, second)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("change", ["expected", "score", "none asked"])
def test_rows_that_only_look_the_same_are_refused(tmp_path: Path, change: str) -> None:
    """The same questions with other answers expected, or judged by another task; rows without questions."""
    for run in ("one", "two"):
        finished(tmp_path, run, [1, 0])
    path = tmp_path / "two/answers.json"
    rows = json.loads(path.read_text())
    match change:
        case "expected":
            rows[0]["expected"] = "another"
        case "score":
            rows = [{key: value for key, value in row.items() if key != "f1"} for row in rows]
        case _:
            rows = []
            write_json(tmp_path / "one/answers.json", [])
            settings = {"dataset": "others", "evaluate": {"split": "test"}, "report": {"tasks": []}}
            write_json(tmp_path / "settings/runs/two.json", {"runs": {"two": settings}})
    write_json(path, rows)
    with pytest.raises(UserError, match="which are not the same rows, or are judged in another way"):
        compare_pair(tmp_path, "one", "two")


def test_the_command_takes_two_runs(tmp_path: Path) -> None:
    for run in ("one", "two"):
        finished(tmp_path / "results", run, [1, 0, 1])
    done: Any = served("zerolora", "compare", "one", "two", directory=tmp_path)
    assert done.returncode == 0 and "McNemar's exact p 1\n" in done.stdout
    alone: Any = served("zerolora", "compare", "one", directory=tmp_path)
    assert alone.returncode == 2
    assert alone.stderr == "zerolora: compare: 1 run given; name two, or none to compare all\n"
