"""`zerolora run`: starts Snakemake with the workflow and profile of the project, or with those of the package."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from zerolora.compat.versions import VERSIONS
from zerolora.config.file import load
from zerolora.config.overrides import RunOverrides, from_arguments, nested
from zerolora.errors import UserError, install_command, shown
from zerolora.workflow_files import project_file

CONFIG = "config/config.yaml"
PROFILE = "profiles/local"
STRATEGY = "render.strategy"
KEPT_PREFIX = "zerolora keep: "
"""Start of the lines of workflow/scripts/keep.py, among Snakemake's."""


def start(arguments: list[str], values: list[str], strategy: str | None = None) -> NoReturn:
    """Replace this process by Snakemake, with `values` (KEY=VALUE) and a `strategy` over the config's.

    Raises UserError if this Python has no Snakemake, or the config with these values is not valid; also for options of
    Snakemake that it would answer with a traceback.
    """
    if importlib.util.find_spec("snakemake") is None:
        requirement = f"snakemake=={VERSIONS['snakemake'][0]}"
        raise UserError(f"Snakemake is not installed for {sys.executable}; run {install_command(requirement)}")
    _check(arguments)
    command = [sys.executable, "-m", "snakemake", *_options(arguments)]
    # --config reads all that follows it, so targets are before it or after --.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    command += [*arguments[:end], *_values(arguments, values, strategy), *arguments[end:]]
    os.execv(sys.executable, command)  # noqa: S606


def keep(runs: list[str]) -> list[str]:
    """Keep the results of these runs, or of all, and return what there is to say of them. Snakemake, which knows their
    jobs, does it (workflow/scripts/keep.py).

    Raises UserError if the config is not valid or has no such run, or Snakemake cannot plan its jobs.
    """
    known = load(Path(CONFIG)).all_runs
    unknown = [run for run in runs if run not in known]
    if unknown:
        raise UserError(f"{CONFIG} has no run {shown(unknown[0])}; choose among {', '.join(known)}")
    command = [sys.executable, "-m", "snakemake", *_options([]), "--dry-run", "all"]
    environment = os.environ | {"ZEROLORA_KEEP": " ".join(runs)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(result.stderr.strip().splitlines()[-1])
    lines = (result.stdout + result.stderr).splitlines()
    return [line.removeprefix(KEPT_PREFIX) for line in lines if line.startswith(KEPT_PREFIX)]


def _options(arguments: list[str]) -> list[str]:
    """Return the options that `arguments` do not set."""
    options = {each.partition("=")[0] for each in arguments}
    result = []
    if not options & {"-s", "--snakefile"}:
        result += ["--snakefile", project_file("workflow/Snakefile")]
    if "--profile" not in options and "SNAKEMAKE_PROFILE" not in os.environ:
        result += ["--profile", project_file(PROFILE)]
    return result


def _check(arguments: list[str]) -> None:
    """Raise UserError for files of --configfile that are missing, and for keys of --config that contain a dot."""
    for file in _following(arguments, "--configfile", "--configfiles"):
        if not Path(file).is_file():
            raise UserError(f"--configfile: {file}: there is no such file; correct the path")
    for value in _following(arguments, "--config", "-C"):
        if "." in value.partition("=")[0]:
            raise UserError(f"--config: {shown(value)}: keys of Snakemake have no dot; pass --set {value}")


def _following(arguments: list[str], *options: str) -> list[str]:
    """Return the values of options that take all arguments up to the next option."""
    values, inside = [], False
    for each in arguments:
        name, equals, value = each.partition("=")
        if name in options:
            inside = True
            values += [value] if equals else []
        elif each.startswith("-"):
            inside = False
        elif inside:
            values.append(each)
    return values


def _values(arguments: list[str], values: list[str], strategy: str | None) -> list[str]:
    """Return Snakemake's options for the values of --set and --strategy."""
    own = [] if strategy is None else [f"{STRATEGY}={json.dumps(strategy)}"]
    written = [name for name, each in (("--set", values), ("--strategy", own)) if each]
    if not written:
        return []
    for option in ("--config", "-C", "--configfile", "--configfiles", "--directory", "-d"):
        if any(each == option or each.startswith(f"{option}=") for each in arguments):
            raise UserError(f"{written[0]} and {option} exclude each other; give all values after one of them")
    if own and (double := next((each for each in values if each.partition("=")[0] == STRATEGY), None)):
        raise UserError(f"--strategy and --set {double} set one key; keep one of them")
    chosen = from_arguments(own, "--strategy")
    load(Path(CONFIG), over=RunOverrides((from_arguments(values, "--set"), chosen)))
    return ["--config", *nested([*values, *own], "--set")]
