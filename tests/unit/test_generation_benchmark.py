"""benchmarks/evaluate in its smallest form, with a tiny model whose speed says nothing; and how evaluation waits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import generation
import in_docs
import pytest
from conftest import ROOT, SERVERS, project_environment

from zerolora.commands.stage_commands import WAITING


@pytest.mark.slow
def test_all_answer_the_same(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contestants are forks (fork_server.py)."""
    stand_ins = SERVERS.of(ROOT, project_environment(ROOT)).stand_ins
    monkeypatch.setattr(sys, "executable", str(stand_ins / "python"))
    output = tmp_path / "result.json"
    few = [
        "--rows",
        "3",
        "--max-new-tokens",
        "4",
        "--max-length",
        "128",
        "--rounds",
        "1",
        "--busy",
        "0",
        "--threads",
        "1",
    ]
    wanted = ["--device", "cpu", "--model", str(tiny_model), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["generation.py", *few, *wanted])
    generation.main()
    result: dict[str, Any] = json.loads(output.read_text())
    assert result["free"].keys() == generation.ANSWERERS.keys() and len(result["loaded"]) == 2
    for each in (*result["free"].values(), *result["loaded"].values()):
        assert each["same_texts"] and each["tokens"] == 12 and each["rows_per_second"] > 0
    assert [len(table) for table in generation.tables(result)] == [5, 4]


def test_another_text_is_told() -> None:
    figures = {"seconds": 1, "cpu_seconds": 1, "rows_per_second": 1, "tokens_per_second": 1, "tokens": 1}
    found = generation.summary({"a": [{**figures, "texts": ["x"]}, {**figures, "texts": ["y"]}]}, ["x"])
    assert not found["a"]["same_texts"]


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "--settings", '{"check": "exact"}', "--data", "none"],
        ["task", "--settings", '{"kind": "harness", "tasks": ["none"], "files": {}}', "--data", "none"],
    ],
    ids=["evaluate", "task"],
)
def test_threads_of_an_evaluation_sleep_while_they_wait(command: list[str], tmp_path: Path) -> None:
    """OpenMP itself says so, when torch is loaded in a process of its own, which takes 3 s; there are no rows.

    The task is the project's own, so that lm-evaluation-harness does not index all of its thousands.
    """
    (tmp_path / "none").write_text('{"path": "none", "files": {}}')
    (tmp_path / "config/harness").mkdir(parents=True)
    (tmp_path / "config/harness/none.yaml").write_text("task: none\n")
    given = ["--weights", "none", "--output", "out", "--answers", "answers"]
    others = {key: value for key, value in project_environment(ROOT).items() if key not in WAITING}
    told = subprocess.run(
        [sys.executable, "-m", "zerolora", *command, *given],
        cwd=tmp_path,
        env=others | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode and "GOMP_SPINCOUNT = '0'" in told.stderr


def test_rounds_of_two_calls_are_put_together() -> None:
    def result(rows: int, speed: float, text: str) -> dict[str, Any]:
        figures = {"seconds": 1, "cpu_seconds": 1, "rows_per_second": speed, "tokens_per_second": 1, "tokens": 1}
        found = generation.summary({"a": [{**figures, "texts": [text]}]}, ["x"])
        asked = {"model": "m", "rows": rows, "max_new_tokens": 4, "threads": 2, "busy": 2}
        return asked | {"free": found, "loaded": {}}

    both = generation.together(result(3, 2.0, "x"), result(3, 4.0, "y"))["free"]["a"]
    assert both["rows_per_second"] == 3 and len(both["rounds"]) == 2 and not both["same_texts"]
    with pytest.raises(SystemExit, match="other rows"):
        generation.together(result(3, 2.0, "x"), result(4, 2.0, "x"))


def test_tables_are_put_between_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_docs, "DOCS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n")
    in_docs.put("page.md", "one", r"| \1 |")
    in_docs.put("page.md", "two", "new")
    assert page.read_text() == ("a\n<!-- one -->\n| \\1 |\n<!-- end -->\nb\n<!-- two -->\nnew\n<!-- end -->\n")
    with pytest.raises(ValueError, match="0 places for three"):
        in_docs.put("page.md", "three", "")


RESULT = generation.RESULT


def test_the_tables_are_those_measured() -> None:
    """There is none where nothing was measured."""
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    if not RESULT.is_file():
        assert "<!-- speed -->\n<!-- end -->" in text
        return
    measured = json.loads(RESULT.read_text())
    assert generation.section(measured) in text
    free = measured["free"]
    assert free["zerolora"]["same_texts"] and measured["loaded"]["zerolora"]["same_texts"]
    assert free["zerolora"]["rows_per_second"] >= 8 * free[generation.REFERENCE]["rows_per_second"]
