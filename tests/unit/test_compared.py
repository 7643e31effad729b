"""Settings as they are compared: what a new key, a changed default and a value that is written out change."""

import json
from typing import Any, Literal

import pytest
from conftest import ROOT
from pydantic import BaseModel

from zerolora.config import compared as module
from zerolora.config.compared import FILE, compared, neutral_values
from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import Resolved


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
    """Return the neutral values that this test changes."""
    values: dict[str, Any] = {}
    monkeypatch.setattr(module, "_neutral", lambda: values)
    module._keys.cache_clear()
    return values


PLAIN = {"name": "a", "inner": {"kind": "inner"}, "odd": {"kind": "inner", "r": 4}}


def test_keys_at_their_default_are_left_out(neutral: dict[str, Any]) -> None:
    assert compared(Outer(name="a")) == PLAIN
    assert compared(Outer(name="a", alpha=2.0))["alpha"] == 2.0
    assert compared(Outer(name="a", odd=Inner()))["odd"] == {"kind": "inner"}
    assert compared(Outer(name="a", other=Inner()))["other"] == {"kind": "inner"}
    assert compared(Outer(name="a", parts=[Inner(r=2), Inner()]))["parts"] == [
        {"kind": "inner", "r": 2},
        {"kind": "inner"},
    ]


@pytest.mark.parametrize(
    "settings",
    [
        Outer(name="a"),
        Outer(name="a", alpha=2.0, other=Inner(r=1), parts=[Inner(r=2)], named={"b": Inner(rates={"c": 1.0})}),
        Outer(name="a", odd=Inner(), inner=Inner(r=4)),
    ],
)
def test_the_class_reads_them_as_the_whole(neutral: dict[str, Any], settings: Outer) -> None:
    assert Outer.model_validate(json.loads(json.dumps(compared(settings)))) == settings


def test_a_changed_default_counts(neutral: dict[str, Any]) -> None:
    """It was 4 when the key was new; what it is now is no longer neutral, wherever a section is used."""
    neutral["Inner"] = {"r": 4}
    module._keys.cache_clear()
    found = compared(Outer(name="a", parts=[Inner()]))
    assert found["inner"] == {"kind": "inner", "r": 8} and found["parts"] == [{"kind": "inner", "r": 8}]
    assert found["odd"] == {"kind": "inner", "r": 4}
    assert "alpha" not in found


def test_the_settings_of_the_default_config_are_read_back_whole() -> None:
    resolved = resolve(load(ROOT / "config/config.yaml"))
    assert Resolved.model_validate(json.loads(json.dumps(compared(resolved)))) == resolved


def test_every_key_has_a_neutral_value() -> None:
    module._keys.cache_clear()
    assert json.loads(FILE.read_text(encoding="utf-8")) == neutral_values(), "run `make schema`"
