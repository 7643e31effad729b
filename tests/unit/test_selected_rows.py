"""Selections as sources of a data set: their prompts, their weights, and held-out rows of another data set."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from zerolora.config.settings import PrepareSettings
from zerolora.data.example import SAMPLED
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import SPLITS, open_table
from zerolora.errors import UserError
from zerolora.files import describe, write_json
from zerolora.select.asked_prompts import read_prompts

WORDS = [f"{first}{second}" for first in ("ba", "ce", "di", "fu") for second in ("lm", "nt", "rs", "ve", "x")]
EDITS: dict[str, Callable[[list[str]], list[str]]] = {
    "equal": lambda words: words,
    "upper case": lambda words: [word.upper() for word in words],
    "punctuation": lambda words: [f"{word}," for word in words],
    "another word": lambda words: [*words[:12], "other", *words[13:]],
    "longer": lambda words: ["please", "say", *words, "now"],
}
"""Ways to write a question that stays equal or near (near_prompts.py)."""


def question(seed: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=24)  # noqa: S311 - no secret


HELD_OUT = [" ".join(question(number)) for number in range(4)]
OWN = [" ".join(question(100 + number)) for number in range(4)]


class Folder:
    """A data set `rows` with given held-out rows, and data sets of selections beside it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.symlink_to(model)
        write_json(self.model.parent / "manifest.json", {})

    def prepare(self, name: str, **settings: Any) -> Path:
        own = {"model": "tiny", "max_length": 512, "split": {"validation": 0, "test": 0}} | settings
        output = self.folder / "data" / name
        prepare(
            PrepareSettings.model_validate(own),
            self.model / "config.json",
            output,
            1,
            self.folder / "selections",
            self.folder / "data",
        )
        return output

    def rows(self, planted: list[str], **settings: Any) -> Path:
        """Prepare the data set `rows`, with further questions among its training rows."""
        write(self.folder / "rows/test.jsonl", [asked(each) for each in HELD_OUT])
        write(self.folder / "rows/train.jsonl", [asked(each) for each in [*OWN, *planted]])
        sources = {"train.jsonl": {"split": "train"}, "test.jsonl": {"split": "test"}}
        return self.prepare("rows", path=str(self.folder / "rows"), sources=sources, prompts=True, **settings)

    def selection(self, name: str, rows: list[dict[str, Any]], kind: str = "texts") -> None:
        folder = self.folder / "selections" / name
        write(folder / "rows.jsonl", rows)
        write_json(folder / "manifest.json", {"rows": kind, "files": describe(folder)})


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def asked(text: str, answer: str = "yes") -> dict[str, Any]:
    return {"prompt": [turn("user", text)], "completion": [turn("assistant", answer)]}


def pair(text: str) -> dict[str, Any]:
    return {"prompt": [turn("user", text)], "chosen": [turn("assistant", "yes")], "rejected": [turn("assistant", "no")]}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def sampled(data: Path) -> list[dict[str, Any]]:
    """Return rows of answers to the prompts of a data set, with the provenance that `select` writes."""
    return [
        {**asked(prompt.as_text, "maybe"), SAMPLED: {"prompt_tokens": prompt.hash}} for prompt in read_prompts(data)
    ]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Folder:
    return Folder(tmp_path, tiny_model)


def texts(data: Path, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(ids) for ids in open_table(data, "train")["input_ids"].to_pylist()]


COPY = st.tuples(st.sampled_from(range(len(HELD_OUT))), st.sampled_from(sorted(EDITS)))


@hypothesis_settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(COPY, min_size=1, max_size=5))
def test_nothing_equal_or_near_is_sampled_or_trained_on(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, drawn: list[tuple[int, str]]
) -> None:
    """Copies of held-out questions, planted among training rows and among selected ones: none is a prompt to sample
    from, and none is trained on, although `leakage` only reports them."""
    folder = Folder(tmp_path_factory.mktemp("planted"), tiny_model)
    planted = [" ".join(EDITS[edit](question(number))) for number, edit in drawn]
    data = folder.rows(planted)
    assert len(open_table(data, "train")) == len(OWN) + len(planted)
    assert sorted(open_table(data, "prompts")["question"].to_pylist()) == sorted(OWN)
    folder.selection("own", [asked(text, "maybe") for text in [*planted, *OWN]])
    selected = folder.prepare("round", selections=["own"], held_out="rows")
    assert len(open_table(selected, "train")) == len(OWN)
    assert open_table(selected, "test")["question"].to_pylist() == open_table(data, "test")["question"].to_pylist()


def test_a_row_follows_the_prompt_that_it_was_sampled_from(folder: Folder) -> None:
    folder.selection("own", sampled(folder.rows([])))
    data = folder.prepare("round", selections=["own"], held_out="rows")
    assert [len(open_table(data, split)) for split in SPLITS] == [len(OWN), 0, len(HELD_OUT)]
    before = open_table(folder.folder / "data/rows", "prompts").to_pylist()
    after = open_table(data, "train").to_pylist()
    assert [row["input_ids"][: row["prompt"]] for row in before] == [
        after[number]["input_ids"][: row["prompt"]] for number, row in enumerate(before)
    ]
    for other in ({"system": "Be brief."}, {"template": "plain"}, {"drop_system": True, "system": "x"}):
        with pytest.raises(UserError, match="sampled from a prompt with other tokens"):
            folder.prepare("other", selections=["own"], **other)
    with pytest.raises(UserError, match="too long and would be cut"):
        folder.prepare("other", selections=["own"], max_length=100, too_long="truncate_left")
    folder.selection("own", [{**asked("Hi"), "zerolora_sample": 1}])
    with pytest.raises(UserError, match="zerolora_sample is not as the stage select writes it"):
        folder.prepare("other", selections=["own"])


SYSTEMS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "of the settings": ({"system": "Be kind."}, {"system": "Be terse."}, ""),
    "dropped": ({"system": "Be kind."}, {"drop_system": True}, "Be terse."),
}


@pytest.mark.parametrize("kind", ["texts", "pairs"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_question_is_held_out_under_any_system_prompt_of_settings(folder: Folder, name: str, kind: str) -> None:
    """Of fewer words than questions that are near each other have."""
    first, second, own = SYSTEMS[name]
    short = [f"Who is {number}?" for number in range(4)]
    write(folder.folder / "short.jsonl", [asked(each) for each in short])
    folder.prepare("short", path=str(folder.folder / "short.jsonl"), split={"validation": 0, "test": 2}, **first)
    rows = [KINDS[kind](each) for each in short]
    for row in rows:
        row["prompt"] = [turn("system", own)] * bool(own) + row["prompt"]
    folder.selection("own", rows, kind)
    data = folder.prepare("round", selections=["own"], held_out="short", rows=kind, **second)
    assert [len(open_table(data, split)) for split in ("train", "test")] == [2, 2]


def test_a_prompt_has_the_answers_of_all_its_rows(folder: Folder) -> None:
    path = folder.folder / "labelled.jsonl"
    given = [("red", True), ("green", False), ("blue", True), ("red", True)]
    rows = [{**asked("Name a colour", answer), "label": label} for answer, label in given]
    write(path, [*rows, {**asked("Name a day", "1st"), "label": False}])
    data = folder.prepare("colours", path=str(path), rows="labelled", prompts=True)
    assert [prompt.given for prompt in read_prompts(data)] == [["red", "blue"], []]
    write(path, [asked("Name a colour", answer) for answer, _ in given[::2]])
    data = folder.prepare("texts", path=str(path), prompts=True)
    assert [prompt.given for prompt in read_prompts(data)] == [["red", "blue"]]


def test_held_out_rows_have_the_same_tokens(folder: Folder) -> None:
    folder.rows([])
    folder.selection("own", [asked("Hi", "yes")])
    with pytest.raises(UserError, match="held_out: rows has another chat template"):
        folder.prepare("round", selections=["own"], held_out="rows", template="plain")
    with pytest.raises(
        UserError, match="no row is left to train on; 1 rows with a prompt of a later split are dropped, which rows"
    ):
        folder.selection("own", [asked(HELD_OUT[0], "yes")])
        folder.prepare("round", selections=["own"], held_out="rows")


def test_held_out_rows_of_an_earlier_version_are_prepared_again(folder: Folder) -> None:
    """Their results may be kept."""
    data = folder.rows([])
    folder.selection("own", [asked("Hi", "yes")])
    table = open_table(data, "test").drop_columns(["hashes"]).combine_chunks()
    (data / "test.arrow").unlink()  # the table is a view of it
    with pyarrow.OSFile(str(data / "test.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    manifest = json.loads((data / "manifest.json").read_text())
    files = {name: describe(data)[name] for name in manifest["files"]}
    write_json(data / "manifest.json", manifest | {"files": files})
    with pytest.raises(UserError, match=r"test.arrow: was written by an earlier version.* stage prepare rows. again"):
        folder.prepare("round", selections=["own"], held_out="rows")


def test_texts_are_held_out_beside_pairs(folder: Folder) -> None:
    folder.rows([])
    folder.selection("own", [pair(text) for text in [*OWN, HELD_OUT[0]]], "pairs")
    data = folder.prepare("round", selections=["own"], held_out="rows", rows="pairs")
    train, test = open_table(data, "train"), open_table(data, "test")
    assert len(train) == len(OWN) and "rejected_input_ids" in train.column_names
    assert len(test) == len(HELD_OUT) and "rejected_input_ids" not in test.column_names
    with pytest.raises(UserError, match="its rows are pairs, but the runs of this data set learn from texts"):
        folder.prepare("other", selections=["own"])


def test_selections_are_sources_of_a_mixture(folder: Folder) -> None:
    write(folder.folder / "given/one.jsonl", [asked(f"Which {number}?") for number in range(8)])
    for name in ("own", "more"):
        folder.selection(name, [asked(f"What {name} {number}?") for number in range(8)])
    weights = {"one.jsonl": {"weight": 2.0}, "own": {"weight": 1.0}, "more": {"rows": 3}}
    data = folder.prepare("mixed", path=str(folder.folder / "given"), selections=["own", "more"], sources=weights)
    sources = json.loads((data / "stats.json").read_text())["sources"]
    assert {name: each["train_rows"] for name, each in sources.items()} == {"one.jsonl": 8, "own": 4, "more": 3}


KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "texts": lambda text: asked(text, "maybe"),
    "pairs": pair,
    "labelled": lambda text: {**asked(text, "maybe"), "label": text < "d"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_without_any_setting(folder: Folder, kind: str) -> None:
    """By their path, too, as any other data: nothing but the kind of the objective is set."""
    prompts = {prompt.as_text: prompt.hash for prompt in read_prompts(folder.rows([]))}
    rows = [{**KINDS[kind](text), SAMPLED: {"prompt_tokens": key}} for text, key in prompts.items()]
    folder.selection("own", rows, kind)
    by_path = folder.prepare("path", path=str(folder.folder / "selections/own/rows.jsonl"), rows=kind)
    by_name = folder.prepare("name", selections=["own"], rows=kind, held_out="rows")
    both = [open_table(data, "train").to_pylist() for data in (by_path, by_name)]
    assert len(both[0]) == len(OWN) and both[0] == both[1]
    if kind == "labelled":
        assert {row["desirable"] for row in both[0]} == {int(text < "d") for text in OWN}
