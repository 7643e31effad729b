"""Writes dvc.yaml, from the table of stages: python -m zerolora.config.dvc_file.

With --check it writes nothing, and exits with 1 if the file is out of date.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from zerolora.config.stages import STAGES, Stage
from zerolora.files import write_text
from zerolora.workflow_files import ROOT

FILE = ROOT / "dvc.yaml"
WIDTH = 76  # of a list, which yaml ends after the value that exceeds it
VARIABLE = re.compile(r"\{(?:item\.)?([\w\[\]]+)\}")
HEAD = """\
# Written by `make schema` from src/zerolora/config/stages.py: edit that file, not this one.
#
# One stage for each rule; the command calls the rule. A stage depends on its settings and code fingerprint, both in
# results/config.json or in the run's file in results/settings, and on its input files: of a directory, its manifest.
# `resolve` writes settings and fingerprints; the other stages run only if its outputs change (docs/engine-sync.md).
vars:
  - config/runs.yaml # all runs and data sets, and values that dvc.yaml cannot compute (docs/engine-sync.md)

stages:
"""
# For `dvc repro --dry`: without the settings that resolve writes, DVC cannot plan the others.
AFTER_RESOLVE = "  # the stages after it: snakemake --dry-run all"


def text() -> str:
    """Return the text of dvc.yaml."""
    return HEAD + "\n".join(_block(stage) for stage in STAGES.values())


def _block(stage: Stage) -> str:
    block = yaml.safe_dump(
        {stage.name: entry(stage)}, sort_keys=False, default_flow_style=None, width=WIDTH, allow_unicode=True
    )
    lines = [f"# {stage.about}", *block.splitlines()]
    return "".join(f"  {line}\n" for line in lines)


def entry(stage: Stage) -> dict[str, Any]:
    """Return a stage of dvc.yaml, with its `foreach` if it has one."""
    remark = AFTER_RESOLVE if stage.name == "resolve" else ""
    one: dict[str, Any] = {
        "cmd": f"workflow/scripts/rule {stage.name} {stage.target}{remark}",
        "params": list(_params(stage)),
        "deps": list(stage.reads),
        "outs": [f"results/receipts/{stage.job}.json", *stage.writes],
        "metrics": list(stage.metrics),
        "plots": [{path: dict(options)} for path, options in stage.plots.items()],
    }
    one = _named(stage, {key: value for key, value in one.items() if value})
    return {"foreach": f"${{{stage.foreach}}}", "do": one} if stage.foreach else one


def _params(stage: Stage) -> Iterator[dict[str, Any]]:
    """Yield the settings and code fingerprints that a stage depends on, by file."""
    if not stage.settings:
        yield {"config/config.yaml": None}
        return
    group, _, rest = stage.settings.partition(".")
    # One file for each run and shared output has its own fingerprints.
    name = "" if group in ("runs", "shared") or not rest else f".{rest}"
    by_file = {_file(stage.settings): [stage.settings, f"code.{stage.name}{name}"]}
    for key in stage.reads_settings:
        by_file.setdefault(_file(key), []).append(key)
    for path, keys in by_file.items():
        yield {path: keys}


def _file(settings: str) -> str:
    group, _, rest = settings.partition(".")
    return (
        f"results/settings/{group}/{rest.split('.')[0]}.json" if group in ("runs", "shared") else "results/config.json"
    )


def _named(stage: Stage, value: Any) -> Any:
    """Return a value with DVC's variables for the names in its texts: `${key}` for the only wildcard."""
    if isinstance(value, dict):
        return {_named(stage, key): _named(stage, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_named(stage, each) for each in value]
    if not isinstance(value, str):
        return value
    return VARIABLE.sub(lambda name: "${key}" if stage.wildcards == (name[1],) else f"${{item.{name[1]}}}", value)


def main() -> int:
    """Write the file, or compare it."""
    if "--check" not in sys.argv:
        write_text(FILE, text())
    elif FILE.read_text(encoding="utf-8") != text():
        print(f"{FILE.name} is out of date; run `make schema`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
