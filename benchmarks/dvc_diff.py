"""Record what DVC prints about two runs: the tables of `dvc params diff`, `metrics diff`, `exp show`, and a plot.

    .venv/bin/python benchmarks/dvc_diff.py PROJECT

PROJECT is a clone in which `make run` has ended. Its results are committed there, and it is run again with half the
learning rate, which takes as long as the training. Writes benchmarks/results/dvc.json (the output in 120 columns) and
benchmarks/results/dvc_plots_diff.svg (the first plot of `dvc plots diff`), and puts both into docs/telemetry.md.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from measuring import RESULTS, machine, parser_of, put, timed

from zerolora.files import write_json

RESULT = RESULTS / "dvc.json"
PLOT = RESULTS / "dvc_plots_diff.svg"
TABLES = (
    "dvc params diff --targets config/config.yaml",
    "dvc metrics diff",
    r"dvc exp show --only-changed --drop '^(runs|code)\.|^results/'",
)
LOSS = "dvc plots diff --targets results/default/metrics/loss.csv --show-vega"
WIDTH = 120
FAST, HALF = "learning_rate: 2.0e-3", "learning_rate: 1.0e-3"


def main() -> None:
    """Run again, compare, write."""
    import vl_convert

    parser = parser_of(__doc__)
    parser.add_argument("project", type=Path)
    project = parser.parse_args().project.resolve()
    config = project / "config/config.yaml"
    text = config.read_text(encoding="utf-8")
    if FAST not in text:
        raise SystemExit(f"{config}: is not the default one, with {FAST}")
    commit = "git -c user.name=user -c user.email=user@example.org commit --quiet --message=results"
    for command in ("git add --all", commit):
        subprocess.run(shlex.split(command), cwd=project, check=True)
    config.write_text(text.replace(FAST, HALF), encoding="utf-8")
    output_of("snakemake --profile profiles/local all", project)
    PLOT.write_text(vl_convert.vegalite_to_svg(json.loads(output_of(LOSS, project))), encoding="utf-8")
    values = {"machine": machine(), "outputs": {command: output_of(command, project) for command in TABLES}}
    write_json(RESULT, values)
    put("telemetry.md", "what DVC says", section(values))


def section(result: dict[str, Any]) -> str:
    """Return the section of docs/telemetry.md."""
    text = (
        "After `make run`, a commit, and a second run with half the learning rate, they print\n"
        "(`benchmarks/dvc_diff.py`, `benchmarks/results/dvc.json`):"
    )
    blocks = [
        "\n".join(f"    {line}".rstrip() for line in [f"$ {command}", *output.strip("\n").splitlines()])
        for command, output in ((command, result["outputs"][command]) for command in TABLES)
    ]
    return "\n\n".join([text, *blocks, f"![loss of both runs](../benchmarks/results/{PLOT.name})"])


def output_of(command: str, project: Path) -> str:
    """Run a command of the project's environment in a terminal of WIDTH columns, and return its output."""
    path = f"{project / '.venv/bin'}:{os.environ['PATH']}"
    return timed(shlex.split(command), project, PATH=path, COLUMNS=str(WIDTH), DVC_PAGER="cat").stdout


if __name__ == "__main__":
    main()
