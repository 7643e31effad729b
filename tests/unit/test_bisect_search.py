"""The search of `zerolora bisect` over simulated outcomes, the rows of its files, and the settings of its run."""

import contextlib
import io
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from conftest import TINY_CONFIG, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.parquet import write_table

from zerolora.bisect import run_values
from zerolora.bisect.delta import Atom, State, causes, price, union
from zerolora.bisect.noise import MISTAKES, Noise
from zerolora.bisect.row_changes import RowChange, difference
from zerolora.bisect.row_changes import atoms as atoms_of_rows
from zerolora.config.file import load
from zerolora.config.resolve import stages_of
from zerolora.data.readers import chunks


def singles(count: int) -> list[Atom]:
    return [Atom(f"atom {number}", frozenset({number})) for number in range(count)]


class Outcomes:
    """States that are bad if they have all changes of one of some sets; one without what a change needs cannot run."""

    def __init__(self, everything: State, bad: list[set[int]], needs: dict[int, int] | None = None) -> None:
        self.everything, self.bad, self.needs = everything, bad, needs or {}
        self.tried: set[State] = set()

    def __call__(self, state: State) -> bool:
        if not state or state == self.everything:  # both are known
            return bool(state)
        self.tried.add(state)
        if any(change in state and needed not in state for change, needed in self.needs.items()):
            return False
        return any(cause <= state for cause in self.bad)


@given(st.data())
def test_single_cause_is_found_in_logarithmic_time(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 300))
    cause = data.draw(st.integers(0, count - 1))
    atoms = singles(count)
    outcomes = Outcomes(union(atoms), [{cause}])
    assert [each.changes for each in causes(atoms, outcomes)] == [{cause}]
    assert len(outcomes.tried) <= price(atoms).single == 2 * math.ceil(math.log2(count)) + 1


@given(st.data())
def test_causes_are_minimal_and_no_bad_state_is_left(data: st.DataObject) -> None:
    """Interactions, several causes that are each enough, and changes that cannot be applied without others."""
    count = data.draw(st.integers(1, 10))
    numbers = st.integers(0, count - 1)
    bad = data.draw(st.lists(st.sets(numbers, min_size=1, max_size=3), min_size=1, max_size=3))
    pairs = data.draw(st.dictionaries(numbers, numbers, max_size=3))
    needs = {change: needed for change, needed in pairs.items() if needed < change}
    atoms = singles(count)
    outcomes = Outcomes(union(atoms), bad, needs)
    found = causes(atoms, outcomes)
    for cause in found:
        assert outcomes(cause.changes)
        assert not any(outcomes(cause.changes - {change}) for change in cause.changes if len(cause.changes) > 1)
    rest = union(atoms).difference(*(cause.changes for cause in found))
    assert not outcomes(rest)
    if not needs:
        assert all(set(cause.changes) in bad for cause in found)


def test_interaction_of_two_is_found_as_one_cause() -> None:
    atoms = singles(64)
    outcomes = Outcomes(union(atoms), [{5, 40}])
    (cause,) = causes(atoms, outcomes)
    assert cause.changes == {5, 40} and len(outcomes.tried) <= 8 * math.log2(64)


def rows_of(count: int, wrong: set[int]) -> bytes:
    lines = [f'{{"n": {number}, "a": {-1 if number in wrong else 0}}}\n' for number in range(count)]
    return "".join(lines).encode()


def test_rows_split_to_one_but_not_below_a_loss_that_is_spread() -> None:
    split = difference("rows.jsonl", rows_of(1000, set()), rows_of(1000, set(range(0, 1000, 10))))
    assert split is not None
    (changed,) = atoms_of_rows(split)
    atoms = [*singles(7), changed]
    row = next(each for each in changed.changes if isinstance(each, RowChange) and each.row == 371)

    outcomes = Outcomes(union(atoms), [])
    found = causes(atoms, lambda state: outcomes(state) or row in state)
    assert [str(atom.name) for cause in found for atom in cause.atoms] == ["rows.jsonl row 371 changed"]
    assert len(outcomes.tried) <= price(atoms).single == 2 * (3 + 7) + 1

    spread = Outcomes(union(atoms), [])
    found = causes(atoms, lambda state: spread(state) or len(state & changed.changes) > 60)
    assert [cause.atoms for cause in found] == [(changed,)] and len(spread.tried) <= 2 * 3 + 2 + 1


def file_of(kind: str, numbers: list[int]) -> bytes:
    """Return a data file with these rows; in CSV with carriage returns, and a line end and a quote in a cell."""
    rows = [f'{{"n": {number}}}' for number in numbers]
    if kind == "parquet":
        written = io.BytesIO()
        write_table(pyarrow.table({"n": pyarrow.array(numbers, "int64")}), written)
        return written.getvalue()
    if kind == "csv":
        return "".join(f"{row}\r\n" for row in ['n,"a ""cell"""', *(f'{n},"\n"""' for n in numbers)]).encode()
    return ("[" + ", ".join(rows) + "]" if kind == "json" else "".join(f"{each}\n" for each in rows)).encode()


def numbers_in(kind: str, content: bytes) -> list[int]:
    """Return what the project's own readers read of it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"f.{kind}")
        file.write_bytes(content)
        return [int(row["n"]) for chunk in chunks(file) for _, row in chunk.records()]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
@settings(max_examples=25)
@given(data=st.data())
def test_files_of_rows_have_the_chosen_differences(kind: str, data: st.DataObject) -> None:
    row = st.integers(0, 3)
    good, bad = data.draw(st.lists(row, max_size=12)), data.draw(st.lists(row, max_size=12))
    split = difference(f"f.{kind}", file_of(kind, good), file_of(kind, bad))
    if split is None:
        assert good == bad or (kind == "jsonl" and not (good and bad))
        return
    every = split.changes
    assert split.content(frozenset()) == file_of(kind, good)
    assert split.content(frozenset(every)) == file_of(kind, bad)
    some = frozenset(data.draw(st.lists(st.sampled_from(every))))
    expected = [
        number
        for piece in split.pieces
        if (written := piece.bad if piece.change in some else piece.good) is not None
        for number in numbers_in(kind, split.rows.join(split.rows.head, [written]))
    ]
    kinds = [each.kind for each in some]
    assert len(expected) == len(good) + kinds.count("added") - kinds.count("removed")
    assert numbers_in(kind, split.content(some)) == expected
    assert frozenset().union(*(atom.changes for atom in atoms_of_rows(split))) == {*every}


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("csv", b"a,b\n1,2\n", b"b,a\n1,3\n"),  # another header
        ("csv", b'a\n"1\n', b'a\n"2\n'),  # a quote that does not end
        ("parquet", b"PAR1", b"PAR1PAR1"),
        ("json", b"[1, 2", b"[1, 3"),
    ],
)
def test_files_that_are_not_alike_are_not_split(kind: str, good: bytes, bad: bytes) -> None:
    assert difference(f"f.{kind}", good, bad) is None


def searched(random_: random.Random, atoms: list[Atom], cost: dict[int, float], seeds: int) -> list[set[object]] | None:
    """Return the causes of a search whose metric has normal noise; None where nothing can be told."""

    def metric(state: State) -> float:
        return random_.gauss(1 - sum(cost.get(change, 0) for change in state if isinstance(change, int)), 0.01)

    everything = union(atoms)
    good, bad = ([metric(state) for _ in range(seeds)] for state in (frozenset(), everything))
    noise = Noise(good, bad, price(atoms).single)
    if not noise.is_beyond() or noise.loss < 0 or (noise.seeds_needed() or 101) > seeds:
        return None
    known: dict[State, list[float]] = {}

    def is_bad(state: State) -> bool:
        if not state or state == everything:
            return bool(state)
        values = known.setdefault(state, [metric(state) for _ in range(noise.seeds_to_begin(seeds))])
        while (side := noise.side(values)) == "unclear" and len(values) < seeds:
            values.append(metric(state))
        return side == "bad"

    return [set(cause.changes) for cause in causes(atoms, is_bad)]


@pytest.mark.parametrize(("cost", "found"), [(0.0, 0), (0.03, 1), (0.05, 30), (0.1, 250)])
def test_noise_rarely_names_a_wrong_cause(cost: float, found: int) -> None:
    """Of all searches, at most MISTAKES name anything but the cause, which costs some standard deviations of a seed, or
    name one where there is none. A cause below its noise is not searched for."""
    random_, atoms, count = random.Random(0), singles(16), 300  # noqa: S311
    named = [each for _ in range(count) if (each := searched(random_, atoms, {11: cost}, 4)) is not None]
    assert sum(each != [{11}] or not cost for each in named) <= count * MISTAKES and len(named) >= found


@pytest.mark.parametrize(("good", "bad", "side"), [([0.9, 0.9], [0.5, 0.5], "bad"), ([0.5, 0.5], [0.9, 0.9], "good")])
def test_without_noise_the_middle_decides(good: list[float], bad: list[float], side: str) -> None:
    noise = Noise(good, bad, 9)
    assert noise.is_beyond() and noise.side([0.6]) == side and noise.side([0.7]) == "unclear"
    assert not Noise(good, good, 9).is_beyond()


def written(folder: Path, **sections: Any) -> Path:
    """Write a config to a folder, and return the folder."""
    (folder / "config").mkdir()
    (folder / "config/config.yaml").write_text(yaml.safe_dump(TINY_CONFIG | sections))
    return folder


def test_config_of_a_probe_has_the_settings_of_the_run(tmp_path: Path) -> None:
    """With the run's overrides, of a grid too; other runs and the data sets' other keys change nothing."""
    grid = {"dataset": "rows", "train": {"lora": {"alpha": 4.0}}, "over": {"train.lora.r": [8]}}
    runs = {
        "default": {"dataset": "rows", "train": {"learning_rate": 3e-4, "lora": {"r": 2}}},
        "other": {"dataset": "rows"},
    }
    folder = written(tmp_path, runs=runs, grids={"sweep": grid})
    for run in ("default", "sweep-r8"):
        name, values = run_values.read(folder, run, "HEAD")
        with contextlib.chdir(folder):
            settings = stages_of(load(run_values.CONFIG), run)
            Path("probe.yaml").write_text(run_values.nested(values, name, 1))
            of_probe = load(Path("probe.yaml"))
            assert list(of_probe.all_runs) == [run]
            own = stages_of(of_probe, run).model_dump()
        shared = {"packed", "estimated", "rendered", "referenced"}  # names of outputs that a grid's runs share
        expected = settings.model_dump()
        assert {key: own[key] for key in own.keys() - shared} == {key: expected[key] for key in own.keys() - shared}
    assert values["train", "lora", "r"] == 8 and values["train", "lora", "alpha"] == 4.0


def test_run_that_continues_from_an_adapter_of_the_project(tmp_path: Path) -> None:
    """Is a continued run in a probe too, with the adapter as a setting that may differ."""
    later = {"dataset": "rows", "train": {"from_adapter": "first"}}
    folder = written(tmp_path, runs={}, continued={"later": later})
    for name in ("first", "second"):
        (folder / name).mkdir()
    name, values = run_values.read(folder, None, "HEAD")
    other = values | {run_values.START: "second"}
    assert run_values.differing(values, other) == [run_values.START]
    with contextlib.chdir(folder):
        Path("probe.yaml").write_text(
            run_values.nested(run_values.mixed(values, other, frozenset({run_values.START})), name, 2)
        )
        of_probe = load(Path("probe.yaml"))
    assert list(of_probe.continued) == [name] and stages_of(of_probe, name).train.from_adapter == "second"


def test_a_run_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    later = {"dataset": "rows", "train": {"from_adapter": "results/default/adapter"}}
    folder = written(tmp_path, continued={"later": later})
    expected = "HEAD: later continues from results/default/adapter, which a change may alter too; bisect"
    assert expected in refusal(run_values.read, folder, "later", "HEAD")
    assert "config/config.yaml has 2 runs; choose one with --run: default, later" in refusal(
        run_values.read, folder, None, "HEAD"
    )
