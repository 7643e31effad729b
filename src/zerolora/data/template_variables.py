"""The variables that a chat template reads, and templates with values for some of them."""

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

DOCUMENTS = "documents"
"""The variable that transformers always sets, to none where there are no documents."""
OF_MACROS = frozenset({"caller", "kwargs", "varargs"})
RAISE = "raise_exception"
"""The function by which a template rejects a conversation."""


@functools.lru_cache  # a template is compiled once too
def variables_of(environment: Any, source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads before it sets them; without those of its environment
    (jinja2.Environment)."""
    from jinja2 import meta

    tree = environment.parse(source)
    found: set[str] = set()
    _statements(tree.body, frozenset(), found)
    # jinja2 also reports a variable that is set in a branch, and read there only.
    return frozenset(found & meta.find_undeclared_variables(tree))


@functools.lru_cache
def set_by(environment: Any, source: str) -> frozenset[str]:
    """Return the names of the variables that a template sets somewhere."""
    from jinja2 import nodes

    tree = environment.parse(source)
    targets = [node.target for node in tree.find_all((nodes.Assign, nodes.AssignBlock))]
    return frozenset(
        each.name for target in targets for each in (target, *target.find_all(nodes.Name)) if hasattr(each, "name")
    )


Names = frozenset[str]


def _statements(body: Iterable[Any], known: Names, found: set[str]) -> Names | None:
    """Add to `found` the names that statements read while they are not `known`. Return the names known after them;
    None if nothing comes after them, as after raise_exception."""
    for statement in body:
        if (after := _statement(statement, known, found)) is None:
            return None
        known = after
    return known


def _statement(node: Any, known: Names, found: set[str]) -> Names | None:
    """Do the same for one statement."""
    from jinja2 import nodes

    after: Names | None = known
    match node:
        case nodes.Output():
            _expressions(node.nodes, known, found)
            if any(isinstance(each, nodes.Call) and _is_named(each.node, RAISE) for each in node.nodes):
                after = None
        case nodes.Assign():
            _expressions([node.node], known, found)
            after = known | _targets([node.target], known, found)
        case nodes.AssignBlock():
            _expressions([node.filter], known, found)
            _statements(node.body, known, found)
            after = known | _targets([node.target], known, found)
        case nodes.If():
            ends = [_statements(node.else_, known, found)]
            for branch in (node, *node.elif_):
                _expressions([branch.test], known, found)
                ends.append(_statements(branch.body, known, found))
            reached = [end for end in ends if end is not None]
            after = frozenset.intersection(*reached) if reached else None
        case nodes.For():
            _expressions([node.iter], known, found)
            inside = known | _targets([node.target], known, found) | {"loop"}
            _expressions([node.test], inside, found)
            _statements(node.body, inside, found)
            _statements(node.else_, known, found)
        case nodes.Macro() | nodes.CallBlock():
            _expressions([*node.defaults, getattr(node, "call", None)], known, found)
            after = known | {node.name} if isinstance(node, nodes.Macro) else known
            _statements(node.body, after | _targets(node.args, known, found) | OF_MACROS, found)
        case nodes.With():
            _expressions(node.values, known, found)
            _statements(node.body, known | _targets(node.targets, known, found), found)
        case nodes.Continue() | nodes.Break():
            after = None
        case _:
            # What it sets inside may be unknown after it.
            parts = list(node.iter_child_nodes())
            _expressions([each for each in parts if isinstance(each, nodes.Expr)], known, found)
            _statements([each for each in parts if isinstance(each, nodes.Stmt)], known, found)
    return after


def _expressions(expressions: Iterable[Any], known: Names, found: set[str]) -> None:
    from jinja2 import nodes

    for each in expressions:
        if each is not None:
            names = [each, *each.find_all(nodes.Name)]
            found.update(name.name for name in names if isinstance(name, nodes.Name) and name.name not in known)


def _targets(targets: Iterable[Any], known: Names, found: set[str]) -> Names:
    """Return the names that an assignment sets. The attribute of a namespace is set by reading the namespace."""
    from jinja2 import nodes

    result: set[str] = set()
    for target in targets:
        for each in (target, *target.find_all((nodes.Name, nodes.NSRef))):
            if isinstance(each, nodes.Name):
                result.add(each.name)
            elif isinstance(each, nodes.NSRef) and each.name not in known:
                found.add(each.name)
    return frozenset(result)


def _is_named(node: Any, name: str) -> bool:
    return getattr(node, "name", None) == name


def with_values(source: str, values: Mapping[str, Any]) -> str:
    """Return a template in which variables have these JSON values, unless they are passed to it."""
    return "".join(f"{_beginning(name)}{literal(value)} %}}\n" for name, value in values.items()) + source


def has_value(source: Any, name: str) -> bool:
    """Return whether `with_values` gave a variable of a template a value."""
    return isinstance(source, str) and _beginning(name) in source


def by_tools(without: str, with_tools: str) -> str:
    """Return one template that writes conversations without tools as one template does, and those with tools as
    another one."""
    if without == with_tools:
        return without
    # The environment of transformers drops the line break after a block, and a template's last one.
    parts = [source.removesuffix("\n") for source in (without, with_tools)]
    return f"{{% if not tools is defined or tools is none %}}\n{parts[0]}{{%+ else %}}\n{parts[1]}{{%+ endif %}}"


def literal(value: Any) -> str:
    """Return a JSON value as a Jinja expression."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(held)}" for key, held in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _beginning(name: str) -> str:
    passed = f"{name} is defined and {name} is not none" if name == DOCUMENTS else f"{name} is defined"
    return f"{{% set {name} = {name} if {passed} else "
