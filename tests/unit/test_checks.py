"""Checks of answers equal the published implementations of their metrics."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import sacrebleu
from conftest import ROOT, refusal
from hypothesis import given
from hypothesis import strategies as st

from zerolora.evaluate.tasks import TASKS, task_of
from zerolora.evaluate.tasks.f1 import normalized, word_f1
from zerolora.evaluate.tasks.numeric import comparable, flexible, strict
from zerolora.evaluate.tasks.task import Judgement, Likelihood

# Answers and references.
PAIRS = [
    ("the cat is sat on the mat", "The cat sat on the mat."),
    ("Denver Broncos", "The Denver Broncos!"),
    ("a an the", "the"),
    ("", "Santa Clara, California"),
    ("It was Ada Lovelace, the countess of Lovelace", "Ada Lovelace"),
    ("Der Hund läuft — schnell", "Der Hund läuft schnell."),
    ("running runs ran", "the runner ran, running"),
    ("12,000 dollars", "$12,000"),
]
WORDS = st.lists(st.sampled_from(["the", "a", "cat", "Cat.", "sat", "mat", "é", "-"]), max_size=6).map(" ".join)


def judged(name: str, answer: Any, expected: Any, **settings: Any) -> Judgement:
    row = {"question": "", "expected": expected, "prompt": 1}
    return task_of(name, settings, None).judge(row, answer)


def test_f1_equals_squads() -> None:
    from lm_eval.tasks.mlqa.utils import exact_match_score, f1_score  # SQuAD's, of a language

    for answer, expected in PAIRS:
        actual = judged("f1", answer, expected)
        if "—" not in answer:  # punctuation beyond ASCII is MLQA's alone
            assert actual.right == exact_match_score(answer, expected, "en")
            assert actual.scores["f1"] == pytest.approx(f1_score(answer, expected, "en"))


@given(WORDS, WORDS)
def test_f1_is_symmetric_and_1_only_for_the_same_words(one: str, other: str) -> None:
    assert word_f1(one, other) == word_f1(other, one)
    same = sorted(normalized(one).split()) == sorted(normalized(other).split()) != []
    assert (word_f1(one, other) == 1.0) == same
    assert normalized(normalized(one)) == normalized(one)


def test_rouge_equals_googles() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for answer, expected in PAIRS:
        published = {name: score.fmeasure for name, score in scorer.score(expected, answer).items()}
        assert judged("rouge", answer, expected).scores == published


@pytest.mark.parametrize("kind", ["bleu", "chrf"])
def test_corpus_scores_equal_sacrebleus_and_lie_in_their_interval(kind: str) -> None:
    task = TASKS[kind]
    rows = PAIRS * 5
    judgements = [judged(kind, answer, expected) for answer, expected in rows]
    metrics = task.metrics(judgements)
    answers, expected = ([pair[number] for pair in rows] for number in (0, 1))
    corpus: Any = {"bleu": sacrebleu.corpus_bleu, "chrf": sacrebleu.corpus_chrf}[kind]
    sentence: Any = {"bleu": sacrebleu.sentence_bleu, "chrf": sacrebleu.sentence_chrf}[kind]
    assert metrics[kind] == pytest.approx(corpus(answers, [expected]).score)
    assert metrics[f"{kind}_low"] < metrics[kind] < metrics[f"{kind}_high"]
    each = [sentence(answer, [reference]).score for answer, reference in rows]
    assert metrics[f"sentence_{kind}"] == pytest.approx(sum(each) / len(each))
    assert metrics == task.metrics(judgements)  # the resamples are seeded


def test_numbers_are_extracted_as_in_the_harness_gsm8k() -> None:
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter
    from lm_eval.tasks._yaml_loader import load_yaml

    answers = [
        "So 3 + 4 = 7.\n#### 7", "#### 1,234.50", "The answer is $1,234.", "-5", "#### -5.", "none", "", "7 or 8",
        "x = 3.14", "#### 12 #### 13", "about 10,000 people", "2", "...", "#### ,",
    ]  # fmt: skip
    import lm_eval

    root = next(iter(lm_eval.__path__))
    config: dict[str, Any] = load_yaml(f"{root}/tasks/gsm8k/gsm8k.yaml")
    (by_strict, by_flexible) = (
        RegexFilter(**{key: value for key, value in each["filter"][0].items() if key != "function"})
        for each in config["filter_list"]
    )
    ignored = config["metric_list"][0]["regexes_to_ignore"]
    for answer in answers:
        assert [[strict(answer)]] == by_strict.apply([[answer]], [])
        assert [[flexible(answer)]] == by_flexible.apply([[answer]], [])
        for gold in ("3 + 4 = 7\n#### 7", "#### 1,234", "#### -5", "#### 12"):
            for ours, published in ((strict, by_strict), (flexible, by_flexible)):
                actual = published.apply([[answer]], [])
                expected = exact_match_hf_evaluate(
                    predictions=actual[0], references=[gold], regexes_to_ignore=ignored, ignore_case=True
                )["exact_match"]
                assert (comparable(ours(answer)) == comparable(gold)) == bool(expected), (answer, gold)
    actual = judged("numeric", "He has 9 apples.", "9 apples")
    assert actual == Judgement(True, True, {"strict_accuracy": 0.0})
    assert judged("numeric", "#### 7", "so\n#### 7").scores == {"strict_accuracy": 1.0}


@given(st.lists(st.tuples(st.text("abé ", min_size=1, max_size=8), st.floats(-50, -0.01)), min_size=2, max_size=5))
def test_choices_are_judged_as_in_the_harness(choices: list[tuple[str, float]]) -> None:
    texts, lls = [text for text, _ in choices], np.array([value for _, value in choices])
    completion_len = np.array([float(len(i)) for i in texts])
    byte_length = np.array([float(len(i.encode("utf-8"))) for i in texts])
    answer = [Likelihood(text, value, 1) for text, value in choices]
    for gold in range(len(choices)):
        actual = judged("multiple_choice", answer, gold)
        assert actual.right == (np.argmax(lls) == gold)
        assert actual.scores["accuracy_norm"] == float(np.argmax(lls / completion_len) == gold)
        assert actual.scores["accuracy_bytes"] == float(np.argmax(lls / byte_length) == gold)


def test_perplexity_equals_the_harness() -> None:
    from lm_eval.api.metrics import bits_per_byte, weighted_perplexity

    rows = [Likelihood("Hello wörld, \n again.", -31.5, 8), Likelihood("One", -4.25, 1)]
    task = TASKS["perplexity"]
    actual = task.metrics([task.judge({}, each) for each in rows])
    words = [(each.logarithm, len(re.split(r"\s+", each.text))) for each in rows]
    octets = [(each.logarithm, len(each.text.encode("utf-8"))) for each in rows]
    assert actual["word_perplexity"] == pytest.approx(weighted_perplexity(words))
    assert actual["byte_perplexity"] == pytest.approx(weighted_perplexity(octets))
    assert actual["bits_per_byte"] == pytest.approx(bits_per_byte(octets))
    assert actual["token_perplexity"] == pytest.approx(math.exp(35.75 / 9))
    assert task.metrics([task.judge({}, Likelihood("a", -1e6, 1))])["token_perplexity"] == math.inf


def test_regex_compares_its_group() -> None:
    pattern = r"answer is (\d+)"
    assert judged("regex", "The answer is 7.", "7", pattern=pattern) == Judgement(True, True)
    assert judged("regex", "The answer is 8.", "7", pattern=pattern) == Judgement(True, False)
    assert judged("regex", "7", "7", pattern=pattern) == Judgement(False, False)
    assert judged("regex", "The answer is 7.", "7", pattern=pattern, whole=True) == Judgement(False, False)
    assert judged("regex", "anything", "", pattern="any") == Judgement(True, True)


def test_json_answers_are_validated_as_by_jsonschema() -> None:
    import jsonschema

    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
    for answer in ('{"n": 1}', '{"n": 0}', "{}", "[]", "null", '{"n": 2, "m": 1}'):
        try:
            jsonschema.validate(json.loads(answer), schema)
            valid = True
        except jsonschema.ValidationError:
            valid = False
        assert judged("json_schema", answer, "", json_schema=schema) == Judgement(True, valid)
    assert judged("json_schema", "n = 1", "", json_schema=schema) == Judgement(False, False)
    assert not judged("json_schema", '{"n": 1}', '{"n": 2}', json_schema=schema, equal=True).right


@pytest.mark.parametrize(
    ("check", "settings", "said"),
    [
        ("regex", {"pattern": "("}, "pattern: is not a valid regular expression"),
        ("regex", {}, "pattern: Field required"),
        ("regex", {"pattern": "a", "flags": 1}, "flags: Extra inputs are not permitted; regex has the settings patt"),
        ("json_schema", {"json_schema": {"type": 1}}, "json_schema: is not JSON Schema"),
        ("exact", {"pattern": "a"}, "exact has no settings; remove pattern"),
    ],
)
def test_invalid_settings_are_one_line(check: str, settings: dict[str, Any], said: str) -> None:
    assert said in refusal(task_of, check, settings, None)


def test_shipped_custom_task_judges_its_example() -> None:
    name = "config/tasks/contains.py"
    task = task_of(name, {}, (ROOT / name).read_text())
    row = {"expected": task.example.expected}
    assert task.judge(row, task.example.right).right and not task.judge(row, task.example.wrong).right


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\nTASK = Task()\n", "mine.py:2: NameError: name 'Task' is not defined; correct that line"),
        ("def f(:\n", "mine.py:1: SyntaxError: invalid syntax; correct that line"),
        ("TASK = 5\n", "mine.py: defines no TASK; define TASK = Task(...), as in docs/tasks.md"),
    ],
)
def test_broken_task_file_is_one_line(source: str, said: str) -> None:
    assert refusal(task_of, "config/tasks/mine.py", {}, source) == f"config/tasks/{said}"
