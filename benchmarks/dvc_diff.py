"""What DVC says of two runs: the tables of `dvc params diff`, `metrics diff`, `exp show`, and a plot of `plots diff`.

    .venv/bin/python benchmarks/dvc_diff.py PROJECT
    .venv/bin/python benchmarks/dvc_diff.py --table

PROJECT is a clone in which `make run` has ended; its own repository gets a commit of the results. It is run once more
with half the learning rate. Writes benchmarks/results/dvc.json, with what the commands print in 120 columns, and
benchmarks/results/dvc_plots_diff.svg, the first plot of `dvc plots diff` as its page shows it, and puts the outputs
into docs/telemetry.md; --table prints them. Takes as long as the training.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import vl_convert
from in_docs import put
from machine import machine

RESULT = Path(__file__).resolve().parent / "results/dvc.json"
PLOT = RESULT.with_name("dvc_plots_diff.svg")
TABLES = (
    "dvc params diff --targets config/config.yaml",
    "dvc metrics diff",
    r"dvc exp show --only-changed --drop '^(runs|code)\.|^results/'",
)
"""The commands whose output is written down."""
LOSS = "dvc plots diff --targets results/default/metrics/loss.csv --show-vega"
WIDTH = 120
USER = ("-c", "user.name=user", "-c", "user.email=user@example.org")


def main() -> None:
    """Run again, ask DVC, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path, nargs="?")
    parser.add_argument("--table", action="store_true", help="print the outputs of a result")
    options = parser.parse_args()
    if options.table:
        print("\n\n".join(shown(json.loads(RESULT.read_text(encoding="utf-8")))))
        return
    if options.project is None:
        parser.error("a project whose `make run` has ended")
    project = options.project.resolve()
    commit_and_halve_the_rate(project)
    run("snakemake --profile profiles/local all", project)
    PLOT.write_text(vl_convert.vegalite_to_svg(json.loads(run(LOSS, project))), encoding="utf-8")
    values = {"machine": machine(), "outputs": {command: run(command, project) for command in TABLES}}
    RESULT.write_text(json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    put("telemetry.md", "what DVC says", section(values))
    print("\n\n".join(shown(values)))


def section(found: dict[str, dict[str, str]]) -> str:
    """Return what docs/telemetry.md says of a result."""
    ran = (
        "After `make run`, a commit, and a second run with half the learning rate, they print\n"
        "(`benchmarks/dvc_diff.py`, `benchmarks/results/dvc.json`):"
    )
    return "\n\n".join([ran, *shown(found), f"![loss of both runs](../benchmarks/results/{PLOT.name})"])


def commit_and_halve_the_rate(project: Path) -> None:
    """Commit the results of a project, and write half the learning rate into its config."""
    config = project / "config/config.yaml"
    text = config.read_text(encoding="utf-8")
    if "learning_rate: 2.0e-3" not in text:
        raise SystemExit(f"{config}: is not the default one, with learning_rate: 2.0e-3")
    run("git add --all", project)
    run(shlex.join(["git", *USER, "commit", "--quiet", "--message=results"]), project)
    config.write_text(text.replace("learning_rate: 2.0e-3", "learning_rate: 1.0e-3"), encoding="utf-8")


def run(command: str, project: Path) -> str:
    """Run a command with the project's environment, in a terminal of WIDTH columns, and return what it prints."""
    own = {"PATH": f"{project / '.venv/bin'}:{os.environ['PATH']}", "COLUMNS": str(WIDTH), "DVC_PAGER": "cat"}
    result = subprocess.run(
        shlex.split(command), cwd=project, env=os.environ | own, capture_output=True, text=True, check=False
    )
    if result.returncode:
        sys.exit(f"{command}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout


def shown(found: dict[str, dict[str, str]]) -> list[str]:
    """Return each command with its output, as an indented block of Markdown."""
    return [
        "\n".join(
            f"    {line}".rstrip() for line in [f"$ {command}", *found["outputs"][command].strip("\n").splitlines()]
        )
        for command in TABLES
    ]


if __name__ == "__main__":
    main()
