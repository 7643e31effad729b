"""Reads the flags of a training command in a shell script, which is never run."""

import json
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, printable
from zerolora.imports.expression import Expression

COMMANDS = {("swift", "sft"), ("swift", "pt"), ("swift", "rlhf"), ("xtuner", "train")}
"""The commands whose flags are read."""
ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")
EXPRESSION = re.compile(r"\$\(expr +(\d+(?: +[/*+-] +\d+)+) *\)|\$\(\( *(\d+(?: *[/*+-] *\d+)+) *\)\)")
COMPUTED = re.compile(r"\$[({A-Za-z_0-9@*]|`")
UNIT = re.compile(r"\$\([^()]*\)|`[^`]*`")
"""A command inside a word, which may have blanks."""
BLANK = "\N{NO-BREAK SPACE}"
LARGEST = 2**20  # characters of a script
WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "null": None}
ENDS = (";", "&&", "||", "|", "&")


def read_flags(file: Path) -> dict[str, Any]:
    """Return the flags of the only training command in a script, with `command` and its environment variables.

    Variables that the script sets to a value, and sums of them, are replaced; a value that only a shell could compute
    is an Expression. A word before the first flag, such as the config of `xtuner train`, is `config`.
    Raises UserError if there is no such command, or more than one.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({printable(str(error))}); correct the file") from None
    if len(text) > LARGEST:
        raise UserError(f"{file}: has more than {LARGEST:,} characters; give the script of one training")
    known: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        try:
            joined = UNIT.sub(lambda match: re.sub(r"\s", BLANK, match[0]), _computed(line, known))
            words = [word.replace(BLANK, " ") for word in shlex.split(joined, comments=True)]
        except ValueError:
            continue  # a quote that spans lines is no command that could be read
        found += _commands(words, known)
    if len(found) != 1:
        names = ", ".join(" ".join(command) for command in sorted(COMMANDS))
        raise UserError(f"{file}: has {len(found)} commands of {names}; give a script with one (no script is run)")
    return found[0]


def _computed(line: str, known: dict[str, str]) -> str:
    """Replace variables of known value, and the sums of two numbers."""
    line = VARIABLE.sub(lambda match: known.get(match[1], match[0]), line)
    return EXPRESSION.sub(_result, line)


def _result(match: re.Match[str]) -> str:
    first, *rest = re.findall(r"\d+|[/*+-]", match[1] or match[2])
    terms = [int(first)]  # of a sum
    for sign, digits in zip(rest[::2], rest[1::2], strict=True):
        number = int(digits)
        if sign in "+-":
            terms.append(number if sign == "+" else -number)
        elif sign == "*":
            terms[-1] *= number
        elif number and terms[-1] >= 0:
            terms[-1] //= number
        else:
            return match[0]  # the shell's division rounds toward 0
    return str(sum(terms))


def _commands(words: list[str], known: dict[str, str]) -> list[dict[str, Any]]:
    """Return the flags of each training command in a line, and note the variables that it sets."""
    result: list[dict[str, Any]] = []
    environment: dict[str, Any] = {}
    for number, word in enumerate(words):
        assigned = ASSIGNED.fullmatch(word)
        if word == "export":
            continue
        if assigned:
            environment[assigned[1]] = _value([assigned[2]])
            if not COMPUTED.search(assigned[2]):
                known[assigned[1]] = assigned[2]
            continue
        if tuple(words[number : number + 2]) in COMMANDS:
            flags = _flags(words[number + 2 :])
            result.append({"command": words[number + 1], **environment, **flags})
        break
    return result


def _flags(words: list[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    given: list[str] = []
    name = "config" if words and not words[0].startswith("--") else ""
    for word in [*words, "--"]:
        if word in ENDS or word.startswith("--"):
            if name:
                flags[name] = _value(given)
            name, _, rest = word[2:].partition("=")
            given = [rest] if rest else []
            if word in ENDS:
                break
        else:
            given.append(word)
    return flags


def _value(words: list[str]) -> Any:
    """Return the value of a flag: true without a word, a list of several."""
    if len(words) != 1:
        return [_value([word]) for word in words] if words else True
    word = words[0]
    if COMPUTED.search(word):
        return Expression(word)
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    for kind in (int, float, json.loads if word.startswith("{") else str):
        with suppress(ValueError):
            return kind(word)
    return word
