"""Grids: each combination once under a unique, stable name, and one line for each mistake."""

import copy
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY_CONFIG, refusal, served
from hypothesis import given
from hypothesis import strategies as st
from test_rerun_matrix import KEYS as RERUN_KEYS
from test_rerun_matrix import TOGETHER

from zerolora.config.file import load
from zerolora.config.grids import SHARED_STAGES, Shared, combinations, mistakes, nested, shared_names
from zerolora.config.resolve import resolve, shared_settings
from zerolora.config.runs_file import DATA_FILES, RUNS, text_of
from zerolora.config.schema import MOST_READ, Config, RunSections
from zerolora.config.section import Section
from zerolora.config.studies import Study, Trial
from zerolora.errors import UserError

HUB = {"repository": "someone/big", "revision": "0" * 40, "license": "MIT"}
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


def test_each_combination_is_a_run_with_the_grids_settings(tmp_path: Path) -> None:
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


def test_combination_equals_the_written_out_run(tmp_path: Path) -> None:
    written = {"dataset": "rows", "render": {"strategy": "zero1"}}
    written |= {"train": {"epochs": 2, "lora": {"alpha": 8.0, "r": 8}}}
    both = load(config_with(tmp_path, {"sweep": SWEEP}, runs={"own": written}))
    runs = resolve(both).runs
    assert runs["own"] == runs["sweep-zero1-r8"].model_copy(update=dict.fromkeys(OF_ALL, "own"))


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
def test_run_is_named_by_its_values(key: str, values: Any, names: list[str]) -> None:
    assert mistakes({key: values}) == []
    assert [each.name for each in combinations("sweep", {key: values})] == [f"sweep-{name}" for name in names]


def test_equal_last_keys_are_distinguished() -> None:
    over = {"train.lora.alpha": [8], "train.other.alpha": [8], "train.seed": [1]}
    (one,) = combinations("sweep", over)
    assert one.name == "sweep-train_lora_alpha8-train_other_alpha8-seed1"


OF_ALL = tuple(name for name in Shared._fields if name not in ("referenced", "taught"))
"""The outputs that every run has."""
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
def test_names_are_unique_and_stable(over: dict[str, list[Any]], random: Any, value: Any) -> None:
    if mistakes(over):
        return
    actual = combinations("sweep", over)
    keys = list(over)
    by_key = [[each.values[key] for key in keys] for each in actual]
    wanted = [list(values) for values in itertools.product(*(over[key] for key in keys))]
    assert sorted(map(repr, by_key)) == sorted(map(repr, wanted))
    assert len({each.name for each in actual}) == len(actual) == math.prod(map(len, over.values()))
    shuffled = {key: random.sample(over[key], len(over[key])) for key in random.sample(keys, len(keys))}
    again = {each.name: each.values for each in combinations("sweep", shuffled)}
    assert again == {each.name: each.values for each in actual}
    more = {**over, keys[0]: [*over[keys[0]], value]}
    if not mistakes(more):
        assert {each.name for each in actual} < {each.name for each in combinations("sweep", more)}


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"over": {}}, "grids.sweep.over: {} is not valid; use at least one entry"),
        ({"over": {"train.lora.r": []}}, "grids.sweep.over.train.lora.r: [] is not valid; use at least one entry"),
        ({"over": {"train.lora.r": 8}}, "grids.sweep.over.train.lora.r: 8 is not valid; use a list"),
        ({"over": {"train.lora.rr": [8]}}, "train.lora.rr: there is no such key; did you mean train.lora.r?"),
        ({"over": {"lora.r": [8]}}, "over.lora.r: there is no such key; use train.lora.r"),
        ({"over": {"train.epochs.most": [8]}}, "train.epochs.most: there is no such key; use train.epochs,"),
        ({"over": {"evaluate.rows": [8]}}, "evaluate.rows: evaluate is shared by all runs and cannot be overridden"),
        ({"over": {"train": {"short": {"epochs": 1}}}}, "over.train: is a whole section; use one of its keys"),
        ({"over": {"train.lora.r": [8, 8.0]}}, "over.train.lora.r: 8.0 occurs twice; list it once"),
        ({"over": {"train.lora.r": ["A", "a"]}}, "over.train.lora.r: 'A' and 'a' are both called a"),
        ({"over": {"train.lora.targets": [["q_proj"]]}}, "['q_proj'] has no short name for a run; use a mapping"),
        ({"over": {"train.epochs": [1, 2]}}, "over.train.epochs: the grid also sets train.epochs: 2 for all its runs"),
        (
            {"over": {"train.lora": {"small": {"r": 2}}, "train.lora.r": [8]}, "train": {}},
            "over.train.lora.r: is part of train.lora, which also has values; keep one of the two",
        ),
        ({"over": {"train.seed": [*range(101)], "train.lora.r": [*range(1, 101)]}}, "over: 10,100 runs; give values"),
        ({"over": {"train.learning_rate": [1e-200]}}, "use at most 100 characters"),
        ({"over": {"train.lora.r": [0, 1, 2]}}, "over.train.lora.r: 0 is not valid; use 1 or more"),
        ({"dataset": None}, "grids.sweep: has no data set; set dataset: NAME, or over: {dataset: [NAME, ...]}"),
        ({"over": {"dataset": ["rows"]}}, "over.dataset: the grid also sets dataset: 'rows' for all its runs;"),
        ({"over": {"dataset": ["none"]}, "dataset": None}, "over.dataset: 'none' is not a data set of prepare;"),
        ({"dataset": "none"}, "grids.sweep.dataset: 'none' is not a data set of prepare; use one of rows"),
        ({"train": {"epochs": 0}}, "grids.sweep.train.epochs: 0 is not valid; use more than 0"),
        ({"train": {"sedd": 0}}, "grids.sweep.train.sedd: there is no such key"),
        ({"prepare": {}}, "grids.sweep.prepare: prepare is shared by all runs"),
        (
            {"train": {"from_adapter": "results/none/adapter"}},
            "grids.sweep.train.from_adapter: 'results/none/adapter' is not a run's adapter",
        ),
    ],
)
def test_mistake_in_a_grid_is_one_line(tmp_path: Path, edits: dict[str, Any], said: str) -> None:
    line = refusal(load, config_with(tmp_path, {"sweep": {**copy.deepcopy(SWEEP), **edits}}))
    assert said in line
    assert line.startswith(f"{tmp_path}/config.yaml:") and line.split(":")[1].isdigit()


@pytest.mark.parametrize(
    "others",
    [
        {"runs": {"default": {"dataset": "rows"}, "sweep-zero0-r2": {"dataset": "rows"}}},
        {"grids": {"sweep": SWEEP, "sweep-zero0": {"dataset": "rows", "over": {"train.lora.r": [2]}}}},
    ],
)
def test_run_names_must_be_unique(tmp_path: Path, others: dict[str, Any]) -> None:
    said = "has a run sweep-zero0-r2, but so has another section, grid or search; choose"
    with pytest.raises(UserError, match=said):
        load(config_with(tmp_path, **{"grids": {"sweep": SWEEP}, **others}))


def test_grid_alone_suffices_and_a_config_without_runs_is_refused(tmp_path: Path) -> None:
    assert len(load(config_with(tmp_path, {"sweep": SWEEP}, runs={})).all_runs) == 4
    with pytest.raises(UserError, match=r"runs: defines no run; add one here"):
        load(config_with(tmp_path, {}, runs={}))


def shared_in(folder: Path, over: dict[str, Any], **more: Any) -> list[tuple[str, ...]]:
    """Return the names of the outputs of each run, without that of a reference, which these runs do not need."""
    config = load(config_with(folder, {"sweep": {"dataset": "rows", "over": over}}, **more))
    runs = resolve(config).runs
    shared_settings(runs)  # asserts that runs sharing a stage have equal settings
    assert {runs[name].referenced for name in config.expanded_runs} == {""}
    return [tuple(getattr(runs[name], kind) for kind in OF_ALL) for name in config.expanded_runs]


@pytest.mark.parametrize(
    ("over", "names"),
    [
        ({"train.seed": [1, 2], "train.learning_rate": [1e-4, 1e-3]}, {("sweep",) * 3}),
        (
            {"train.lora.alpha": [8, 16], "render.strategy": ["zero0", "zero1"]},
            {
                ("sweep", f"sweep-alpha{alpha}", f"sweep-{each}-alpha{alpha}")
                for alpha in (8, 16)
                for each in ("zero0", "zero1")
            },
        ),
        ({"train.epochs": [1, 2]}, {("sweep", "sweep", f"sweep-epochs{number}") for number in (1, 2)}),
        ({"pack.packing": [True, False]}, {(f"sweep-packing_{each}",) * 3 for each in ("true", "false")}),
        ({"merge.version": [True, False], "report.examples": [1, 2]}, {("sweep",) * 3}),
        # A base model that is stored quantized cannot be merged into, which render checks.
        ({"merge.enabled": [True, False]}, {("sweep", "sweep", f"sweep-enabled_{each}") for each in ("true", "false")}),
    ],
)
def test_runs_share_independent_stages(tmp_path: Path, over: dict[str, Any], names: set[tuple[str, str, str]]) -> None:
    assert {*shared_in(tmp_path, over)} == names
    # Another value of a key changes no name.
    first = {key: values[:1] for key, values in over.items()}
    assert {*shared_in(tmp_path, first)} <= names


# Each needs the other one, so neither starts from its default.
BEFORE = {"train.learning_rate_scaling": "none", "train.learning_rate_batch": 4}


@pytest.mark.parametrize("key", [key for key in RERUN_KEYS if key.partition(".")[0] in RunSections.model_fields])
def test_stage_that_reads_a_value_is_not_shared(tmp_path: Path, key: str) -> None:
    value, stages = RERUN_KEYS[key]
    sections: Any = load(config_with(tmp_path, {}))
    for part in key.split("."):
        sections = getattr(sections, part)
    before = sections.model_dump() if isinstance(sections, Section) else sections
    over = {key: {"before": BEFORE.get(key, before), "after": value}}
    fixed = nested(TOGETHER.get(key, {}) | ({key: BEFORE[key]} if key in BEFORE else {}))
    if key == "pack.capacity":
        fixed = {"pack": {"packing": True}}
    one, other = shared_in(tmp_path, over, **fixed)
    # Of keys that are set together, one may be what a stage reads.
    others = {stage for each in TOGETHER.get(key, {}) if key not in BEFORE for stage in RERUN_KEYS[each][1]}
    for stage, mine, theirs in zip(SHARED_STAGES[:3], one, other, strict=True):
        assert mine != theirs or f"{stage}@default" not in {*stages} - others


@pytest.mark.parametrize(
    ("values", "shared"),
    [
        ({"train.learning_rate": 1e-3}, ("tune", "tune", "tune")),
        ({"train.lora.r": 4, "train.epochs": 2}, ("tune", "tune-train_lora_r4", "tune-train_epochs2-train_lora_r4")),
        ({"train.lora.targets": ["q_proj"]}, ("tune", "tune-0", "tune-0")),
        ({"render.strategy": f"config/deepspeed/{'a' * 90}.json"}, ("tune", "tune", "tune-0")),
    ],
)
def test_trials_share_independent_stages(values: dict[str, Any], shared: tuple[str, str, str]) -> None:
    """Independent of the keys that the search is over today, which may change."""
    searched = {"searches": {"tune": {"dataset": "rows", "over": {"train.seed": [1]}}}}
    config = Config.model_validate(TINY_CONFIG | searched).with_studies({"tune": Study(trials=[Trial(values=values)])})
    assert config.shared_by("tune-0") == (*shared, "tune", "tune")


@pytest.mark.parametrize(("name", "owner"), [("default", "the run default"), ("data", "another stage")])
def test_shared_outputs_need_a_free_folder(tmp_path: Path, name: str, owner: str) -> None:
    path = config_with(tmp_path, {name: {"dataset": "rows", "over": {"train.seed": [1, 2]}}})
    said = rf"grids\.{name}: results/{name}/ is for outputs that its runs share, .* to {owner};"
    with pytest.raises(UserError, match=said):
        load(path)


def test_documented_table_of_shared_stages() -> None:
    lines = (ROOT / "docs/grids.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| values of | once for each value | once for all values |") + 2
    rows = [line.split("|")[1:4] for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start:])]
    keys = [(re.findall(r"`([\w.]+)`", row[0]), re.findall(r"`(\w+)`", row[2])) for row in rows]
    assert sum(len(named) for named, _ in keys) > 8
    for named, once in keys:
        for key in named:
            shared = shared_names("sweep", "sweep-1", {key: "1"})
            assert [stage for stage, name in zip(SHARED_STAGES, shared, strict=True) if name == "sweep"] == once, key


def test_data_sets_can_be_values(tmp_path: Path) -> None:
    data = {name: {**TINY_CONFIG["prepare"]["rows"], "seed": seed} for seed, name in enumerate(("rows", "other"))}
    grid = {"over": {"dataset": ["rows", "other"], "train.seed": [1, 2]}}
    config = load(config_with(tmp_path, {"sweep": grid}, prepare=data))
    runs = {name: each for name, each in resolve(config).runs.items() if name in config.expanded_runs}
    assert {name: (each.dataset, *config.shared_by(name)) for name, each in runs.items()} == {
        f"sweep-{name}-seed{seed}": (name, *[f"sweep-{name}"] * 5) for name in ("rows", "other") for seed in (1, 2)
    }


def test_runs_file_for_dvc() -> None:
    start = {"from_adapter": "results/default/adapter"}
    again = {"dataset": "rows", "train": start, "over": {"train.seed": [1]}}
    more = {
        "fetch": {"package": {}, "hub": {"big": HUB}, "directory": {"tiny": {"path": "model", "license": "MIT"}}},
        "tasks": {"rows": {"sums": {"path": "sums.json", "check": "sum"}}, "harness": {"arc": {"tasks": ["arc_easy"]}}},
    }

    def text(grids: dict[str, Any]) -> str:
        return text_of(Config.model_validate({**TINY_CONFIG, **more, "grids": grids}))

    actual = yaml.safe_load(text({"sweep": SWEEP, "again": again}))
    pairs = list(itertools.product(("zero0", "zero1"), (2, 8)))
    adapter, data = "results/default/adapter", "results/data/rows/stats.json"
    none = {"reference": "results/data/rows/mask.json", "referenced": "", "taught": ""}
    rows = {"sums": "results/tasks/sums.jsonl", "arc": "results/settings/tasks/arc.json"}
    common = {"dataset": "rows", "tasks": [f"results/data/rows/{file}" for file in DATA_FILES]}
    nothing = [f"results/settings/nothing/{number}.json" for number in range(1, MOST_READ)]
    runs = ["default", "again-seed1", *(f"sweep-{strategy}-r{r}" for strategy, r in pairs)]
    assert actual == {
        "models": {"big": {"source": "results/settings/fetch/big.json"}, "tiny": {"source": "model"}},
        **{"hub_data": {}, "package_data": {}, "adapters": {}},
        "prepare": {"rows": {"model": "tiny", "reads": ["rows.json", *nothing]}},
        "evaluated": {"rows": {}},
        **{"samples": {}, "held_out": {}, "selections": {}},
        "packed": {name: {"dataset": "rows"} for name in ("again", "default", "sweep")},
        "estimated": {
            **{name: {"packed": name} for name in ("again", "default")},
            **{f"sweep-r{r}": {"packed": "sweep"} for r in (2, 8)},
        },
        "rendered": {
            **{name: {"estimated": name} for name in ("again", "default")},
            **{f"sweep-{strategy}-r{r}": {"estimated": f"sweep-r{r}"} for strategy, r in pairs},
        },
        **{"referenced": {}, "taught": {}, "samples": {}, "held_out": {}, "selections": {}, "evaluated": {"rows": {}}},
        "runs": {
            "again-seed1": {**common, "start": adapter, **dict.fromkeys(OF_ALL, "again"), **none},
            "default": {**common, "start": data, **dict.fromkeys(OF_ALL, "default"), **none},
            **{
                f"sweep-{strategy}-r{r}": {
                    **common,
                    **{"start": data, "packed": "sweep", **none},
                    **{"estimated": f"sweep-r{r}", "rendered": f"sweep-{strategy}-r{r}"},
                }
                for strategy, r in pairs
            },
        },
        "task_rows": {"sums": {"path": "sums.json"}},
        "tasks_of_base": {f"rows-{task}": {"dataset": "rows", "task": task, "rows": rows[task]} for task in rows},
        "tasks_of_runs": {
            f"{run}-{task}": {"run": run, "task": task, "rows": rows[task]} for run in runs for task in rows
        },
    }
    assert text({"sweep": SWEEP, "again": again}) == text({"again": again, "sweep": SWEEP})


def test_number_like_name_is_quoted() -> None:
    """DVC reads YAML 1.2, where an unquoted 1e5 is 100000.0."""
    text = text_of(Config.model_validate({**TINY_CONFIG, "runs": {"1e5": {"dataset": "rows"}}}))
    assert '\n  "1e5": {"dataset": "rows"' in text


def test_committed_runs_file_is_current() -> None:
    assert (ROOT / RUNS).read_text(encoding="utf-8") == text_of(load(ROOT / "config/config.yaml"))


def test_expand_command_writes_the_runs_file(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    config = config_with(tmp_path / "config", {"sweep": SWEEP})
    assert served("zerolora", "expand", directory=tmp_path).stdout == f"{RUNS}: 5 runs, written\n"
    assert (tmp_path / RUNS).read_text(encoding="utf-8") == text_of(load(config))
    assert served("zerolora", "expand", directory=tmp_path).stdout == f"{RUNS}: 5 runs, as before\n"
