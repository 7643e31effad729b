"""Values that a run has besides config/config.yaml: Snakemake's --configfile and --config, or a module's `config:`."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from zerolora.config import file
from zerolora.config.overrides import RunOverrides, SourcedValues, from_arguments, from_mapping, ineffective, listed
from zerolora.errors import UserError
from zerolora.files import write_text

EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")


def overrides(workflow: Any, config_file: Path) -> RunOverrides:
    """Return the overrides of the command line and of profiles. Raises UserError for what cannot be taken as it is
    meant."""
    settings = workflow.config_settings
    parts: list[SourcedValues] = []
    names: list[str] = []
    for path in settings.configfiles:
        shown = Path(os.path.relpath(path)) if path.is_relative_to(Path.cwd()) else path
        parts.append(file.read(shown))
        names.append(f"--configfile {shown}")
    if settings.config:
        options = [each for each in sys.argv if each in ("--config", "-C") or each.startswith("--config=")]
        if len(options) > 1 and workflow.is_main_process:
            raise UserError("--config is there twice, and Snakemake reads the last alone; give all values after one")
        parts.append(from_arguments(settings.config_args, "--config"))
        names.append(f"--config {listed(parts[-1].values)}")
    if parts and "DVC_STAGE" in os.environ:
        raise UserError(
            f"{' '.join(names)}: DVC would record these values as those of {config_file}; use `snakemake`, or edit it"
        )
    replaces = bool(settings.configfiles) and (settings.replace_workflow_config or not config_file.exists())
    return RunOverrides(tuple(parts), " ".join(names), replaces)


def of_module(module: Any, workflow: Any) -> RunOverrides:
    """Return a module's `config:` as the whole config; nothing without one, so that config/config.yaml is read.

    Raises UserError for what a module does not follow.
    """
    where = f"module {module.name}"
    if module.replaces_prefix:
        raise UserError(f"{where}: replace_prefix has no effect on the folders of commands; use prefix")
    if module.config is None:
        if workflow.config_settings.config or workflow.config_settings.configfiles:
            raise UserError(f"{where}: has no config, so --config and --configfile do not reach it; set config: config")
        return file.NOTHING
    values = _numbers(module.config)
    if module.prefix:
        fetched = [
            f"fetch.{each}" for each in ("data", "package_data", "adapter") if (values.get("fetch") or {}).get(each)
        ]
        if fetched:
            raise UserError(
                f"{where}: {fetched[0]}: is not below the prefix {module.prefix}; declare the module without a prefix"
            )
    return RunOverrides((from_mapping(values, f"config of {where}"),), "", True)


def check_module(module: Any, runs: dict[str, Any]) -> None:
    """Raise UserError if a run of a module with a prefix starts from a result, whose path would be another."""
    for name, run in runs.items():
        start = run.train.from_adapter
        if module.prefix and start is not None and Path(start).is_relative_to("results"):
            raise UserError(
                f"module {module.name}: continued.{name}.train.from_adapter: {start} is not below the prefix "
                f"{module.prefix}; declare the module without a prefix"
            )


def _numbers(value: Any) -> Any:
    """Return the values of a config that Snakemake has read, by YAML 1.1: 2e-4 is a text there, and a number here."""
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def report_overrides(workflow: Any, jobs: Any, module: Any) -> None:
    """Write the config of both for the jobs, and name on standard error what the run has besides its config file, and
    values without an effect."""
    over = jobs.over
    if not over.parts:
        return
    if workflow.execution_settings is not None and not workflow.dryrun and not Path(jobs.config_file).exists():
        write_text(Path(jobs.config_file), jobs.effective)
    about = over.about or f"module {module.name}"
    print(f"{about}: DVC records nothing of this run", file=sys.stderr)
    for part in over.parts:
        for line in ineffective(jobs.values, part):
            print(line, file=sys.stderr)
