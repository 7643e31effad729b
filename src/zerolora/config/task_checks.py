"""Checks of a task that judges answers, in any section that names one."""

from collections.abc import Iterable, Mapping
from typing import Any

from zerolora.config.section import Fault
from zerolora.config.user_files import settings_with_files, user_task
from zerolora.errors import UserError
from zerolora.evaluate.tasks import TASKS


def unusable_task(check: str, settings: Mapping[str, Any], here: tuple[str, ...]) -> Iterable[Fault]:
    """Yield mistakes in the task `check` of the section `here`, and in its settings. The user's Python file is not
    executed."""
    try:
        user_task(check)
    except UserError as error:
        yield (*here, "check"), str(error)
    try:
        content = settings_with_files(dict(settings))
        if check in TASKS:
            TASKS[check].configured(content)
    except (UserError, ValueError) as error:
        yield (*here, "check_settings"), str(error)
