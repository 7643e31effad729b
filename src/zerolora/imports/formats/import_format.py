"""The interface of a format that can be imported: a table of its keys, and what each becomes in our config.

A rule gets the value of one key and writes into a Draft. It returns a remark if the key means something else here,
raises NoEqual if the value has no equal, and Unlike if the file trains in a way that zerolora does not. Keys that have
no rule are reported as well, so none is lost.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zerolora.errors import shown

Group = Literal["changes the result", "you must fill in", "no effect"]
"""What a line about a key means to its reader."""
CHANGES: Group = "changes the result"
FILL_IN: Group = "you must fill in"
NO_EFFECT: Group = "no effect"
GROUPS: tuple[Group, ...] = (CHANGES, FILL_IN, NO_EFFECT)


class Remark(str):
    """What a translated value means here, with the group of its line."""

    group: Group

    def __new__(cls, text: str, group: Group = CHANGES) -> "Remark":
        """Return the text with its group."""
        remark = super().__new__(cls, text)
        remark.group = group
        return remark


class NoEqual(Exception):
    """A value that our config cannot express; the text says why, or what to do instead."""

    def __init__(self, text: str, group: Group = CHANGES) -> None:
        super().__init__(text)
        self.group = group


class Unlike(NoEqual):
    """A value that chooses another objective, method or modality: the rest of the file would train something else."""


@dataclass
class Draft:
    """A config in the making."""

    config: dict[str, Any] = field(default_factory=dict)
    """Our config, nested by section."""
    came_from: dict[tuple[str, ...], str] = field(default_factory=dict)
    """The key of the imported file that each value of the config came from."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Values that become a part of the config together with others, by the name that the format gives them."""
    unlike: list[tuple[str, str]] = field(default_factory=list)
    """(key, reason) of what `finish` reads as another objective, method or modality."""
    key: str = ""
    """The key of the imported file that is being translated."""

    def set(self, path: str, value: Any) -> None:
        """Set a key of the config; `path` is joined by dots, as in train.lora.r."""
        parts = tuple(path.split("."))
        section = self.config
        for part in parts[:-1]:
            section = section.setdefault(part, {})
        section[parts[-1]] = value
        self.came_from[parts] = self.key


Translate = Callable[[Any, Draft], str | None]


@dataclass(frozen=True)
class Rule:
    """What a key becomes."""

    new: str
    """Our key, or keys, for the table in the docs; empty if there is none."""
    translate: Translate
    remark: str = ""
    """How values are translated and meanings differ, or why there is no equal; for the table in the docs."""
    group: Group = CHANGES
    """Group of the lines about this key, for the table in the docs."""


@dataclass(frozen=True)
class Format:
    """A tool's config."""

    name: str
    title: str
    """Name of the tool, and its version whose keys these are."""
    keys: frozenset[str]
    """Every key that its files may have at their top level."""
    needed: str
    """The key without which a file is none of the tool's."""
    rules: Mapping[str, Rule]
    """By key: joined by dots, and [] for each entry of a list, as in datasets[].path."""
    defaults: Mapping[str, Any]
    """What the tool assumes for a key that the file leaves out, and our config would not."""
    finish: Callable[[Draft], list[str]]
    """Combines the facts; returns a line for each thing that the file does not say and that was assumed, to be filled
    in unless it is a Remark of another group."""
    whole: frozenset[str] = frozenset()
    """Keys whose value is translated as it is, also if it is a section."""


def same(path: str, convert: Callable[[Any], Any] = lambda value: value, remark: str = "") -> Rule:
    """Return the rule of a key that is one of ours."""

    def translate(value: Any, draft: Draft) -> str | None:
        draft.set(path, convert(value))
        return remark or None

    return Rule(path, translate, remark)


def named(path: str, names: Mapping[str, str], remark: str = "") -> Rule:
    """Return the rule of a key whose values have other names here."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not isinstance(value, str) or value not in names:
            raise NoEqual(f"{shown(value)} has no equal; {path} keeps its default")
        draft.set(path, names[value])
        return remark or None

    renamed = ", ".join(f"{old} → {new}" for old, new in names.items() if old != new)
    return Rule(path, translate, "; ".join(part for part in (remark, renamed) if part))


def fact(name: str, new: str, convert: Callable[[Any], Any], remark: str = "") -> Rule:
    """Return the rule of a key that becomes a part of the config with others; `new` names our keys."""

    def translate(value: Any, draft: Draft) -> str | None:
        draft.facts[name] = convert(value)
        return None

    return Rule(new, translate, remark)


def none(why: str, group: Group = CHANGES) -> Rule:
    """Return the rule of a key without an equal."""

    def translate(value: Any, draft: Draft) -> str | None:
        raise NoEqual(why, group)

    return Rule("", translate, why, group)


def idle(why: str) -> Rule:
    """Return the rule of a key that changes nothing of what is trained."""
    return none(why, NO_EFFECT)


def off(value: Any) -> bool:
    """Return whether a value switches something off, or names nothing."""
    return value is None or value is False or value in ("", [], {}, "none", "None", "no") or _zero(value)


def unless_off(rule: Rule) -> Rule:
    """Return a rule that applies to what is switched on; what is off is off here too."""

    def translate(value: Any, draft: Draft) -> str | None:
        return None if off(value) else rule.translate(value, draft)

    return Rule(rule.new, translate, rule.remark, rule.group)


def lost(why: str) -> Rule:
    """Return the rule of a key that changes the result where it is on, and has no equal."""
    return unless_off(none(why))


def unlike(what: str) -> Rule:
    """Return the rule of a key that chooses another objective, method or modality where it is on."""

    def translate(value: Any, draft: Draft) -> str | None:
        raise Unlike(f"{shown(value)}: {what}")

    return unless_off(Rule("", translate, f"stops the import: {what}"))


def _zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def flag(value: Any) -> bool:
    """Return true or false. Raises NoEqual for anything else."""
    if not isinstance(value, bool):
        raise NoEqual(f"{shown(value)} is neither true nor false")
    return value


def whole(value: Any) -> int:
    """Return a whole number of at least 1, written as 3 or 3.0. Raises NoEqual for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 2**31 or value != int(value):
        raise NoEqual(f"{shown(value)} is no whole number of at least 1")
    return int(value)


def number(value: Any) -> float:
    """Return a number, also one written as text, as in "2e-5". Raises NoEqual for anything else."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise NoEqual(f"{shown(value)} is no number") from None


def text(value: Any) -> str:
    """Return a text that is not empty. Raises NoEqual for anything else."""
    if not isinstance(value, str) or not value.strip():
        raise NoEqual(f"{shown(value)} is no text")
    return value


def texts(value: Any) -> list[str]:
    """Return a list of texts, also one written with commas. Raises NoEqual for anything else."""
    entries = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries:
        raise NoEqual(f"{shown(value)} is no list of texts")
    return [text(entry) for entry in entries]
