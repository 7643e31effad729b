"""The interface of an importable format: a rule for each of its keys, and helpers to define rules.

A rule translates the value of one key into a Draft. It returns a remark if the meaning differs here, raises NoEqual if
the value has no equal, and Unlike if the file describes a training that zerolora does not support. Keys without a rule
are reported too.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from zerolora.errors import shown
from zerolora.imports.arguments import UNKNOWN, Unknown
from zerolora.imports.expression import Expression

Group = Literal["changes the result", "you must fill in", "no effect"]
"""The meaning of a reported line for the user."""
CHANGES: Group = "changes the result"
FILL_IN: Group = "you must fill in"
NO_EFFECT: Group = "no effect"
GROUPS: tuple[Group, ...] = (CHANGES, FILL_IN, NO_EFFECT)


class Remark(str):
    """A note on a translated value, with the group of its line."""

    group: Group

    def __new__(cls, text: str, group: Group = CHANGES) -> "Remark":
        """Return the text with its group."""
        remark = super().__new__(cls, text)
        remark.group = group
        return remark


class NoEqual(Exception):
    """A value that our config cannot express, with the reason or an alternative."""

    def __init__(self, text: str, group: Group = CHANGES) -> None:
        super().__init__(text)
        self.group = group


class Unlike(NoEqual):
    """A value that chooses another objective, method or modality, so that the rest would train something else."""


class Same(Exception):
    """A value that is always so here, so that no key of ours says it."""


class LeftOut(Exception):
    """A value that has the meaning of a key that is left out."""


@dataclass
class Draft:
    """A config under construction."""

    config: dict[str, Any] = field(default_factory=dict)
    """Our config, as nested sections."""
    came_from: dict[tuple[str, ...], str] = field(default_factory=dict)
    """The imported key of each value of the config."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Values that `finish` combines into the config, by a name of the format's choice."""
    unlike: list[tuple[str, str]] = field(default_factory=list)
    """(key, reason) of each value that chooses another objective, method or modality."""
    key: str = ""
    """The imported key that is being translated."""
    default: Any = UNKNOWN
    """The tool's default of that key."""

    def set(self, path: str, value: Any) -> None:
        """Set a key of the config by its dotted path, e.g. train.lora.r. Raises NoEqual for an expression."""
        if isinstance(value, Expression):
            text(value)
        parts = tuple(path.split("."))
        section = self.config
        for part in parts[:-1]:
            section = section.setdefault(part, {})
        section[parts[-1]] = value
        self.came_from[parts] = self.key


Translate = Callable[[Any, Draft], str | None]


@dataclass(frozen=True)
class Rule:
    """The translation of a key. `new`, `remark` and `group` are for the table in the docs."""

    new: str
    """Our key or keys; empty if there is none."""
    translate: Translate
    remark: str = ""
    """How values are translated or differ in meaning, or why there is no equal."""
    group: Group = CHANGES
    """Group of the lines about this key."""


@dataclass(frozen=True)
class Format:
    """The config format of a tool."""

    name: str
    title: str
    """Name and version of the tool."""
    needed: str
    """A key that all its files have."""
    shared: Mapping[str, Rule]
    """The rules of keys that other tools have too, e.g. those of TrainingArguments, which do not tell the tool."""
    own: Mapping[str, Rule]
    """The rules of its own keys, which replace those of the same key in `shared`.

    By dotted key, with [] for the entries of a list, as in datasets[].path. A final * stands for the rest of a
    top-level key, as in wandb_*; the rules of whole keys go first.
    """
    defaults: Mapping[str, Any]
    """The tool's defaults that differ from ours."""
    finish: Callable[[Draft], list[str]]
    """Combines the facts; returns a line for each assumption, in group FILL_IN unless it is a Remark."""
    whole: frozenset[str] = frozenset()
    """Keys whose sections are translated as a whole."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The defaults of the tool's arguments (imports/arguments/) by dotted key; UNKNOWN for one that is not known."""

    @functools.cached_property
    def sections(self) -> frozenset[str]:
        """The top-level keys of all arguments."""
        return frozenset(map(top_of, self.arguments))

    @functools.cached_property
    def rules(self) -> dict[str, Rule]:
        """All rules."""
        return {**self.shared, **self.own}

    def default(self, key: str) -> Any:
        """Return the tool's default of a dotted key."""
        return self.arguments.get(key, UNKNOWN)

    def rule(self, key: str) -> Rule | None:
        """Return the rule of a dotted key: its own, that of its beginning, or that of a section around it which as a
        whole has no equal. None if there is none."""
        if key in self.rules:
            return self.rules[key]
        top = top_of(key)
        for pattern, rule in self.rules.items():
            if pattern.endswith("*") and top.startswith(pattern[:-1]):
                return rule
        for end in reversed([match.start() for match in re.finditer(r"\.|\[", key)]):
            above = self.rules.get(key[:end])
            if above is not None:
                return None if above.new else above
        return None

    def knows(self, key: str) -> bool:
        """Return whether a top-level key, or anything in it, has a rule."""
        return key in map(top_of, self.rules) or self.rule(key) is not None

    def owns(self, key: str) -> bool:
        """Return whether a top-level key is one of the tool's own."""
        return key in map(top_of, self.own)


def top_of(key: str) -> str:
    """Return the top-level key of a dotted key."""
    return re.split(r"\.|\[", key, maxsplit=1)[0]


def same(path: str, convert: Callable[[Any], Any] = lambda value: value, remark: str = "") -> Rule:
    """Return the rule of a key that has an equal."""

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


def named_fact(name: str, new: str, names: Mapping[str, Any], remark: str = "") -> Rule:
    """Return the rule of a key whose values have other names here, which `finish` combines with others."""

    def convert(value: Any) -> Any:
        if not isinstance(value, str) or value not in names:
            raise NoEqual(f"{shown(value)} is none of {', '.join(names)}")
        return names[value]

    renamed = ", ".join(f"{old} → {ours}" for old, ours in names.items() if old != ours)
    return fact(name, new, convert, remark or renamed)


def fact(name: str, new: str, convert: Callable[[Any], Any], remark: str = "") -> Rule:
    """Return the rule of a key that `finish` combines with others; `new` lists our keys."""

    def translate(value: Any, draft: Draft) -> str | None:
        draft.facts[name] = convert(value)
        return None

    return Rule(new, translate, remark)


def none(why: str, group: Group = CHANGES) -> Rule:
    """Return the rule of a key without an equal, which has no line where it has the tool's default."""

    def translate(value: Any, draft: Draft) -> str | None:
        if is_default(value, draft.default):
            raise LeftOut
        raise NoEqual(why, group)

    return Rule("", translate, why, group)


def each(keys: str, rule: Rule) -> dict[str, Rule]:
    """Return one rule for several keys, separated by blanks."""
    return dict.fromkeys(keys.split(), rule)


def idle(why: str) -> Rule:
    """Return the rule of a key that does not affect training."""
    return none(why, NO_EFFECT)


def off(value: Any) -> bool:
    """Return whether a value disables something or is empty."""
    zero = isinstance(value, int | float) and value == 0  # False included
    return value is None or zero or value in ("", [], {})


def is_default(value: Any, default: Any) -> bool:
    """Return whether a value of a file is the tool's default. A number may be written as text, as in 2e-5."""
    if isinstance(default, Unknown) or isinstance(value, bool) != isinstance(default, bool):
        return False
    if isinstance(default, int | float) and isinstance(value, str):
        try:
            return float(value) == default
        except ValueError:
            return False
    return bool(value == default)


def unless_off(rule: Rule) -> Rule:
    """Return a rule that ignores a value that disables something which is disabled by default, too.

    false and 0 are values like any other where the default is null.
    """

    def translate(value: Any, draft: Draft) -> str | None:
        automatic = isinstance(value, int | float) and draft.default is None
        if off(value) and off(draft.default) and not automatic:
            raise LeftOut
        return rule.translate(value, draft)

    return Rule(rule.new, translate, rule.remark, rule.group)


def unless_zero(rule: Rule) -> Rule:
    """Return a rule that ignores what disables something, for a key whose 0 or false has the meaning of null there."""

    def translate(value: Any, draft: Draft) -> str | None:
        if off(value) and off(draft.default):
            raise LeftOut
        return rule.translate(value, draft)

    return Rule(rule.new, translate, rule.remark, rule.group)


def lost(why: str) -> Rule:
    """Return the rule of a key without an equal that changes the result unless it is off."""
    return unless_off(none(why))


def unlike(what: str) -> Rule:
    """Return the rule of a key that chooses another objective, method or modality unless it is off."""

    def translate(value: Any, draft: Draft) -> str | None:
        if is_default(value, draft.default):
            raise LeftOut
        raise Unlike(f"{shown(value)}: {what}")

    return unless_zero(Rule("", translate, f"stops the import: {what}"))


def only(wanted: Any, why: str) -> Rule:
    """Return the rule of a key that always has the value `wanted` here."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value != wanted:
            raise NoEqual(why)
        raise Same

    return Rule("", translate, f"{str(wanted).lower()} is always used here; otherwise: {why}")


def class_of(names: Sequence[str], what: str, others: Mapping[str, str] = MappingProxyType({})) -> Rule:
    """Return the rule of a class or function that is always the same here. Any other than `names` has no equal, and
    `others` choose another training, with the reason."""

    def translate(value: Any, draft: Draft) -> str | None:
        name = re.split(r"[./](?!from_pretrained)", str(value))[-1]
        if name in names:
            raise Same
        raise Unlike(f"{name}: {others[name]}") if name in others else NoEqual(f"{shown(name)}: {what}")

    return Rule("", translate, f"{', '.join(names)}; others: {what}")


def offered(path: str, value_if_true: Any) -> Rule:
    """Return the rule of a flag that chooses a value here if true."""

    def translate(value: Any, draft: Draft) -> str | None:
        if flag(value):
            draft.set(path, value_if_true)
        return None

    return Rule(path, translate, f"true → {str(value_if_true).lower()}")


def flag(value: Any) -> bool:
    """Return true or false. Raises NoEqual for anything else."""
    if not isinstance(value, bool):
        raise NoEqual(f"{shown(value)} is neither true nor false")
    return value


def whole(value: Any) -> int:
    """Return an integer of at least 1, also from 3.0. Raises NoEqual for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 2**31 or value != int(value):
        raise NoEqual(f"{shown(value)} is not a whole number of at least 1")
    return int(value)


def number(value: Any) -> float:
    """Return a number, also from text such as "2e-5". Raises NoEqual for anything else."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise NoEqual(f"{shown(value)} is not a number") from None


def pair(value: Any) -> list[float]:
    """Return two numbers. Raises NoEqual for anything else."""
    if not isinstance(value, list) or len(value) != 2:
        raise NoEqual(f"{shown(value)} is not a pair of numbers")
    return [number(each) for each in value]


def text(value: Any) -> str:
    """Return a non-empty text. Raises NoEqual for anything else."""
    if isinstance(value, Expression):
        raise NoEqual(f"{shown(value)}: is not computed, as no code is run; write the value")
    if not isinstance(value, str) or not value.strip():
        raise NoEqual(f"{shown(value)} is not text")
    return value


def texts(value: Any) -> list[str]:
    """Return a list of texts, also from comma-separated text. Raises NoEqual for anything else."""
    entries = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries:
        raise NoEqual(f"{shown(value)} is not a list of texts")
    return [text(entry) for entry in entries]
