"""Prompts that also occur in a later split: the same, the same but for case and punctuation, and nearly the same."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolora.config.settings import PrepareSettings
from zerolora.data.near_prompts import near
from zerolora.data.normal_form import normal_form, words_of
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import open_split

SAME = [
    ("What is 2+2?", "what is  2 + 2"),
    ("Who are you?", "WHO ARE YOU"),
    ("Straße, bitte!", "STRASSE bitte"),
    ("Ｈｅｌｌｏ，ｗｏｒｌｄ", "hello world"),
    ("王大丫，你好。", "王大丫 你好"),
    ("«Où est-il ?»", "où est il"),
    ("It's 'so' - is 2 + 2, or 3 4?", "It’s ‘so’ – is 2 + 2, or\u00a03\u30004？"),  # the second is not ASCII
]
DIFFERENT = [("3 - 1 =", "3 * 1 ="), ("1 2", "12"), ("1.5", "15"), ("x + y", "x y"), ("?", "!"), ("-5", "5")]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_normal_form_has_no_case_blanks_and_punctuation(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_normal_form_keeps_numbers_and_operators_apart(one: str, other: str) -> None:
    assert normal_form(one) != normal_form(other)


@settings(max_examples=500)
@given(st.text(" 34,.-aB\t_\x1c", max_size=8) | st.text(st.characters(max_codepoint=127)))
def test_normal_form_of_ascii_is_that_of_any_text(text: str) -> None:
    assert normal_form("ö" + text + "é") == "ö" + normal_form("a" + text + "b")[1:-1] + "é"


def test_words_of_scripts_without_blanks_are_letters() -> None:
    assert words_of("Hello, wOrld_1!") == ["hello", "world", "1"]
    assert words_of("王大 你ok") == ["王", "大", "你", "ok"]


WORDS = [
    f"{first}{second}" for first in ("ba", "ce", "di", "fu", "gu", "ha") for second in ("lm", "nt", "rs", "ve", "x")
]


def sentence(seed: int, words: int = 30) -> list[str]:
    return random.Random(seed).choices(WORDS, k=words)  # noqa: S311 - no secret


def found(texts: list[str], ranks: list[int]) -> list[list[int]]:
    """Return the near texts of ranks 0 and 1; the texts come in parts of two."""

    def parts(rows: np.ndarray) -> Any:
        for start in range(0, len(rows), 2):
            yield rows[start : start + 2], [texts[row - 100] for row in rows[start : start + 2]]

    numbers = np.arange(100, 100 + len(texts))
    return [(part - 100).tolist() for part in near(numbers, np.array(ranks, np.int8), parts)]


def test_a_part_without_texts_has_no_words() -> None:
    prompts, ranks = np.arange(2), np.array([0, 1], np.int8)
    assert [found.tolist() for found in near(prompts, ranks, lambda rows: iter([(rows[:0], [])]))] == [[], []]


def test_prompts_that_share_most_runs_are_near() -> None:
    words = sentence(0)
    changed = [*words[:15], "other", *words[16:]]
    longer = [*sentence(1, 10), *words, *sentence(2, 10)]
    half = [*words[:15], *sentence(3, 15)]
    texts = [" ".join(each) for each in (changed, longer, half, sentence(4), words)]
    assert found([*texts[:4], texts[4].upper() + "!"], [0, 0, 0, 0, 2]) == [[0, 1], []]
    # Validation rows are compared with test rows alone, and no row with an earlier split.
    assert found(texts, [2, 1, 0, 0, 1]) == [[], [1, 4]]
    assert found(texts, [0, 0, 0, 0, 0]) == [[], []]
    assert found(["", "a b c", " ".join(words[:7])], [0, 1, 2]) == [[], []]


@pytest.mark.parametrize(("times", "expected"), [(10, 1), (12, 0)])
def test_template_of_many_prompts_makes_none_near(times: int, expected: int) -> None:
    """Its runs would be most of each prompt."""
    template = " ".join(sentence(9, 40))
    texts = [f"{template} {' '.join(sentence(seed, 3))}" for seed in range(100, 100 + times)]
    assert bool(found(texts, [0] * (times - 1) + [2])[0]) == bool(expected)
    # A prompt behind the template is found.
    tail = sentence(50, 20)
    texts += [f"{template} {' '.join(tail)}", f"{template} {' '.join([*tail, 'end'])}"]
    assert times in found(texts, [0] * (times + 1) + [2])[0]


def test_runs_are_those_of_a_plain_search() -> None:
    """Short alphabets, so that texts share many runs."""
    texts = [[random.Random(seed * 100 + at).choice("ab") for at in range(9 + seed % 7)] for seed in range(16)]  # noqa: S311
    ranks = [0] * 8 + [1] * 4 + [2] * 4

    def runs(text: list[str]) -> set[tuple[str, ...]]:
        return {tuple(text[at : at + 8]) for at in range(len(text) - 7)}

    expected: list[list[int]] = [[], []]
    for one, rank in enumerate(ranks[:12]):
        others = [runs(texts[other]) for other, later in enumerate(ranks) if later > rank]
        if any(2 * len(runs(texts[one]) & other) >= len(other) for other in others):
            expected[rank].append(one)
    assert found([" ".join(text) for text in texts], ranks) == expected


QUESTIONS = [" ".join(sentence(seed)) for seed in range(40)]


def row(form: str, question: str, answer: str) -> dict[str, Any]:
    if form == "texts":
        return {"instruction": question, "output": answer}
    if form == "pairs":
        return {"prompt": question, "chosen": answer, "rejected": f"not {answer}"}
    return {"prompt": question, "completion": answer, "label": answer[-1] in "02468"}


@pytest.mark.parametrize("form", ["texts", "pairs", "labelled"])
@pytest.mark.parametrize("drop", [False, True])
def test_each_kind_of_leak_is_counted_and_dropped(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture, form: str, drop: bool
) -> None:
    """Of ten test prompts one is in training, two are but for case and blanks, and three nearly."""
    caplog.set_level("INFO")
    changed = [
        QUESTIONS[0], QUESTIONS[1].upper(), f"«{QUESTIONS[2].replace(' ', '  ')}»",
        *(f"So, {question}, please" for question in QUESTIONS[3:6]),
    ]  # fmt: skip
    train = [row(form, text, f"train {number}") for number, text in enumerate([*changed, *QUESTIONS[20:]])]
    test = [row(form, text, f"test {number}") for number, text in enumerate(QUESTIONS[:10])]
    for name, rows in (("a", train), ("b", test)):
        (tmp_path / f"rows/{name}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / f"rows/{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    manifest = tmp_path / "model/manifest.json"
    manifest.parent.mkdir()
    for path in (*tiny_model.glob("*token*"), tiny_model / "config.json", tiny_model / "chat_template.jinja"):
        (manifest.parent / path.name).write_bytes(path.read_bytes())
    manifest.write_text("{}")
    settings = PrepareSettings.model_validate(
        {"model": "tiny", "path": str(tmp_path / "rows"), "split": {"validation": 0, "test": 0}, "rows": form,
         "sources": {"a.jsonl": {}, "b.jsonl": {"split": "test"}}, "leakage": "drop" if drop else "report",
         "max_length": 2048}
    )  # fmt: skip
    prepare(settings, manifest, tmp_path / "out", 1)
    stats = json.loads((tmp_path / "out/stats.json").read_text())
    names = ("leaked_prompts", "leaked_normalized_prompts", "leaked_near_prompts")
    assert [stats[name] for name in names] == [1, 2, 3]
    said = "1 training prompts also held out, 2 but for case, spaces and punctuation, 3 nearly"
    assert said in caplog.text
    assert len(open_split(tmp_path / "out", "train")) == (20 if drop else 26)
    assert len(open_split(tmp_path / "out", "test")) == 10
