"""Writes the runs of grids and searches to config/expanded.yaml, from which dvc.yaml has them: DVC cannot multiply.

    zerolora expand

The file is in git, as a lock file is. It names no more of a run than dvc.yaml reads: what it shares with others, its
data set, and where it starts: from an adapter, or else from a file of its data, since in DVC every run of a stage has
as many dependencies.
"""

from pathlib import Path

import yaml

from zerolora.config.schema import Config
from zerolora.errors import UserError
from zerolora.files import write_text

EXPANDED = Path("config/expanded.yaml")
HEAD = """\
# The runs of the grids and searches of config/config.yaml, and what they share, for dvc.yaml. Written by Snakemake and
# `zerolora expand`: edit config/config.yaml, not this file.
"""


def expanded(config: Config) -> str:
    """Return the text of the file; the order of keys and values in the config makes no difference."""
    groups: dict[str, dict[str, dict[str, object]]] = {"packed": {}, "estimated": {}, "rendered": {}, "expanded": {}}
    for name, each in sorted(config.expanded_runs.items()):
        dataset, shared = each.run.dataset, each.shared
        groups["packed"][shared.packed] = {"dataset": dataset}
        groups["estimated"][shared.estimated] = {"packed": shared.packed}
        groups["rendered"][shared.rendered] = {"estimated": shared.estimated}
        start = each.run.train.get("from_adapter") or f"results/data/{dataset}/stats.json"
        groups["expanded"][name] = {"dataset": dataset, "start": start, **shared._asdict()}
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
