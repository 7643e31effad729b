"""Reads untrusted YAML: bounded, without repeated keys, and with numbers as in YAML 1.2."""

import contextlib
import json
import re
from typing import Any

import yaml

from zerolora.errors import CONTROLS, UserError, shown

MOST, DEEPEST = 1_000_000, 50  # values and levels of a file, parsed within seconds
PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./ -]*")
SLOW = 20_000  # characters above which libyaml (C) is used; the slow parser repeats failures, for better messages
AMBIGUOUS = re.compile(r"[-+]?(0[0-9_]*[0-9]|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


def value_of(text: str, key: str) -> Any:
    """Return the value of a top-level key, None if it is missing. Other values are not constructed.

    Raises UserError if the text is not YAML, or the value is invalid or too large.
    """
    try:
        loader, node = composed(text)
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(name, yaml.ScalarNode) and name.value == key:
                check_size(value)
                return loader.construct_document(value)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"cannot be read as YAML ({' '.join(str(error).split())})") from None
    return None


def written(value: Any) -> str:
    """Return a scalar as YAML has it inside { } or [ ], quoted where it would be read as something else, in one line of
    printable characters."""
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.strip() == value:
        with contextlib.suppress(yaml.YAMLError):
            if yaml.safe_load(value) == value:
                return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


def dumped(values: Any, **options: Any) -> str:
    """Return values as YAML, without characters that a terminal obeys: PyYAML writes those that turn a line."""
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, **options)
    if not CONTROLS.search(text.replace("\n", "")):
        return text
    return str(yaml.safe_dump(values, sort_keys=False, **options))


def composed(text: str) -> tuple[Any, yaml.Node | None]:
    """Return a loader of a text and its root node."""
    if len(text) > SLOW:
        loader = _FastLoader(text)  # type: ignore[call-arg]
        with contextlib.suppress(yaml.YAMLError):
            return loader, loader.get_single_node()
    slow = _Loader(text)
    return slow, slow.get_single_node()


def check_size(node: yaml.Node | None) -> None:
    """Raise ConstructorError for a recursive alias, and for more than MOST values or DEEPEST levels with all aliases
    expanded: a few lines could fill the memory."""
    _size(node, {}, set())


def _size(node: yaml.Node | None, known: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """Return values and levels of a node with aliases expanded; `known` has those of visited nodes by id."""
    if not isinstance(node, yaml.CollectionNode):
        return 1, 0
    if id(node) not in known:
        problem = ""
        if id(node) in above:
            raise yaml.constructor.ConstructorError(None, None, "an alias contains itself", node.start_mark)
        pairs = isinstance(node, yaml.MappingNode)
        inner = [part for entry in node.value for part in entry] if pairs else node.value
        sizes = [_size(each, known, above | {id(node)}) for each in inner]
        values, levels = 1 + sum(size for size, _ in sizes), 1 + max((level for _, level in sizes), default=0)
        if values > MOST:
            problem = f"more than {MOST:,} values with all aliases written out"
        if levels > DEEPEST:
            problem = f"more than {DEEPEST} levels"
        if problem:
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        known[id(node)] = values, levels
    return known[id(node)]


class _Constructor(yaml.constructor.SafeConstructor):
    """SafeConstructor that also reads 2e-4 as a number, like YAML 1.2 (and DVC), and rejects repeated keys.

    Numbers and dates that Python cannot represent are errors with their line, and so are numbers that YAML 1.1 and 1.2
    read differently: 12:30 is 750 and 010 is 8 in YAML 1.1.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "this is not a map of key: value", node.start_mark)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not plain text", key.start_mark)
            kind = key.tag.rpartition(":")[2]
            if kind not in ("str", "merge"):
                problem = f"the key {key.value} is read as {kind}, not as text: put it in quotes, or correct it"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} appears twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and isinstance(node, yaml.ScalarNode) and AMBIGUOUS.fullmatch(node.value):
            problem = (
                f"{shown(node.value)} would be read as a number of another base; put it in quotes, or write a plain one"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # unpaired surrogates such as "\ud800" cannot be written
            return value
        except (ValueError, TypeError, OverflowError, LookupError, AttributeError):  # from PyYAML's handling of tags
            problem = f"{shown(node.value) if isinstance(node, yaml.ScalarNode) else 'this'} is not of type {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


class _Loader(_Constructor, yaml.SafeLoader):
    """The parser with the best messages."""


class _FastLoader(_Constructor, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same in C, if libyaml is available."""


for _each in (_Loader, _FastLoader):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
