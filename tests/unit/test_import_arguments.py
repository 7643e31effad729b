"""The arguments of other tools: each with any value is translated, or named, or the tool's own default."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from zerolora.imports.arguments import UNKNOWN, arguments
from zerolora.imports.formats import FORMATS
from zerolora.imports.formats.import_format import CHANGES, NO_EFFECT, Draft, Rule, is_default
from zerolora.imports.translate import Translation, translate

NOWHERE = Path("/nowhere")
VALUES: tuple[Any, ...] = (False, 0, None, "", [], {}, True, 1)
SAID = ("translated", "same")
"""Kinds of lines without a group that say that a value has its meaning here."""
MOST = 60  # keys in a file
WITH_ARGUMENTS = [name for name, source in FORMATS.items() if source.arguments]


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Return dotted keys, in which [] is the first entry of a list, as nested sections."""
    result: dict[str, Any] = {}
    for key, value in keys.items():
        section: Any = result
        *above, last = key.split(".")
        for part in above:
            name = part.removesuffix("[]")
            inner = section.setdefault(name, [{}] if part.endswith("[]") else {})
            section = inner[0] if isinstance(inner, list) else inner
        section[last] = value
    return result


def files(keys: list[str], value: Any) -> Iterator[dict[str, Any]]:
    """Yield files in which each key has the value; a key and one in its section are in different files."""
    remaining = keys
    while remaining:
        chosen: list[str] = []
        for key in remaining:
            clash = any(key.startswith((f"{each}.", f"{each}[")) for each in chosen)
            if len(chosen) < MOST and not clash and "[" not in key.rpartition(".")[2]:
                chosen.append(key)
        remaining = [key for key in remaining if key not in chosen]
        yield dict.fromkeys(chosen, value)


def silent(translation: Translation, given: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    """Return the given values that are neither translated, nor named, nor the tool's default."""
    lines = {line.key.replace("[0]", "[]"): line for line in translation.lines}
    lost = []
    for key, value in given.items():
        own = [line for at, line in lines.items() if key == at or key.startswith(f"{at}.")]
        named = any(line.group is not None or line.kind in SAID for line in own)
        if not named and not is_default(value, FORMATS[name].default(key)):
            lost.append((key, value))
    return lost


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_no_argument_of_a_tool_is_dropped_in_silence(name: str) -> None:
    source = FORMATS[name]
    keys = sorted(key for key in source.arguments if not key.endswith("[]"))
    for value in VALUES:
        for given in files(keys, value):
            translation = translate(nested(given), source, NOWHERE)
            assert silent(translation, given, name) == []


def test_a_rule_that_does_nothing_is_named() -> None:
    """The guard that the test above relies on: a value that is translated to nothing has a line."""
    careless = replace(FORMATS["axolotl"], own={**FORMATS["axolotl"].own, "relora": Rule("train.x", lambda *_: None)})
    (line,) = (line for line in translate({"base_model": "m", "relora": True}, careless, NOWHERE).lines
               if line.key == "relora")  # fmt: skip
    assert (line.group, line.text) == (NO_EFFECT, "no difference beside the file's other keys")


@pytest.mark.parametrize(
    ("value", "default", "same"),
    [
        (0, 0, True), ("2e-5", 2e-5, True), (1.0, 1, True), (None, None, True), ([], [], True), (False, False, True),
        (0, False, False), (False, 0, False), (True, 1, False), (None, 0, False), ("", None, False), (0, None, False),
        (None, UNKNOWN, False), ("x", 1, False),
    ],
)  # fmt: skip
def test_a_default_is_equal_by_type_and_value(value: Any, default: Any, same: bool) -> None:
    assert is_default(value, default) == same


@pytest.mark.parametrize("file", sorted((ROOT / "src/zerolora/imports/arguments").glob("*.json")), ids=lambda f: f.stem)
def test_arguments_say_their_version(file: Path) -> None:
    known = json.loads(file.read_text(encoding="utf-8"))
    assert known["version"] and all(known["classes"].values())
    assert arguments(file.stem).keys() == set(itertools.chain.from_iterable(known["classes"].values()))


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("adam_beta1: 0\n", "betas", [0.0, 0.999]),
        ("max_grad_norm: 0\n", "gradient_clipping", 0.0),
        ("neftune_noise_alpha: 0\n", "neftune_alpha", 0.0),
        ("weight_decay: 0\n", "weight_decay", 0.0),
        ("warmup_steps: 0\n", "warmup_steps", 0),
    ],
)
def test_zero_is_a_value(text: str, key: str, value: Any) -> None:
    import yaml

    given = {"base_model": "m", "adapter": "lora", **yaml.safe_load(text)}
    train = translate(given, FORMATS["axolotl"], NOWHERE).config["train"]
    assert train[key] == value


def test_null_where_it_is_not_the_default_changes_the_result() -> None:
    given = {"model_name_or_path": "m", "stage": "sft", "dataset": "a", "max_grad_norm": None, "lora_target": None}
    lines = {line.key: line.group for line in translate(given, FORMATS["llamafactory"], NOWHERE).lines}
    assert (lines["max_grad_norm"], lines["lora_target"]) == (CHANGES, CHANGES)


def test_a_draft_refuses_code_for_a_value() -> None:
    from zerolora.imports.expression import Expression
    from zerolora.imports.formats.import_format import NoEqual

    with pytest.raises(NoEqual, match="no code is run"):
        Draft().set("train.seed", Expression("os.getpid()"))
