"""`zerolora run`: starts Snakemake with the workflow and profile of the project, or with those of the package."""

import importlib.util
import os
import sys
from typing import NoReturn

from zerolora.errors import UserError
from zerolora.workflow_files import project_file

PROFILE = "profiles/local"


def start(arguments: list[str]) -> NoReturn:
    """Replace this process by Snakemake. Raises UserError if this Python has none."""
    if importlib.util.find_spec("snakemake") is None:
        raise UserError(
            f"Snakemake is not installed for {sys.executable}; run `{sys.executable} -m pip install snakemake`"
        )
    os.execv(sys.executable, [sys.executable, "-m", "snakemake", *_options(arguments), *arguments])  # noqa: S606


def _options(arguments: list[str]) -> list[str]:
    """Return the options that `arguments` do not set."""
    options = {each.partition("=")[0] for each in arguments}
    result = []
    if not options & {"-s", "--snakefile"}:
        result += ["--snakefile", project_file("workflow/Snakefile")]
    if "--profile" not in options and "SNAKEMAKE_PROFILE" not in os.environ:
        result += ["--profile", project_file(PROFILE)]
    return result
