"""Reads the user's files that the config names: chat templates, evaluation tasks and their JSON settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.bounded import bounded
from zerolora.config.values import HARNESS_FILES, USER_TASK, USER_TASK_JSON, USER_TEMPLATE
from zerolora.errors import UserError
from zerolora.files import sha256
from zerolora.json_file import read_bytes

LONGEST_TASK = 1_000_000  # characters; far more than a task needs
LONGEST_TEMPLATE = 100_000  # characters; the longest of tests/templates/ has 16,000


def user_task(check: str) -> str | None:
    """Return the text of the Python file that `check` names, None for a task of the registry. The file is not executed.

    Raises UserError, naming file and line, if it is unreadable or not Python.
    """
    if not USER_TASK.fullmatch(check):
        return None
    text = _user_text(check, "a file that defines TASK", LONGEST_TASK)
    try:
        compile(text, check, "exec")
    except SyntaxError as error:
        raise UserError(f"{check}:{error.lineno}: no Python: {error.msg}; correct that line") from None
    except ValueError as error:
        raise UserError(f"{check}: no Python: {error}; correct it") from None
    return text


def settings_with_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task, each path of a JSON file in config/tasks/ replaced by the file's content.

    Raises UserError, naming the file, if one is unreadable or not JSON.
    """
    return {
        key: _json(value) if isinstance(value, str) and USER_TASK_JSON.fullmatch(value) else value
        for key, value in settings.items()
    }


def _json(name: str) -> Any:
    try:
        return json.loads(_user_text(name, "a JSON file", LONGEST_TASK))
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}: not JSON: {error.msg}; correct that line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not JSON that can be read: {error}; correct it") from None


def harness_files() -> dict[str, str]:
    """Return the SHA-256 of each file in config/harness/, by its path."""
    return {
        str(path): sha256(path)
        for path in sorted(Path(HARNESS_FILES).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def user_template(name: str) -> str | None:
    """Return the text of the Jinja file that `prepare.template` names, None for a built-in template.

    Raises UserError, naming file and line, if it is unreadable or does not compile.
    """
    if not USER_TEMPLATE.fullmatch(name):
        return None
    text = _user_text(name, "a chat template", LONGEST_TEMPLATE)
    if not text.strip():
        raise UserError(f"{name}: is empty; write a chat template, as in docs/data.md")
    _check_syntax(name, text)
    return text


def _check_syntax(name: str, text: str) -> None:
    """Compile a template as transformers does, without importing transformers. Raises UserError, naming the line."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """transformers' tag around the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 - as in jinja2

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = str
    try:
        with bounded(name):  # jinja2 evaluates constants when it compiles
            environment.compile(text)
    except TemplateSyntaxError as error:
        reason = " ".join(str(error.message).split())
        raise UserError(f"{name}:{error.lineno}: no Jinja template: {reason}; correct that line") from None
    except RecursionError:
        raise UserError(f"{name}: is nested too deep; nest fewer blocks inside each other") from None


def _user_text(name: str, expected: str, longest: int) -> str:
    """Return the text of a file, with its line endings; `expected` describes the file in an error.

    Raises UserError, naming the file, if it is unreadable, not UTF-8, or longer than `longest` characters.
    """
    try:
        text = read_bytes(Path(name), 4 * longest).decode()  # read_text would convert line endings
    except FileNotFoundError:
        raise UserError(f"{name}: there is no such file; correct the path, or put {expected} there") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}; put a file there that can be read") from None
    if len(text) > longest:
        raise UserError(f"{name}: has {len(text):,} characters; use at most {longest:,}")
    return text
