"""`zerolora stage`: a stage by hand with what resolve wrote, and with other files, names and settings."""

import inspect
import json
from pathlib import Path

import pytest
from conftest import served

from zerolora.commands.stage_arguments import arguments_of, names_in
from zerolora.commands.stage_command import function_of
from zerolora.config.stages import ALL_STAGES, Stage
from zerolora.errors import UserError
from zerolora.files import write_json

SHARED = {"packed": "sweep", "estimated": "sweep", "rendered": "sweep-r8", "referenced": ""}
RUN = {"dataset": "rows", **SHARED, "train": {"epochs": 2}, "accept": {"fail_if": None}}


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with the settings of one run."""
    monkeypatch.chdir(tmp_path)
    write_json(Path("results/config.json"), {"prepare": {"rows": {"model": "tiny"}}, "compare": {"runs": {}}})
    write_json(Path("results/settings/runs/r8.json"), {"runs": {"r8": RUN}})
    write_json(Path("results/settings/shared/sweep.json"), {"shared": {"sweep": {"pack": {"packing": True}}}})
    write_json(Path("results/settings/manifest.json"), {"files": {"runs/r8.json": {}, "shared/sweep.json": {}}})
    return tmp_path


def arguments(name: str, *given: str, names: str = "", prefix: str = "") -> dict[str, object]:
    stage = ALL_STAGES[name]
    return arguments_of(stage, function_of(stage), given, None, names_in(names), prefix)


@pytest.mark.parametrize("stage", ALL_STAGES.values(), ids=ALL_STAGES)
def test_every_file_of_a_stage_is_a_parameter_of_its_function(stage: Stage) -> None:
    assert stage.files.keys() <= inspect.signature(function_of(stage)).parameters.keys()


def test_names_and_settings_by_hand_are_those_of_resolve(resolved: Path) -> None:
    actual = arguments("train", "r8")
    assert actual["settings"] == {"epochs": 2}
    assert actual["zero"] == Path("results/sweep-r8/zero.json")
    assert actual["weights"] == Path("resources/weights/tiny.json")
    assert "reference" not in actual  # the run has none
    assert arguments("pack", "sweep") == {
        "settings": {"packing": True},
        "data": Path("results/data/rows"),
        "output": Path("results/sweep/packing"),
    }


def test_given_files_names_and_prefix_replace_those(resolved: Path) -> None:
    actual = arguments("train", "r8", "--keep-checkpoints", "5", "--data=other", "--output", "o")
    assert (actual["keep_checkpoints"], actual["data"], actual["output"]) == (5, Path("other"), Path("o"))
    named = arguments("pack", "sweep", names="dataset=more", prefix="tuning/")
    assert named["data"] == Path("tuning/results/data/more") and named["output"] == Path("tuning/results/sweep/packing")


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("pack", ("sweep", "--dat", "x"), "--dat is no option of the stage pack, which has --data, --output"),
        ("pack", ("a", "b"), "zerolora stage pack a b: give PACKED after pack"),
        ("pack", ("sweep", "--data"), "pass --OPTION VALUE for each option"),
        ("pack", (), "--settings is missing; pass it, or `zerolora stage pack PACKED`"),
        ("pack", ("none",), "results/settings/shared/none.json: there is no such file"),
        ("judge", ("r8",), "results/config.json: has no judge; run `zerolora stage resolve`"),
        (
            "train",
            ("r8", "--keep-checkpoints", "0"),
            "--keep-checkpoints '0': Input should be greater than or equal to 1",
        ),
        ("train", ("r9",), "results/settings/runs/r9.json: there is no such file; `zerolora stage resolve` writes it"),
    ],
)
def test_mistake_is_one_line(resolved: Path, name: str, given: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError) as raised:
        arguments(name, *given)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_names_are_pairs() -> None:
    with pytest.raises(UserError, match="--names 'dataset': use NAME=VALUE,…"):
        names_in("dataset")


def test_a_stage_runs_by_hand(resolved: Path) -> None:
    write_json(Path("results/r8/metrics/difference.json"), {"metrics": {}})
    done = served("zerolora", "stage", "accept", "r8", directory=resolved)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("results/r8/accepted.json").read_text())["accepted"]
    unknown = served("zerolora", "stage", "training", "r8", directory=resolved)
    assert unknown.returncode == 2 and "'training' is no stage; use one of resolve, fetch" in unknown.stderr
