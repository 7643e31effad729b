"""The config of selections, data sets that read them, references and rounds: what is written out, and faults."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY_CONFIG

from zerolora.config.file import check_files, load
from zerolora.config.resolve import resolve
from zerolora.config.round_entries import entries_of
from zerolora.config.schema import Config
from zerolora.config.selection_checks import all_of
from zerolora.errors import UserError

SAMPLED: dict[str, Any] = {
    "samples": {"s": {"of": {"run": "default"}}},
    "selections": {"x": {"samples": "s"}},
    "runs": {"default": {"dataset": "rows"}, "two": {"dataset": "more"}},
}


@pytest.fixture(name="folder", autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.json").write_text("[]")
    return tmp_path


def loaded(**sections: Any) -> Config:
    """Return the tiny config with further or other sections; `prepare` gets further entries."""
    values = json.loads(json.dumps(TINY_CONFIG)) | {key: each for key, each in sections.items() if key != "prepare"}
    for name, entry in sections.get("prepare", {}).items():
        values["prepare"][name] = {**values["prepare"].get(name, {}), **entry}
    Path("config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    config = load(Path("config.yaml"))
    resolve(config)
    check_files(Path("config.yaml"), config)
    return config


def test_rounds_are_written_out() -> None:
    own: dict[str, Any] = {
        "of": "default",
        "rounds": 2,
        "samples": {"n": 8},
        "selections": {"keep": "pairs"},
        "repeats": 2,
    }
    own["train"] = {"objective": "dpo", "dpo": {"reference": "default"}}
    run = {"dataset": "rows", "train": {"lora": {"r": 2}}}
    config = loaded(rounds={"own": own}, runs={"default": run})
    assert list(config.all_runs) == ["default", *(f"own-round{n}{seed}" for seed in ("", "-seed43") for n in (1, 2))]
    assert {name: each.of.run for name, each in config.samples.items()} == {
        "own-round1": "default",
        "own-round2": "own-round1",
    }
    assert [each.n for each in config.samples.values()] == [8, 8]
    second = config.prepare["own-round2"]
    assert (second.selections, second.held_out, second.path) == (["own-round2"], "rows", None)
    assert (second.seed, second.max_length, second.check) == (1, 128, "sum")  # as in the data set of the run
    train = config.continued["own-round2"].train
    assert train == {"lora": {"r": 2}, **own["train"], "from_adapter": "results/own-round1/adapter"}
    references = [resolve(config).runs[name].reference for name in ("own-round1", "own-round2")]
    assert [each and each.from_adapter for each in references] == ["results/default/adapter"] * 2
    assert all_of(config, "own-round1") == {
        "runs": {"default", "own-round1"},
        "prepare": {"rows", "own-round1"},
        "selections": {"own-round1"},
        "samples": {"own-round1"},
        "tasks": set(),
        "harness": set(),
    }
    more = {"model": "tiny", "path": "rows.json", "split": {"validation": 0, "test": 2}}
    tasks = {"rows": {"sums": {"path": "rows.json"}}, "harness": {"gsm": {"tasks": ["gsm8k"]}}}
    compared = loaded(rounds={"own": own}, runs={"default": run}, prepare={"more": more}, tasks=tasks)
    found = all_of(compared, "own-round1")
    assert (found["prepare"], found["tasks"], found["harness"]) == ({"rows", "more", "own-round1"}, {"sums"}, {"gsm"})
    selection = resolve(compared).selections["own-round1"]
    assert (selection.held_out, selection.not_asked) == (
        ["data-more", "data-rows", "task-gsm", "task-sums"],
        "data-rows",
    )


def _rounds(**own: Any) -> dict[str, Any]:
    return {"rounds": {"own": {"of": "default", "rounds": 1, **own}}}


@pytest.mark.parametrize("rounds", [True, 0, 200_000])
def test_invalid_rounds_are_not_written_out(rounds: Any) -> None:
    config = {"runs": {"default": {"dataset": "rows"}}, "prepare": {"rows": {"path": "rows.json"}}}
    assert entries_of("own", {"of": "default", "rounds": rounds}, config) == []
    assert len(entries_of("own", {"of": "default", "rounds": 2}, config)) == 8


def _more(**entry: Any) -> dict[str, Any]:
    return {**SAMPLED, "prepare": {"more": {"model": "tiny", **entry}}}


NONE = {"validation": 0, "test": 0}


def _reference(name: str) -> dict[str, Any]:
    train = {"objective": "dpo", "dpo": {"reference": name}}
    entry = {"path": "rows.json", "split": {"validation": 2, "test": 2}}
    runs = {"default": {"dataset": "rows"}, "two": {"dataset": "more", "train": train}}
    return {"prepare": {"more": {"model": "tiny", **entry}}, "runs": runs}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown first run": (
        _rounds(of="nope"),
        "rounds.own.of: 'nope' is not in runs or continued; use one",
    ),
    "an adapter of its own": (
        _rounds(train={"from_adapter": "results/other/adapter"}),
        "rounds.own.train.from_adapter: 'results/other/adapter', but a round continues the adapter of the round before",
    ),
    "true rounds": (_rounds(rounds=True), "rounds.own.rounds: True is not valid"),
    "no round": (_rounds(rounds=0), "rounds.own.rounds: 0 is not valid"),
    "a key of samples": (_rounds(rounds=2, samples={"m": 3}), "rounds.own.samples.m: there is no such key"),
    "a value of selections": (_rounds(rounds=2, selections={"keep": "good"}), "rounds.own.selections.keep: 'good'"),
    "pairs for sft": (_rounds(selections={"keep": "pairs"}), "have objective sft; use keep: right or best or all"),
    "best of right ones": (_rounds(selections={"keep": "best"}), "keep: best, but right answers are equally good"),
    "a score of another check": (
        _rounds(selections={"check": "f1", "score": "rougeL", "keep": "best"}),
        "'rougeL' is no score of f1, which has f1",
    ),
    "settings without a check": (_rounds(selections={"check_settings": {"a": 1}}), "is for a check of this section"),
    "a margin of texts": (_rounds(selections={"margin": 1.0}), "margin: 1 with keep: right, which makes no pairs"),
    "a judge without an address": (
        _rounds(selections={"check": "judge", "least": 8.0}),
        "judge.endpoint or",
    ),
    "a judge without a limit": (_rounds(selections={"check": "judge"}), "needs the rating, from 1 to 10"),
    "rows of themselves": (
        {**SAMPLED, "runs": {"default": {"dataset": "rows"}}, "prepare": {"rows": {"selections": ["x"]}}},
        "is made with itself: prepare.rows of selections.x of samples.s of prepare.rows",
    ),
    "an unknown selection": (_more(selections=["y"], held_out="rows"), "'y' is not in selections; use one of x"),
    "neither path nor selections": (_more(held_out="rows"), "prepare.more.path: is missing; add it, or selections"),
    "no split": (_more(path="rows.json"), "prepare.more.split: is missing; add it, or held_out"),
    "held-out rows of its own": (
        _more(selections=["x"], split={"validation": 0, "test": 2}),
        "split.test: 2, but a data set with selections holds out no rows itself",
    ),
    "held-out rows of a source beside selections": (
        _more(path="rows.json", selections=["x"], split=NONE, sources={"a.json": {"split": "test"}, "b.json": {}}),
        "sources.a.json.split: test, but a data set with selections holds out no rows itself",
    ),
    "held-out rows that a selection may have made": (
        _more(path="results/selections/x/rows.jsonl", split={"validation": 0, "test": 2}),
        "prepare.more.path: results/selections/x/rows.jsonl, but selections are compared with its rows",
    ),
    "two kinds of held-out rows": (
        _more(selections=["x"], held_out="rows", split={"validation": 0, "test": 2}),
        "split.test: 2, but the held-out rows are those of rows",
    ),
    "columns of a selection": (
        _more(selections=["x"], held_out="rows", sources={"x": {"columns": {"prompt": "a"}}}),
        "sources.x.columns: has no effect on selected rows",
    ),
    "a source without a path": (
        _more(selections=["x"], held_out="rows", sources={"z": {}}),
        "is not in selections",
    ),
    "held-out rows of itself": (_more(path="rows.json", held_out="more"), "more is this data set itself"),
    "an unknown reference": (_reference("nope"), "train.dpo.reference: 'nope': there is no such directory"),
    "a reference that is no run": (_reference("results/x/adapter"), "is not a run's adapter; use start, or one of"),
    "itself as the reference": (_reference("two"), "two would compare with itself"),
    "a reference that is not fetched": (_reference("resources/adapters/z"), "is not fetched; add z to fetch.adapter"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_one_line_each(name: str) -> None:
    sections, said = FAULTS[name]
    with pytest.raises(UserError) as caught:
        loaded(**sections)
    lines = [line for line in str(caught.value).splitlines() if said in line]
    assert len(lines) == 1, str(caught.value)


def test_valid_neighbours_of_the_faults() -> None:
    loaded(**_more(selections=["x"], held_out="rows", sources={"x": {"rows": 3}}))
    loaded(**_reference("default"))
    loaded(**_rounds(selections={"check": "f1", "score": "f1", "keep": "best"}))
