"""The stage select: which sampled answers become rows, their provenance, the figures, and the judge."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback_judge import judging

from zerolora.config.settings import JudgeSettings, SelectSettings
from zerolora.data.example import SAMPLED
from zerolora.data.normal_form import normal_form
from zerolora.data.prepared_rows import ROW, schema
from zerolora.data.sampled_prompts import GIVEN, prompt_key
from zerolora.errors import UserError
from zerolora.evaluate.tasks import TASKS
from zerolora.evaluate.tasks.task import Judgement
from zerolora.files import describe, sha256, write_json
from zerolora.select.asked_prompts import SampledPrompt
from zerolora.select.held_out import held_out
from zerolora.select.kept_answers import LEFT_OUT, SampledAnswer, chosen
from zerolora.select.select import select
from zerolora.select.selection_figures import pass_at

KEPT = ("right", "best", "pairs", "labelled", "all")
Answers = list[list[tuple[str, bool]]]
"""Of each prompt: the text of each answer, and whether it ended."""


class Sampled:
    """Prompts and answers as `prepare` and `sample` write them."""

    def __init__(
        self,
        folder: Path,
        answers: Answers,
        expected: list[str],
        questions: list[str] | None = None,
        given: list[list[str]] | None = None,
    ) -> None:
        self.folder, self.data, self.samples = folder, folder / "data", folder / "samples"
        questions = questions or [f"question {number}?" for number in range(len(answers))]
        messages = [[{"role": "user", "content": question}] for question in questions]
        columns: dict[str, Any] = {
            "input_ids": [[number, *range(number + 1), 9] for number in range(len(answers))],
            "prompt": [number + 2 for number in range(len(answers))],
            "source": [number % 2 for number in range(len(answers))],
            "question": questions,
            "expected": expected,
            GIVEN: given or [[each] for each in expected],
            ROW: [json.dumps({"messages": each}) for each in messages],
        }
        fields = schema(held_out=True, prompts=True)
        kept = pyarrow.schema([field for field in fields if field.name in columns])
        kept = kept.append(pyarrow.field(GIVEN, pyarrow.list_(pyarrow.string())))
        self.data.mkdir(parents=True)
        with pyarrow.OSFile(str(self.data / "prompts.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, kept) as out:
            out.write_table(pyarrow.table(columns, schema=kept))
        write_json(self.data / "manifest.json", {"sources": ["one.json", "two.json"], "files": {}})
        lines = [
            {"row": row, "sample": sample, "text": text, "tokens": len(text), "ended": ended, "whole": text != HALF}
            for row, members in enumerate(answers)
            for sample, (text, ended) in enumerate(members)
        ]
        self.samples.mkdir()
        (self.samples / "answers.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        origin = {"prompts": sha256(self.data / "prompts.arrow"), "model": "abc", "settings": {"seed": 7}}
        write_json(self.samples / "manifest.json", {**origin, "files": describe(self.samples)})

    def select(self, environment: dict[str, str] | None = None, **settings: Any) -> list[dict[str, Any]]:
        """Return the rows that settings select."""
        checked = SelectSettings(**{"samples": "own", "check": "exact"} | settings)
        output = self.folder / "selected"
        folders = self.data, self.samples, self.folder / "questions", self.folder / "work"
        select(checked, "mine", *folders, output, environment)
        return [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the last selection."""
        return dict(json.loads((self.folder / "selected/metrics.json").read_text()))


HALF = "\ufffd"
ANSWERS: Answers = [
    [("5", True), ("5", True), ("6", True), ("5.", True)],  # 2 of 4 right
    [("7", True)] * 4,  # always right
    [("1", True), ("2", True), ("3", False), (" ", True)],  # never right
]
EXPECTED = ["5", "7", "9"]


@pytest.fixture(name="sampled")
def _sampled(tmp_path: Path) -> Sampled:
    return Sampled(tmp_path, ANSWERS, EXPECTED)


def _texts(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "/".join(row[key][0]["content"] for key in ("completion", "chosen", "rejected") if key in row) for row in rows
    ]


def test_what_is_kept(sampled: Sampled) -> None:
    assert _texts(sampled.select()) == ["5", "7"]
    assert _texts(sampled.select(keep="best")) == ["5", "7", "1"]
    assert _texts(sampled.select(keep="pairs")) == ["5/6"]
    assert _texts(sampled.select(keep="all")) == ["5", "6", "7", "1", "2"]  # "5." is "5" but for punctuation
    labelled = sampled.select(keep="labelled")
    assert [row["label"] for row in labelled] == [True, False, False, True, False, False]
    assert _texts(sampled.select(mixed=True)) == ["5"]
    assert _texts(sampled.select(keep="all", most=1)) == ["5", "7", "1"]


def test_a_row_says_where_its_answer_is_from(sampled: Sampled) -> None:
    (row,) = sampled.select(keep="pairs")
    assert row == {
        "prompt": [{"role": "user", "content": "question 0?"}],
        "chosen": [{"role": "assistant", "content": "5"}],
        "rejected": [{"role": "assistant", "content": "6"}],
        SAMPLED: {
            "samples": "own",
            "model": "abc",
            "seed": 7,
            "row": 0,
            "prompt_tokens": prompt_key(np.array([0, 0], np.int32)).hex(),
            "answer": {"sample": 0, "right": True, "score": 1.0},
            "rejected": {"sample": 2, "right": False, "score": 0.0},
        },
    }


def test_an_answer_whose_text_is_not_whole_is_no_row(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path, [[(HALF, True), ("5", True)]], ["5"])
    assert _texts(sampled.select(keep="all")) == ["5"]
    assert sampled.metrics["left_out_not_whole"] == 1


def test_figures_and_page(sampled: Sampled) -> None:
    sampled.select()
    figures = sampled.metrics
    assert {name: figures[name] for name in ("prompts", "answers", "samples", "rows", "prompts_with_rows")} == {
        "prompts": 3, "answers": 12, "samples": 4, "rows": 2, "prompts_with_rows": 2,
    }  # fmt: skip
    assert figures["pass_at_1"] == pytest.approx((2 / 4 + 1 + 0) / 3)
    assert figures["pass_at_2"] == pytest.approx((1 - 1 / 6 + 1 + 0) / 3)
    assert figures["pass_at_4"] == pytest.approx(2 / 3)
    assert figures["pass_at_4_low"] < 2 / 3 < figures["pass_at_4_high"]
    assert (figures["prompts_always_right"], figures["prompts_never_right"]) == (1, 1)
    assert (figures["easy_share_of_prompts"], figures["easy_share_of_rows"]) == (pytest.approx(1 / 3), 0.5)
    assert (figures["left_out_not_ended"], figures["left_out_blank"], figures["left_out_duplicates"]) == (1, 1, 4)
    page = (sampled.folder / "selected/select.html").read_text()
    assert page.count("<h3>") == 10 and "two.json" in page and "question 0?" in page


def test_markup_in_an_answer_is_text(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path, [[("<script>", True)]], ["<script>"], ["<b>?"])
    sampled.select()
    page = (tmp_path / "selected/select.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and "<b>" not in page


WHEN = "When does the river that crosses the old town flood the fields {}?"


def test_prompts_that_runs_are_evaluated_with_become_no_row(tmp_path: Path) -> None:
    """Whether a data set holds them out or a task asks them; none of these answers is in a figure, or rated."""
    questions = ["What is  2 + 2 ?", WHEN.format("there"), "And then?", "What is 3 + 3?", WHEN[:20]]
    sampled = Sampled(tmp_path, [[("5", True)]] * 5, ["5"] * 5, questions)
    rows = [
        {"question": "what is 2 + 2", "messages": []},
        {"question": "Say one.\n\nAnd then?", "messages": [{"role": "user", "content": "And then?"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    held_out(tmp_path / "questions/task-sums.jsonl", rows=tmp_path / "rows.jsonl")
    for split, asked in (("validation", [WHEN.format("here")]), ("test", ["What is 2+2?", ""])):
        columns = pyarrow.table({"question": asked})
        path = tmp_path / f"other/{split}.arrow"
        path.parent.mkdir(exist_ok=True)
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, columns.schema) as out:
            out.write_table(columns)
    write_json(tmp_path / "other/manifest.json", {"files": describe(tmp_path / "other")})
    held_out(tmp_path / "questions/data-other.jsonl", data=tmp_path / "other")
    names = ["data-other", "task-sums"]
    assert [row["prompt"][0]["content"] for row in sampled.select(held_out=names)] == questions[3:]
    counts = {
        name: value for name, value in sampled.metrics.items() if name.startswith("held_out") or name == "prompts"
    }
    assert counts == {
        "prompts": 2, "held_out_prompts": 3, "held_out_prompts_data-other": 2, "held_out_prompts_task-sums": 2,
    }  # fmt: skip
    page = (tmp_path / "selected/select.html").read_text()
    assert "<td>data other</td><td>2</td>" in page and WHEN.format("there") not in page
    manifest = (tmp_path / "selected/manifest.json").read_text()
    write_json(tmp_path / "other/manifest.json", {"files": {}})
    held_out(tmp_path / "questions/data-more.jsonl", data=tmp_path / "other")
    assert len(sampled.select(held_out=[*names, "data-more"])) == 2
    assert (tmp_path / "selected/manifest.json").read_text() == manifest, "nothing is prepared again"
    assert len(sampled.select(held_out=["data-other"], not_asked="data-other")) == 5
    assert [path.stem for path in (tmp_path / "questions").iterdir()] == ["data-other"], "of the config alone"
    (tmp_path / "questions/data-other.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in questions))
    with pytest.raises(
        UserError, match=r"^selections.mine: all 5 prompts are equal or near to questions of data-other"
    ):
        sampled.select(held_out=["data-other"])


CASES: dict[str, tuple[Answers, dict[str, Any], str]] = {
    "nothing is right": ([[("a", True), ("b", True)]], {}, "none of the 2 answers to 1 prompt is right by exact"),
    "nothing ended": ([[("5", False)]], {}, "ended within max_new_tokens; raise samples.own.max_new_tokens"),
    "no pair": ([[("5", True)], [("x", True)]], {"keep": "pairs"}, "no prompt has a right and a wrong answer"),
    "no margin": ([[("5 b", True), ("5 c", True)]], {"keep": "pairs", "check": "f1", "score": "f1"}, "differ by more"),
    "no mixed prompt": ([[("5", True)]], {"mixed": True}, r"no row is left .* \(left out: 1 not mixed\)"),
    "equal texts": (
        [[("5.", True), ("5", True)]],
        {"keep": "pairs"},
        r"of different texts .*: 1 duplicates\)",
    ),
    "no such score": ([[("5", True)]], {"score": "rougeL"}, "'rougeL' is no score of exact, which has none"),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_written_of_nothing(tmp_path: Path, name: str) -> None:
    answers, settings, said = CASES[name]
    sampled = Sampled(tmp_path, answers, ["5"] * len(answers))
    with pytest.raises(UserError, match=said) as caught:
        sampled.select(**settings)
    assert "\n" not in str(caught.value) and not (tmp_path / "selected").exists()


def test_an_answer_that_any_row_gives_is_right(tmp_path: Path) -> None:
    answers: Answers = [[("blue", True), ("red", True), ("green", True)], [("x", True)] * 3]
    sampled = Sampled(tmp_path, answers, ["red", "-"], given=[["red", "blue"], []])
    assert _texts(sampled.select()) == ["blue", "red"]
    assert _texts(sampled.select(keep="pairs")) == ["blue/green"]
    (f1,) = {row["completion"][0]["content"] for row in sampled.select(check="f1", score="f1", keep="best")}
    assert f1 == "blue"
    assert "red | blue" in (tmp_path / "selected/select.html").read_text()


def test_pairs_count_what_they_leave_out(tmp_path: Path) -> None:
    sampled = Sampled(tmp_path / "a", [[(text, True) for text in ("x", "x.", "x!", "y", "y.", "z", "v", "w")]], ["x"])
    sampled.select(keep="pairs")
    assert (sampled.metrics["left_out_duplicates"], sampled.metrics["left_out_beyond_most"]) == (3, 0)
    answers: Answers = [[(text, True) for text in ("x", "y", "z", "v")]]
    both = Sampled(tmp_path / "b", answers, ["x"], given=[["x", "y"]])
    both.select(keep="pairs")
    assert both.metrics["left_out_beyond_most"] == 2


@pytest.mark.parametrize("none", [math.nan, math.inf, None, "x"])
@pytest.mark.parametrize(("keep", "texts"), [("best", ["d"]), ("pairs", ["d/a"]), ("all", ["a", "c", "d"])])
def test_a_score_that_is_no_number_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, none: Any, keep: str, texts: list[str]
) -> None:
    scores = {"a": 6.0, "b": none, "c": 7.0, "d": 8.0}
    task = replace(TASKS["f1"], judge=lambda row, answer: Judgement(True, True, {"f1": scores[answer]}))
    monkeypatch.setitem(TASKS, "f1", task)
    sampled = Sampled(tmp_path, [[(text, True) for text in scores]], ["a"])
    assert _texts(sampled.select(check="f1", score="f1", keep=keep)) == texts
    assert sampled.metrics["left_out_without_score"] == 1


def test_a_verdict_is_true_or_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = lambda row, answer: Judgement(True, 0.3)  # type: ignore[arg-type]  # noqa: E731
    monkeypatch.setitem(TASKS, "exact", replace(TASKS["exact"], judge=judge))
    with pytest.raises(UserError, match=r"selections.mine.check: exact says that an answer is right with 0.3, which"):
        Sampled(tmp_path, ANSWERS, EXPECTED).select()


def test_a_judge_sees_what_the_model_did(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which colour?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "blue"},
    ]
    row = {ROW: json.dumps({"messages": turns, "tools": [{"name": "look"}]})}
    text = SampledPrompt(row, 1, "", "", []).as_text
    assert text.split("\n\n") == [
        '### Tools:\n[{"name": "look"}]',
        "### System:\nBe brief.",
        "### User:\nWhich colour?",
        f"### Assistant:\n{json.dumps([call])}",
        "### Tool:\nblue",
    ]


def test_answers_to_other_prompts_are_refused(sampled: Sampled) -> None:
    write_json(sampled.samples / "manifest.json", {"prompts": "", "model": "", "settings": {}, "files": {}})
    with pytest.raises(UserError, match="other prompts"):
        sampled.select()


def test_a_judge_is_asked_on_request_and_once(tmp_path: Path) -> None:
    answers: Answers = [[("good", True), ("bad", True), ("good", True), ("good, cut", False)], [("bad", True)] * 4]
    sampled = Sampled(tmp_path, answers, ["", ""])
    with judging() as judge:
        asked = JudgeSettings(endpoint=judge.endpoint, model="judge", prompt_price=1.0, completion_price=1.0)
        settings: dict[str, Any] = {"check": "judge", "judge": asked, "least": 8.0, "keep": "pairs", "margin": 3.0}
        with pytest.raises(UserError, match=r"3 of 3 answers have no rating yet, which may cost money \(at most"):
            sampled.select(**settings)
        assert judge.asked == []
        assert _texts(sampled.select({}, **settings)) == ["good/bad"]
        assert len(judge.asked) == 3  # equal answers once, and none that its limit ended
        assert "question 0?" in judge.asked[0]["messages"][1]["content"]
        assert _texts(sampled.select(**settings | {"keep": "right"})) == ["good"]
        assert len(judge.asked) == 3
    assert sampled.metrics["pass_at_1"] == pytest.approx((2 / 4 + 0) / 2)


ANSWER = st.builds(
    lambda text, ended, whole, right, score: SampledAnswer(0, 0, text, len(text), ended, whole, right, score),
    st.sampled_from(["a", "A", "b", "c c", " "]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
)
SETTINGS = st.builds(
    lambda keep, most, mixed, margin, longest: SelectSettings(
        samples="own", check="exact", keep=keep, most=most, mixed=mixed, margin=margin, max_answer_length=longest
    ),
    st.sampled_from(KEPT),
    st.sampled_from([None, 1, 2]),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([None, 1]),
)


@given(st.lists(ANSWER, min_size=1, max_size=6), SETTINGS)
def test_laws_of_what_is_kept(drawn: list[SampledAnswer], settings: SelectSettings) -> None:
    answers = [each._replace(sample=number) for number, each in enumerate(drawn)]
    rows = chosen(settings, answers)
    used = [answer for row in rows for answer in (row.answer, row.rejected) if answer]
    assert len({*used}) == len(used)  # an answer is used once
    assert all(each.ended and each.whole and each.text.strip() and each.score is not None for each in used)
    assert all((each.tokens or 0) <= (settings.max_answer_length or math.inf) for each in used)
    labels = [row.answer.right if settings.keep == "labelled" else None for row in rows]
    most = settings.most or (1 if settings.keep in ("best", "pairs") else len(answers))
    assert all(labels.count(label) <= most for label in labels)
    if settings.mixed and rows:
        assert {each.right for each in answers} == {True, False}
    if settings.keep == "right":
        assert all(row.answer.right for row in rows)
    if settings.keep == "pairs":
        scores = [(row.answer.score, row.rejected.score if row.rejected else None) for row in rows]
        assert all(None not in both and both[0] - both[1] > settings.margin for both in scores)  # type: ignore[operator]
        assert all(row.rejected and normal_form(row.answer.text) != normal_form(row.rejected.text) for row in rows)
    else:
        keys = [(normal_form(row.answer.text), label) for row, label in zip(rows, labels, strict=True)]
        assert len({*keys}) == len(keys)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_that_of_all_choices_of_k(samples: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    choices = list(itertools.combinations([True] * right + [False] * (samples - right), k))
    assert pass_at(k, samples, right) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_every_reason_has_a_count(sampled: Sampled) -> None:
    sampled.select()
    assert all(f"left_out_{name}" in sampled.metrics for name in LEFT_OUT)
