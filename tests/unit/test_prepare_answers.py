"""Preference data become tokens: both sequences of a pair have one prompt, no answer is cut, one split has a prompt."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_prepare import Folder

from zerolora.config.schema import Source
from zerolora.config.settings import PackSettings, PrepareSettings
from zerolora.data.answer_tokens import fitted_answers, prompts_of
from zerolora.data.encode import CONTEXT, Tokens
from zerolora.data.mask import Proof
from zerolora.data.mixture import Index, contradictory, mix
from zerolora.data.pack import pack_rows, shared_prompts
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import IGNORED, SPLITS, open_split, open_table
from zerolora.data.ragged import Ragged
from zerolora.data.truncation import Limits
from zerolora.errors import UserError
from zerolora.memory.training_spec import TrainingSpec, row_statistics
from zerolora.methods.lora import LoraMethod
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import FEWEST
from zerolora.planner.candidates import step_work
from zerolora.train.feed import collate, packed_row
from zerolora.train.objectives import OBJECTIVES

PAIRS = [
    {"prompt": f"What is {one} + {two}?", "chosen": str(one + two), "rejected": f"It is {one * two}, of course."}
    for one in range(2, 6)
    for two in range(3, 8)
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]


def of_kind(folder: Folder, kind: str, rows: Any = None, **changed: Any) -> Path:
    """Prepare rows that hold `kind`."""
    if rows is not None:
        folder.write("rows.json", rows)
    prepare(folder.settings(rows=kind, **changed), folder.manifest, folder.output, 1)
    return Path(folder.output)


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Folder:
    return Folder(tmp_path, tiny_model)


def texts(folder: Folder, rows: list[dict[str, Any]], name: str) -> dict[str, tuple[list[int], list[int]]]:
    """Return tokens and labels of prompts with their answers, prepared as conversations, by question."""
    messages = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]}
        for row in rows
    ]
    data = folder.prepare(messages, split={"validation": 0, "test": 0})
    result = open_split(data, "train")
    return {row["prompt"]: (each["input_ids"], each["labels"]) for row, each in zip(rows, result, strict=True)}


def test_both_sequences_are_those_of_conversations(folder: Folder) -> None:
    chosen, rejected = (texts(folder, PAIRS, name) for name in ("chosen", "rejected"))
    data = of_kind(folder, "pairs", PAIRS)
    rows = [row for split in SPLITS for row in open_split(data, split)]
    assert len(rows) == len(PAIRS)
    for row in open_split(data, "test"):
        question = row["question"]
        assert (row["input_ids"], row["labels"]) == chosen[question]
        assert (row["rejected_input_ids"], row["rejected_labels"]) == rejected[question]
        (pair,) = [pair for pair in PAIRS if pair["prompt"] == question]
        assert (row["expected"], row["rejected"]) == (pair["chosen"], pair["rejected"])
        assert row["labels"][: row["prompt"]] == [IGNORED] * row["prompt"]
        assert row["labels"][row["prompt"]] != IGNORED
    for row in rows:
        sides = [(row[f"{side}input_ids"], row[f"{side}labels"]) for side in ("", "rejected_")]
        assert row["length"] == sum(len(ids) for ids, _ in sides)
        counts = [sum(label != IGNORED for label in labels) for _, labels in sides]
        assert (row["supervised"], row["chosen_supervised"]) == (sum(counts), counts[0])
    proof = json.loads((data / "mask.json").read_text())
    assert proof["rows_with_two_prompts"] == proof["rows_with_wrong_counts"] == 0
    assert proof["roles"]["assistant"]["supervised_turns"] == 2 * len(PAIRS)
    assert proof["supervised_tokens"] == sum(row["supervised"] for row in rows)
    page = (data / "mask.html").read_text()
    assert "chosen:" in page and "rejected:" in page


def test_labelled_rows_have_label_and_prompt(folder: Folder) -> None:
    data = of_kind(folder, "labelled", LABELLED, split={"validation": 4, "test": 4})
    prompts: dict[int, set[tuple[tuple[int, ...], str]]] = defaultdict(set)
    for split in SPLITS:
        for row in open_split(data, split):
            prompts[row["prompt_hash"]].add((tuple(row["input_ids"][: row["prompt"]]), split))
            assert row["labels"][row["prompt"] - 1] == IGNORED != row["labels"][row["prompt"]]
    assert len(prompts) == len(PAIRS)
    assert all(len(each) == 1 for each in prompts.values())  # one prompt, in one split
    held_out = {(row["expected"], row["desirable"]) for row in open_split(data, "test")}
    assert held_out <= {(row["completion"], int(bool(row["label"]))) for row in LABELLED}


@pytest.mark.parametrize(("label", "word"), [(True, "desirable"), (False, "undesirable"), (None, "")])
def test_labels_of_one_kind_are_a_warning(
    folder: Folder, caplog: pytest.LogCaptureFixture, label: bool | None, word: str
) -> None:
    """A label may be a column of another meaning. The number of each kind is in stats.json."""
    rows = [row | ({} if label is None else {"label": label}) for row in LABELLED]
    data = of_kind(folder, "labelled", rows, split={"validation": 0, "test": 0})
    train = open_split(data, "train")
    stats = json.loads((data / "stats.json").read_text())
    assert stats["train_desirable_rows"] == sum(row["desirable"] for row in train)
    assert (f"the answers of all training rows are {word}, and kto learns from both" in caplog.text) == bool(word)


def test_labelled_rows_to_compare_have_several_prompts(folder: Folder) -> None:
    with pytest.raises(UserError, match="all 2 validation rows have the same prompt.*raise split.validation"):
        of_kind(folder, "labelled", LABELLED, split={"validation": 1, "test": 4})
    one = [row | {"prompt": "What is 1?", "completion": str(number)} for number, row in enumerate(LABELLED)]
    with pytest.raises(UserError, match=f"all {len(one)} train rows have the same prompt.*add rows with other prompts"):
        of_kind(folder, "labelled", one, split={"validation": 0, "test": 0})
    of_kind(folder, "labelled", LABELLED, split={"validation": 0, "test": 1})
    of_kind(folder, "pairs", PAIRS, split={"validation": 1, "test": 1})


def test_only_prompts_are_cut_and_alike(folder: Folder) -> None:
    whole = open_split(of_kind(folder, "pairs", PAIRS, split={"validation": 0, "test": 0}), "train")[:]
    longest = max(max(map(len, whole[name])) for name in ("input_ids", "rejected_input_ids"))
    with pytest.raises(UserError, match=r"rows\.json:\d+: has \d+ tokens, max_length is .* truncate_left, which"):
        of_kind(folder, "pairs", max_length=longest - 3, split={"validation": 0, "test": 0})
    data = of_kind(
        folder, "pairs", max_length=longest - 3, too_long="truncate_left", split={"validation": 0, "test": 0}
    )
    cut = open_split(data, "train")[:]
    assert json.loads((data / "stats.json").read_text())["truncated_rows"] > 0
    for number in range(len(PAIRS)):
        removed = {
            len(whole[f"{side}input_ids"][number]) - len(cut[f"{side}input_ids"][number]) for side in ("", "rejected_")
        }
        assert len(removed) == 1
        for side in ("", "rejected_"):
            before, after = (
                [part[f"{side}{name}"][number] for name in ("input_ids", "labels")] for part in (whole, cut)
            )
            assert len(after[0]) <= longest - 3
            assert [label for label in after[1] if label != IGNORED] == [x for x in before[1] if x != IGNORED]
            assert after[0][-10:] == before[0][-10:]


@pytest.mark.parametrize("policy", ["drop", "truncate_left"])
def test_long_answer_drops_the_row(folder: Folder, policy: str) -> None:
    rows = [*PAIRS, {"prompt": "Why?", "chosen": "Because.", "rejected": "It is so. " * 30}]
    data = of_kind(folder, "pairs", rows, too_long=policy)
    (dropped,) = [json.loads(line) for line in (data / "dropped.jsonl").read_text().splitlines()]
    assert dropped["kind"] == "too_long" and dropped["row"]["prompt"] == "Why?"
    assert policy == "drop" or "an answer is never cut" in dropped["reason"]


def test_answer_and_prompt_have_limits_of_their_own(folder: Folder) -> None:
    options: dict[str, Any] = {"too_long": "truncate_left", "split": {"validation": 0, "test": 0}}
    cut = open_split(of_kind(folder, "pairs", PAIRS, **options, max_prompt_length=12), "train")
    for row in cut:
        assert [label != IGNORED for label in row["labels"]].index(True) <= 12
    data = of_kind(folder, "pairs", **options, max_answer_length=20)
    reasons = [json.loads(line)["reason"] for line in (data / "dropped.jsonl").read_text().splitlines()]
    assert reasons and all("max_answer_length is 20" in reason for reason in reasons)


@pytest.mark.parametrize("policy", ["fail", "drop", "truncate_left"])
def test_a_limit_that_leaves_only_bos_is_named(policy: str) -> None:
    """Of the prompt, or of all; not the answer, which fits."""
    row = [1, *range(5, 15), 7, 2]
    roles = np.array([CONTEXT] * 11 + [0, 0], np.int8)
    tokens = Tokens(Ragged.of([row]), roles, np.array([11]), ["assistant"], {})
    for longest, limit, said in (
        (100, 1, "has 11 tokens in its prompt, max_prompt_length is 1, which leaves nothing but BOS; use 2 or more"),
        (3, None, "has 2 tokens in its answer, max_length is 3 with a token of the prompt; an answer is never"),
        (1, None, "has 2 tokens in its answer, max_length is 1; an answer is never"),
    ):
        fitting = fitted_answers([tokens], prompts_of([tokens]), longest, policy, 1, Limits(limit, None))
        assert fitting.too_long[0].startswith(said) and len(fitting.row) == 0
    fitting = fitted_answers([tokens], prompts_of([tokens]), 4, "truncate_left", 1, Limits(2, None))
    assert fitting.sequences[0].ids[0].tolist() == [1, 14, 7, 2] and fitting.shortened == 1


def test_equal_and_contradictory_rows_are_named(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    first = PAIRS[0]
    swapped = {**first, "chosen": first["rejected"], "rejected": first["chosen"]}
    data = of_kind(folder, "pairs", [*PAIRS, swapped, first], split={"validation": 0, "test": 0})
    stats = json.loads((data / "stats.json").read_text())
    assert (stats["contradictory_rows"], stats["duplicate_rows"]) == (3, 1)
    said = "3 rows contradict another one, which has the same answers the other way round; the first asks"
    assert f"{said} '{first['prompt']}'" in caplog.text
    labelled = [*LABELLED, {**LABELLED[0], "label": not LABELLED[0]["label"]}]
    data = of_kind(folder, "labelled", labelled, split={"validation": 0, "test": 0})
    assert json.loads((data / "stats.json").read_text())["contradictory_rows"] == 2


@pytest.mark.parametrize(
    ("rows", "kind", "said"),
    [(PAIRS, "texts", "train.objective: dpo"), (LABELLED, "texts", "where: {label: ["), (LABELLED, "pairs", "")],
)
def test_rows_of_another_kind_are_refused(folder: Folder, rows: Any, kind: str, said: str) -> None:
    folder.write("rows.json", rows)
    with pytest.raises(UserError) as error:
        of_kind(folder, kind)
    lines = str(error.value).splitlines()
    assert all(said in line for line in lines[:5]), lines


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=12, max_size=40),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 9),
)
@hypothesis_settings(max_examples=200, deadline=None)
def test_a_prompt_is_in_one_split(rows: list[tuple[int, int]], validation: int, test: int, seed: int) -> None:
    prompts, answers = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    index = Index(
        np.zeros(len(rows), np.int16),
        prompts * np.uint64(100) + answers,
        prompts,
        prompts,
        answers + np.uint64(10**6),
    )
    folder_settings = {"model": "m", "path": "p", "split": {"validation": validation, "test": test}, "seed": seed}
    try:
        mixture = mix(index, PrepareSettings.model_validate(folder_settings), [Source()])
    except UserError as error:
        assert "prompts" in str(error) or "no row is left" in str(error)
        return
    parts = [np.flatnonzero(mixture.times), mixture.validation, mixture.test]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    assert len(mixture.validation) >= validation and len(mixture.test) >= test
    of_prompts = [{int(prompts[number]) for number in part} for part in parts]
    assert sum(map(len, of_prompts)) == len(set().union(*of_prompts))


def test_contradiction_is_a_row_of_another() -> None:
    ids = np.array([1, 2, 3], np.uint64)
    assert contradictory(Index(np.zeros(3, np.int16), ids, ids, ids, np.array([9, 3, 2], np.uint64))).tolist() == [1, 2]


def test_proof_sees_a_wrong_prompt_and_wrong_counts(folder: Folder) -> None:
    table = open_table(of_kind(folder, "pairs", PAIRS), "train")
    (batch, *_) = table.combine_chunks().to_batches()
    ids = batch["rejected_input_ids"].to_pylist()
    ids[0][1] += 1
    names = batch.schema.names
    for name, values, rule in (
        ("rejected_input_ids", ids, "rows with two prompts: 1"),
        ("chosen_supervised", [0, *batch["chosen_supervised"].to_pylist()[1:]], "rows with wrong counts: 1"),
    ):
        changed = batch.set_column(names.index(name), name, pyarrow.array(values, batch.schema.field(name).type))
        proof = Proof()
        proof.look(changed)
        with pytest.raises(UserError, match=rule):
            proof.check()


def test_a_pair_is_one_row_of_a_packed_row(folder: Folder) -> None:
    data = of_kind(folder, "pairs", PAIRS)
    rows = open_split(data, "train")
    capacity = 2 * max(rows["length"])
    pack_rows(PackSettings(packing=True, capacity=capacity), data, folder.path / "packed")
    plan = open_plan(folder.path / "packed/train.arrow")
    lengths = np.array(rows["length"])
    assert np.add.reduceat(lengths[plan.members], plan.starts[:-1]).max() <= capacity
    pack_rows(PackSettings(packing=False, capacity=None), data, folder.path / "single")
    stats = json.loads((folder.path / "single/stats.json").read_text())
    sides = [[len(ids) for ids in rows[name]] for name in ("input_ids", "rejected_input_ids")]
    splits = [open_split(data, "validation")]
    both = [2 * max(pair) for pair in zip(*sides, strict=True)]
    both += [2 * max(len(row["input_ids"]), len(row["rejected_input_ids"])) for split in splits for row in split]
    assert stats["longest_packed_row"] == max(both)


def test_prompts_of_pairs_are_statistics() -> None:
    prompt = [*range(FEWEST)]
    sides = [[*prompt, 50, 51], [*prompt, 50], [1, 2, 3], prompt], [[*prompt, 52], [*prompt, 50, 53], [1, 2, 4], [9]]
    columns = dict(zip(("input_ids", "rejected_input_ids"), sides, strict=True))
    tables = [pyarrow.table(columns), pyarrow.table(columns).slice(1)]
    # The last token of the shorter one is never shared.
    assert [shared_prompts(table).tolist() for table in tables] == [[FEWEST, FEWEST, 0, 0], [FEWEST, 0, 0]]


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_predicted_tokens_of_pairs_are_those_computed(folder: Folder, micro_batch: int) -> None:
    """Long prompts of their own: what a micro-batch saves most are those of its pairs."""
    draw = np.random.default_rng(0)
    names = {"prompt": (30, 80), "chosen": (2, 9), "rejected": (2, 30)}
    data = of_kind(
        folder,
        "pairs",
        [
            {name: " ".join(map(str, draw.integers(0, 999, draw.integers(*words)))) for name, words in names.items()}
            for _ in range(40)
        ],
        split={"validation": 0, "test": 0},
        max_length=900,
    )
    pack_rows(PackSettings(packing=True, capacity=2000), data, folder.path / "packed")
    stats = json.loads((folder.path / "packed/stats.json").read_text())
    objective, rows = OBJECTIVES["dpo"], open_split(data, "train")
    for name in objective.numbers:
        rows = rows.add_column(name, np.zeros(len(rows)))
    plan = open_plan(folder.path / "packed/train.arrow")
    packed = [packed_row(rows, plan, number, objective) for number in range(stats["train_packed_rows"])]
    batches = [packed[at : at + micro_batch] for at in range(0, len(packed), micro_batch)]
    computed = [collate(each, True, torch.device("cpu"), prefixes=True)["input_ids"].numel() for each in batches]
    assert sum(computed) == stats["train_tokens"] - stats["train_shared_prompts"] < 0.8 * stats["train_tokens"]
    model = read_model_spec(ROOT / "config/recipes/models/smollm2-135m.json")
    spec = TrainingSpec("ddp", LoraMethod(), 1, 1, micro_batch, 1, 2000, False, "flash", "bf16", objective=objective)
    masked = replace(spec, attention="sdpa")
    for each, tokens in ((spec, sum(computed)), (masked, stats["train_tokens"])):
        work = step_work(model, each, row_statistics(stats))
        # Rows have a whole mean length.
        assert work.computed / micro_batch * len(packed) == pytest.approx(tokens, abs=len(packed))


def test_only_pairs_have_statistics_of_their_prompts(folder: Folder) -> None:
    for kind, rows in (("pairs", PAIRS), ("labelled", LABELLED)):
        pack_rows(PackSettings(packing=False, capacity=None), of_kind(folder, kind, rows), folder.path / kind)
        stats = json.loads((folder.path / kind / "stats.json").read_text())
        assert ("train_shared_prompts" in stats) == (kind == "pairs")
