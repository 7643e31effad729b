"""Comparison of settings: new keys, changed defaults and explicitly written values."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from conftest import ROOT
from pydantic import BaseModel
from training_plan import training_plan, zero_json

from zerolora.config import compared as module
from zerolora.config.compared import FILE, compared, filled, neutral_values
from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import EvaluateSettings, Resolved, TrainSettings
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.evaluate.kept import key_of
from zerolora.files import MANIFEST, write_json
from zerolora.train.launch import canary


class Inner(BaseModel):
    kind: Literal["inner"] = "inner"
    r: int = 8
    rates: dict[str, float] = {}


class Outer(BaseModel):
    name: str
    alpha: float = 16.0
    inner: Inner = Inner()
    odd: Inner = Inner(r=4)
    other: Inner | None = None
    parts: list[Inner] = []
    named: dict[str, Inner] = {}


@pytest.fixture
def neutral(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    values: dict[str, Any] = {}
    monkeypatch.setattr(module, "_neutral", lambda: values)
    module._keys.cache_clear()
    return values


PLAIN = {"name": "a", "inner": {"kind": "inner"}, "odd": {"kind": "inner", "r": 4}}


def test_keys_at_their_default_are_omitted(neutral: dict[str, Any]) -> None:
    assert compared(Outer(name="a")) == PLAIN
    assert compared(Outer(name="a", alpha=2.0))["alpha"] == 2.0
    assert compared(Outer(name="a", odd=Inner()))["odd"] == {"kind": "inner"}
    assert compared(Outer(name="a", other=Inner()))["other"] == {"kind": "inner"}
    parts = compared(Outer(name="a", parts=[Inner(r=2), Inner()]))["parts"]
    assert parts == [{"kind": "inner", "r": 2}, {"kind": "inner"}]


WRITTEN = [
    Outer(name="a"),
    Outer(name="a", alpha=2.0, other=Inner(r=1), parts=[Inner(r=2)], named={"b": Inner(rates={"c": 1.0})}),
    Outer(name="a", odd=Inner(), inner=Inner(r=4)),
]


@pytest.mark.parametrize("settings", WRITTEN)
def test_omitted_keys_validate_to_the_same_settings(neutral: dict[str, Any], settings: Outer) -> None:
    assert Outer.model_validate(json.loads(json.dumps(compared(settings)))) == settings


def test_changed_default_is_compared(neutral: dict[str, Any]) -> None:
    """The neutral value stays that of the new key, 4, in every use of a section."""
    neutral["Inner"] = {"r": 4}
    module._keys.cache_clear()
    actual = compared(Outer(name="a", parts=[Inner()]))
    assert actual["inner"] == {"kind": "inner", "r": 8} and actual["parts"] == [{"kind": "inner", "r": 8}]
    assert actual["odd"] == {"kind": "inner", "r": 4}
    assert "alpha" not in actual


@pytest.mark.parametrize("settings", WRITTEN)
def test_omitted_keys_are_filled_in(neutral: dict[str, Any], settings: Outer) -> None:
    """For keys written by this version and by versions that omitted nothing."""
    whole = settings.model_dump(mode="json")
    assert filled(Outer, compared(settings)) == filled(Outer, whole) == whole
    assert filled(Outer, {"name": "a", "old": [1]}) == {**Outer(name="a").model_dump(mode="json"), "old": [1]}


@pytest.mark.parametrize("settings", WRITTEN)
def test_neutral_value_is_filled_in_instead_of_a_new_default(neutral: dict[str, Any], settings: Outer) -> None:
    before = compared(settings)
    neutral["Outer"], neutral["Inner"] = {"alpha": 8.0}, {"r": 8}
    module._keys.cache_clear()
    assert filled(Outer, {key: value for key, value in before.items() if key != "alpha"})["alpha"] == 8.0
    assert filled(Outer, compared(settings)) == settings.model_dump(mode="json")


@pytest.mark.parametrize("value", [None, 5, "x", [], [1], {"a": 1}])
def test_invalid_sections_are_not_changed(neutral: dict[str, Any], value: Any) -> None:
    for key in ("inner", "other", "parts", "named"):
        actual = filled(Outer, {key: value})[key]
        assert actual == value or (value == {"a": 1} and key in ("inner", "other") and actual["a"] == 1)


def test_default_config_round_trips() -> None:
    resolved = resolve(load(ROOT / "config/config.yaml"))
    assert Resolved.model_validate(json.loads(json.dumps(compared(resolved)))) == resolved


def test_every_key_has_a_neutral_value() -> None:
    module._keys.cache_clear()
    assert json.loads(FILE.read_text(encoding="utf-8")) == neutral_values(), "run `make schema`"


class NewerEvaluation(EvaluateSettings):
    spare: bool = False


class NewerTraining(TrainSettings):
    spare: bool = False


def test_new_key_at_its_default_reuses_answers_and_canaries(tmp_path: Path) -> None:
    write_json(tmp_path / MANIFEST, {"files": {}})
    model = EvaluatedModel(tmp_path)
    paths = {"data": tmp_path, "packing": tmp_path, "weights": tmp_path / MANIFEST}

    def answers(settings: EvaluateSettings) -> str:
        return key_of(settings, tmp_path, model, "transformers")

    def first_steps(settings: TrainSettings) -> str:
        return canary._key(settings, zero_json(training_plan(), stage=0), paths)

    evaluation: dict[str, Any] = {"check": "sum"}
    known = answers(EvaluateSettings(**evaluation))
    assert answers(NewerEvaluation(**evaluation)) == answers(EvaluateSettings(**evaluation, batch=3)) == known
    assert answers(NewerEvaluation(**evaluation, spare=True)) != known
    assert answers(EvaluateSettings(check="exact")) != known
    trained = first_steps(TrainSettings(device="cpu"))
    for same in (NewerTraining(device="cpu"), TrainSettings(device="cpu", resume="never")):
        assert first_steps(same) == trained
    assert first_steps(NewerTraining(device="cpu", spare=True)) != trained
