"""Reads what an evaluation task takes from config/tasks/: a task of the user's own, or a JSON file of its settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.config.user_file import user_text
from zerolora.config.values import HARNESS_FILES, USER_TASK, USER_TASK_JSON
from zerolora.errors import UserError
from zerolora.files import sha256

LONGEST = 1_000_000  # characters: far more than a task needs


def user_task(check: str) -> str | None:
    """Return the text of the Python file that `check` names, None for a task of the registry.

    The file is not run here. Raises UserError, naming file and line, if it cannot be read or is not Python.
    """
    if not USER_TASK.fullmatch(check):
        return None
    text = user_text(check, "a file that defines TASK", LONGEST)
    try:
        compile(text, check, "exec")
    except SyntaxError as error:
        raise UserError(f"{check}:{error.lineno}: no Python: {error.msg}; correct that line") from None
    except ValueError as error:
        raise UserError(f"{check}: no Python: {error}; correct it") from None
    return text


def settings_with_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task with the content of each JSON file of config/tasks/ that one of them names.

    Raises UserError, naming the file, if it cannot be read or is not JSON.
    """
    return {
        key: _json(value) if isinstance(value, str) and USER_TASK_JSON.fullmatch(value) else value
        for key, value in settings.items()
    }


def harness_files() -> dict[str, str]:
    """Return the sha256 of each file in config/harness/, by its path: task files, and what they read."""
    return {
        str(path): sha256(path)
        for path in sorted(Path(HARNESS_FILES).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _json(name: str) -> Any:
    try:
        return json.loads(user_text(name, "a JSON file", LONGEST))
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}: not JSON: {error.msg}; correct that line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not JSON that can be read: {error}; correct it") from None
