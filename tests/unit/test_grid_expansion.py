"""Grids: each combination once, under a name of its own that stays, and one clear line for each mistake."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY_CONFIG, served
from hypothesis import given
from hypothesis import strategies as st

from zerolora.config.expanded import EXPANDED, expanded
from zerolora.config.file import load
from zerolora.config.grids import combinations, mistakes
from zerolora.config.resolve import resolve
from zerolora.errors import UserError

SWEEP = {
    "dataset": "rows",
    "train": {"epochs": 2, "lora": {"alpha": 8.0}},
    "over": {"train.lora.r": [8, 2], "render.strategy": ["zero1", "zero0"]},
}


def config_with(folder: Path, grids: dict[str, Any], **more: Any) -> Path:
    path = folder / "config.yaml"
    config = {**copy.deepcopy(TINY_CONFIG), "grids": grids, **more}
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def test_each_combination_is_a_run_with_what_the_grid_says(tmp_path: Path) -> None:
    config = load(config_with(tmp_path, {"sweep": SWEEP}))
    runs = resolve(config).runs
    pairs = list(itertools.product(("zero0", "zero1"), (2, 8)))
    assert sorted(runs) == ["default", *(f"sweep-{strategy}-r{r}" for strategy, r in pairs)]
    for strategy, r in pairs:
        run = runs[f"sweep-{strategy}-r{r}"]
        assert (run.render.strategy, run.train.lora.r) == (strategy, r)
        assert (run.train.epochs, run.train.lora.alpha) == (2, 8.0)
        assert run.dataset == "rows"
    assert runs["default"].train.epochs == 1


def test_it_is_the_same_as_the_run_written_out(tmp_path: Path) -> None:
    written = {"dataset": "rows", "render": {"strategy": "zero1"}}
    written |= {"train": {"epochs": 2, "lora": {"alpha": 8.0, "r": 8}}}
    both = load(config_with(tmp_path, {"sweep": SWEEP}, runs={"own": written}))
    runs = resolve(both).runs
    assert runs["own"] == runs["sweep-zero1-r8"]


@pytest.mark.parametrize(
    ("key", "values", "names"),
    [
        ("train.lora.r", [8, 64], ["r8", "r64"]),
        ("train.learning_rate", [2e-4, 1e-05, 2.0], ["learning_rate0_0002", "learning_rate0_00001", "learning_rate2"]),
        ("train.max_steps", [None, 5], ["max_steps_none", "max_steps5"]),
        ("pack.packing", [True, False], ["packing_true", "packing_false"]),
        ("render.strategy", ["config/deepspeed/Mine.json"], ["config_deepspeed_mine_json"]),
        ("train.schedule_options.lr_end", [-0.5], ["lr_endminus0_5"]),
        ("train.lora.targets", {"qv": ["q_proj", "v_proj"], "all": "all-linear"}, ["qv", "all"]),
    ],
)
def test_a_run_is_named_by_its_values(key: str, values: Any, names: list[str]) -> None:
    assert mistakes({key: values}) == []
    assert [each.name for each in combinations("sweep", {key: values})] == [f"sweep-{name}" for name in names]


def test_keys_that_end_alike_are_told_apart() -> None:
    over = {"train.lora.alpha": [8], "train.other.alpha": [8], "train.seed": [1]}
    (one,) = combinations("sweep", over)
    assert one.name == "sweep-train_lora_alpha8-train_other_alpha8-seed1"


KEYS = ("pack.packing", "render.strategy", "train.learning_rate", "train.lora.alpha", "train.lora.r", "train.schedule")
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("aAbB01-_/. ", max_size=8)
)
GRIDS = st.dictionaries(st.sampled_from(KEYS), st.lists(VALUES, min_size=1, max_size=5), min_size=1, max_size=4)


@given(GRIDS, st.randoms(use_true_random=False), VALUES)
def test_names_are_unique_and_stay(over: dict[str, list[Any]], random: Any, value: Any) -> None:
    """Each combination is there once, whatever the order; a further value changes no name."""
    if mistakes(over):
        return
    found = combinations("sweep", over)
    keys = list(over)
    by_key = [[each.values[key] for key in keys] for each in found]
    wanted = [list(values) for values in itertools.product(*(over[key] for key in keys))]
    assert sorted(map(repr, by_key)) == sorted(map(repr, wanted))
    assert len({each.name for each in found}) == len(found) == math.prod(map(len, over.values()))
    shuffled = {key: random.sample(over[key], len(over[key])) for key in random.sample(keys, len(keys))}
    assert {each.name: each.values for each in combinations("sweep", shuffled)} == {
        each.name: each.values for each in found
    }
    more = {**over, keys[0]: [*over[keys[0]], value]}
    if not mistakes(more):
        assert {each.name for each in found} < {each.name for each in combinations("sweep", more)}


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"over": {}}, "grids.sweep.over: {} is not valid; write at least one entry"),
        ({"over": {"train.lora.r": []}}, "grids.sweep.over.train.lora.r: [] is not valid; write at least one entry"),
        ({"over": {"train.lora.r": 8}}, "grids.sweep.over.train.lora.r: 8 is not valid; write a list"),
        ({"over": {"train.lora.rr": [8]}}, "train.lora.rr: train.lora has no key 'rr'; write one of r, alpha"),
        ({"over": {"lora.r": [8]}}, "over.lora.r: there is no such key; write one that begins with hardware"),
        ({"over": {"train.epochs.most": [8]}}, "train.epochs.most: there is no such key; write train.epochs,"),
        ({"over": {"evaluate.rows": [8]}}, "evaluate.rows: evaluate is shared by all runs and cannot be overridden"),
        ({"over": {"train": {"short": {"epochs": 1}}}}, "over.train: is a whole section; write a key of it"),
        ({"over": {"train.lora.r": [8, 8.0]}}, "over.train.lora.r: 8.0 is there twice; write it once"),
        ({"over": {"train.lora.r": ["A", "a"]}}, "over.train.lora.r: 'A' and 'a' are both called a"),
        ({"over": {"train.lora.targets": [["q_proj"]]}}, "['q_proj'] gives no short name to a run; write a mapping"),
        ({"over": {"train.epochs": [1, 2]}}, "over.train.epochs: the grid says train.epochs: 2 for all its runs too"),
        (
            {
                "over": {"train.optimizer": ["lion"], "train.lora": {"small": {"r": 2}}, "train.lora.r": [8]},
                "train": {},
            },
            "over.train.lora.r: is part of train.lora, which has values of its own; write one of the two",
        ),
        ({"over": {"train.seed": [*range(101)], "train.lora.r": [*range(1, 101)]}}, "over: 10,100 runs; write values"),
        ({"over": {"train.learning_rate": [1e-200]}}, "write at most 100 characters"),
        ({"over": {"train.lora.r": [0, 1, 2]}}, "over.train.lora.r: 0 is not valid; write 1 or more"),
        ({"dataset": "none"}, "grids.sweep.dataset: 'none' is not a data set of prepare; write one of rows"),
        ({"train": {"epochs": 0}}, "grids.sweep.train.epochs: 0 is not valid; write 1 or more"),
        ({"train": {"sedd": 0}}, "grids.sweep.train.sedd: there is no such key"),
        ({"prepare": {}}, "grids.sweep.prepare: prepare is shared by all runs"),
        (
            {"train": {"from_adapter": "results/none/adapter"}},
            "grids.sweep.train.from_adapter: 'results/none/adapter' is no run's adapter",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, edits: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        load(config_with(tmp_path, {"sweep": {**copy.deepcopy(SWEEP), **edits}}))
    (line,) = str(raised.value).splitlines()
    assert said in line
    assert line.startswith(f"{tmp_path}/config.yaml:") and line.split(":")[1].isdigit()


@pytest.mark.parametrize(
    "others",
    [
        {"runs": {"default": {"dataset": "rows"}, "sweep-zero0-r2": {"dataset": "rows"}}},
        {"grids": {"sweep": SWEEP, "sweep-zero0": {"dataset": "rows", "over": {"train.lora.r": [2]}}}},
    ],
)
def test_a_name_is_of_one_run(tmp_path: Path, others: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"has a run sweep-zero0-r2, and so has another section, grid or search; choose"
    ):
        load(config_with(tmp_path, **{"grids": {"sweep": SWEEP}, **others}))


def test_a_grid_alone_is_enough_and_no_run_is_not(tmp_path: Path) -> None:
    assert len(load(config_with(tmp_path, {"sweep": SWEEP}, runs={})).all_runs) == 4
    with pytest.raises(UserError, match=r"runs: there is no run; write one here"):
        load(config_with(tmp_path, {}, runs={}))


def test_dvc_gets_what_its_stages_read(tmp_path: Path) -> None:
    start = {"from_adapter": "results/default/adapter"}
    again = {"dataset": "rows", "train": start, "over": {"train.seed": [1]}}
    text = expanded(load(config_with(tmp_path, {"sweep": SWEEP, "again": again})))
    assert yaml.safe_load(text) == {
        "runs": {f"sweep-{strategy}-r{r}": {"dataset": "rows"} for strategy in ("zero0", "zero1") for r in (2, 8)},
        "continued": {"again-seed1": {"dataset": "rows", "train": {"from_adapter": "results/default/adapter"}}},
    }
    assert expanded(load(config_with(tmp_path, {"again": again, "sweep": SWEEP}))) == text


def test_the_shipped_file_is_that_of_the_shipped_config() -> None:
    assert (ROOT / EXPANDED).read_text(encoding="utf-8") == expanded(load(ROOT / "config/config.yaml"))


def test_the_command_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    config = config_with(tmp_path / "config", {"sweep": SWEEP})
    assert (
        served("zerolora", "expand", directory=tmp_path).stdout
        == f"{EXPANDED}: 4 runs of grids and searches, written\n"
    )
    assert (tmp_path / EXPANDED).read_text(encoding="utf-8") == expanded(load(config))
    again = served("zerolora", "expand", directory=tmp_path).stdout
    assert again == f"{EXPANDED}: 4 runs of grids and searches, as before\n"
