"""The shorthand `rounds`: sampling, selecting and training several times in turn, written out as entries of the config.

    rounds:
      own: {of: default, rounds: 2}

is an entry own-round1 and own-round2 of `samples`, `selections`, `prepare` and `continued` each. Round 1 samples the
run `default` and continues its adapter; round 2 does so with own-round1. No loop is left: both engines see one graph.
"""

from typing import Any, NamedTuple

from pydantic import ValidationError

from zerolora.config.schema import Rounds
from zerolora.config.values import RUN_SECTIONS

OF_FILES = ("path", "format", "columns", "roles", "ignore", "classes", "where", "better", "undecided", "sources",
            "at_most", "split", "held_out", "selections")  # fmt: skip
"""The keys of `prepare` that say which rows are read, and how: those of a round are its selection."""
Location = tuple[str, ...]
Values = dict[str, Any]


class RoundEntry(NamedTuple):
    """An entry that a round adds: its location, its value, and where the config has it."""

    location: Location
    value: Values
    origin: Location


def entries_of(name: str, section: Values, config: Values) -> list[RoundEntry]:
    """Return the entries of an entry of `rounds`, none if it is invalid, which the config's own check reports."""
    first = section.get("of")
    run = next((each for owner in ("runs", "continued") for key, each in _entries(config, owner) if key == first), None)
    data = dict(_entries(config, "prepare")).get(str(run.get("dataset"))) if run else None
    if run is None or data is None or not _is_valid(section):
        return []
    parts = {key: section.get(key) or {} for key in ("samples", "selections", "prepare", *RUN_SECTIONS)}
    asked, previous, result = str(run["dataset"]), str(first), []
    kept = {key: value for key, value in data.items() if key not in OF_FILES}
    for number in range(1, section["rounds"] + 1):
        own, here = f"{name}-round{number}", ("rounds", name)
        prepared = {**kept, "selections": [own], "held_out": data.get("held_out", asked), **parts["prepare"]}
        overrides = {key: _merged(run.get(key, {}), parts[key]) for key in RUN_SECTIONS if key in run or parts[key]}
        overrides["train"] = {**overrides.get("train", {}), "from_adapter": f"results/{previous}/adapter"}
        repeats = {"repeats": section["repeats"]} if "repeats" in section else {}
        sample = {"of": {"run": previous}, "dataset": asked, **parts["samples"]}
        result += [
            RoundEntry(("samples", own), sample, (*here, "samples")),
            RoundEntry(("selections", own), {"samples": own, **parts["selections"]}, (*here, "selections")),
            RoundEntry(("prepare", own), prepared, (*here, "prepare")),
            RoundEntry(("continued", own), {"dataset": own, **repeats, **overrides}, here),
        ]
        previous = own
    return result


def _is_valid(section: Values) -> bool:
    try:
        Rounds.model_validate(section)
    except ValidationError:
        return False
    return True


def _entries(config: Values, section: str) -> list[tuple[str, Values]]:
    entries = config.get(section)
    return [each for each in entries.items() if isinstance(each[1], dict)] if isinstance(entries, dict) else []


def _merged(values: Any, over: Values) -> Values:
    """Return nested values with others over them."""
    result = dict(values) if isinstance(values, dict) else {}
    for key, value in over.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result
