"""Reads the values of a config that is a Python file, as XTuner's are. The file is parsed and never run."""

import ast
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, printable
from zerolora.imports.expression import Expression

OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Gt: operator.gt, ast.Lt: operator.lt, ast.GtE: operator.ge, ast.LtE: operator.le,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
LARGEST = 2**20  # characters of a file
MOST = 10**6  # of a number or a text that is computed
KEPT = ("sequence_parallel_size",)
"""Values that are sections as well as a part of others."""
DEEPEST = 50  # levels of nested values


def read_sections(file: Path) -> dict[str, Any]:
    """Return the values that a config assigns and does not use in another one: its sections.

    Literals, names, sums and products of numbers, `dict(...)` and `if` with a known condition are computed; any other
    expression is an Expression. Raises UserError for a file that is no Python, or that has a base file.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if len(text) > LARGEST:
            raise UserError(f"{file}: has more than {LARGEST:,} characters; give the config of one training")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(
            f"{file}: is no Python that can be parsed ({printable(str(error))}); correct the file"
        ) from None
    if any(isinstance(node, ast.With) and "read_base" in ast.dump(node.items[0]) for node in tree.body):
        raise UserError(f"{file}: is based on another config; give the complete one (`xtuner copy-cfg`)")
    known: dict[str, Any] = {}
    _assign(tree.body, known)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return {name: value for name, value in known.items() if name in KEPT or name not in used}


def _assign(body: list[ast.stmt], known: dict[str, Any]) -> None:
    """Note the values that statements assign."""
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = _value(node.value, known)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    known[target.id] = value
                else:
                    known[ast.unparse(target)] = Expression(ast.unparse(node.value))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            known[name] = _computed(node.op, known.get(name), _value(node.value, known), node)
        elif isinstance(node, ast.If):
            condition = _value(node.test, known)
            if isinstance(condition, Expression):
                known[f"if {ast.unparse(node.test)}"] = Expression(ast.unparse(node))
            else:
                _assign(node.body if condition else node.orelse, known)
        elif not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.Pass):
            known[ast.unparse(node).splitlines()[0]] = Expression(ast.unparse(node))


def _value(node: ast.expr, known: dict[str, Any], depth: int = 0) -> Any:
    """Return the value of an expression."""
    if depth > DEEPEST:
        return Expression(ast.unparse(node))
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    return _of_container(node, known, depth)


def _of_container(node: ast.expr, known: dict[str, Any], depth: int) -> Any:
    """Return a list or a section, or the value of an operation."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each, known, depth + 1) for each in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _value(each, known, depth + 1) for key, each in pairs if isinstance(key, ast.Constant)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        named = {each.arg: _value(each.value, known, depth + 1) for each in node.keywords}
        if None not in named:
            return named
    return _of_operands(node, known, depth)


def _of_operands(node: ast.expr, known: dict[str, Any], depth: int) -> Any:
    """Return the value of an operation, or the expression itself."""
    if isinstance(node, ast.BinOp):
        operands = [_value(each, known, depth + 1) for each in (node.left, node.right)]
        return _computed(node.op, operands[0], operands[1], node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operands = [_value(each, known, depth + 1) for each in (node.left, node.comparators[0])]
        return _computed(node.ops[0], operands[0], operands[1], node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        inner = _value(node.operand, known, depth + 1)
        if isinstance(inner, int | float):
            return -inner if isinstance(node.op, ast.USub) else not inner
    if isinstance(node, ast.IfExp):
        condition = _value(node.test, known, depth + 1)
        if not isinstance(condition, Expression):
            return _value(node.body if condition else node.orelse, known, depth + 1)
    return Expression(ast.unparse(node))


def _computed(operation: ast.AST, left: Any, right: Any, node: ast.AST) -> Any:
    """Return the result of an operation on two numbers, texts or lists, or the expression itself."""
    apply = OPERATORS.get(type(operation))
    kinds = (int | float, str, list) if isinstance(operation, ast.Add) else (int | float,)
    plain = not isinstance(left, Expression) and not isinstance(right, Expression)
    if apply and plain and any(isinstance(left, kind) and isinstance(right, kind) for kind in kinds):
        try:
            result = apply(left, right)
        except (ArithmeticError, MemoryError):
            return Expression(ast.unparse(node))
        if isinstance(result, list | bool) or (isinstance(result, str) and len(result) < MOST):
            return result
        if isinstance(result, int | float) and abs(result) < MOST**2:
            return result
    return Expression(ast.unparse(node))
