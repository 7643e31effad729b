"""Writes the runs of grids and searches to config/expanded.yaml, from which dvc.yaml has them: DVC cannot multiply.

    zerolora expand

The file is in git, as a lock file is. It names no more of a run than dvc.yaml reads.
"""

from pathlib import Path

import yaml

from zerolora.config.schema import Config
from zerolora.errors import UserError
from zerolora.files import write_text

EXPANDED = Path("config/expanded.yaml")
HEAD = """\
# The runs of the grids and searches of config/config.yaml, for dvc.yaml. Written by Snakemake and `zerolora expand`:
# edit config/config.yaml, not this file.
"""


def expanded(config: Config) -> str:
    """Return the text of the file; the order of keys and values in the config makes no difference."""
    groups: dict[str, dict[str, object]] = {"runs": {}, "continued": {}}
    for name, each in sorted(config.expanded_runs.items()):
        run = each.run
        if config.is_continued(name):
            start = {"from_adapter": run.train["from_adapter"]}
            groups["continued"][name] = {"dataset": run.dataset, "train": start}
        else:
            groups["runs"][name] = {"dataset": run.dataset}
    lines = [HEAD.rstrip()]
    for group, runs in groups.items():
        lines.append(f"{group}:" if runs else f"{group}: {{}}")
        lines += [f"  {_flow({name: run})[1:-1]}" for name, run in runs.items()]
    return "\n".join(lines) + "\n"


def _flow(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()


def is_expanded(config: Config) -> bool:
    """Tell whether the file has the runs of the config's grids and searches."""
    try:
        return EXPANDED.read_text(encoding="utf-8") == expanded(config)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def expand(config: Config) -> bool:
    """Write the file if it has other runs than the config's grids and searches; return whether it had."""
    if is_expanded(config):
        return False
    write_text(EXPANDED, expanded(config))
    return True


def check_expanded(config: Config) -> None:
    """Raise UserError if the file has other runs than the config's grids and searches."""
    if not is_expanded(config):
        raise UserError(
            f"{EXPANDED}: has other runs than the grids and searches of config/config.yaml, and dvc.yaml's are read "
            "from it; run `zerolora expand` and `dvc repro` again"
        )
