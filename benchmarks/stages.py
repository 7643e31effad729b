"""Measure what `make run` takes outside fetch, training and generation, against an earlier commit.

    .venv/bin/python benchmarks/stages.py --project DIR --before DIR

Both are copies of the project whose pipeline has run, each with its own .venv. They take turns: Snakemake runs all
other stages again, and then the commands that restore weights before a stage run by themselves. Writes the CPU seconds
of each command and of all, in medians over the rounds, and the names of prepared files that differ, to
benchmarks/results/stages.json. Other processes hardly disturb CPU seconds.
"""

import filecmp
import os
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from measuring import RESULTS, machine, parser_of, put, table, timed, turns

from zerolora.files import as_json, write_json

STAGES = ("resolve", "prepare", "pack", "estimate", "render", "merge", "report", "accept", "compare")
ROUNDS = 5
JOB = "ZEROLORA_JOB_SHELL"
"""In the command of each job (workflow/scripts/startup.py)."""
TRAP = 'trap \'{ printf "%s\\n" "${BASH_EXECUTION_STRING//$\'"\'"\'\\n\'"\'"\'/ }"; times; } >> "$CPU_SECONDS"\' EXIT\n'
"""In BASH_ENV: at the end of each shell, write its command in one line and, in two, `times`: of itself, of children."""
TIME = re.compile(r"(\d+)m([\d.]+)s")
RESTORED = {"weights": 3, "merged-weights": 1}
"""Commands before evaluate_base, train and evaluate, which are not run again here."""


def main() -> None:
    """Measure and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    projects = {"before": arguments.before.resolve(), "after": arguments.project.resolve()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in projects}
    for name in turns(projects, arguments.rounds):
        rounds[name].append(seconds(projects[name]))
    medians = {
        name: {key: round(statistics.median(each[key] for each in done), 2) for key in sorted(done[0])}
        for name, done in rounds.items()
    }
    figures = {
        "machine": machine(("snakemake", "torch", "transformers")),
        "rounds": arguments.rounds,
        "commits": {name: commit(project) for name, project in projects.items()},
        "cpu_seconds": medians,
        "files_that_differ": differing(*projects.values()),
        "ratio": round(medians["after"]["all"] / medians["before"]["all"], 3),
    }
    write_json(RESULTS / "stages.json", figures)
    put("speed.md", "light stages", section(figures))
    print(as_json(figures))


def section(figures: dict[str, Any]) -> str:
    """Return the table of a result."""
    before, after = (figures["cpu_seconds"][name] for name in ("before", "after"))
    names = [*sorted((name for name in before if name != "all"), key=lambda name: (-before[name], name)), "all"]
    rows = [(name, f"{before[name]:.1f}", f"{after[name]:.1f}", f"{after[name] / before[name]:.2f}") for name in names]
    return table(("CPU seconds", "before", "after", "after over before"), rows, right=3)


def seconds(project: Path) -> dict[str, float]:
    """Run the stages again, and return the CPU seconds of each command, of Snakemake and of all."""
    binaries = project / ".venv/bin"
    with tempfile.TemporaryDirectory() as folder:
        trap, log = Path(folder) / "trap", Path(folder) / "log"
        trap.write_text(TRAP, encoding="utf-8")
        command = [binaries / "snakemake", "--profile", "profiles/local", "--forcerun", *STAGES, "all"]
        whole = timed(command, project, "report", BASH_ENV=str(trap), CPU_SECONDS=str(log)).cpu_seconds
        jobs = jobs_of(log.read_text(encoding="utf-8"))
    if missing := set(STAGES) - jobs.keys():
        sys.exit(f"{project}: Snakemake did not run {', '.join(sorted(missing))}")
    result = {"Snakemake": whole - sum(jobs.values()), **jobs}
    model = next((project / "resources/models").iterdir()).name
    data = next(path for path in (project / "results/data").iterdir() if path.is_dir())
    stamp = f"resources/weights/{model}.json"
    options: dict[str, list[Any]] = {
        "weights": ["--model", f"resources/models/{model}", "--weights", f"resources/weights/{model}"],
        "merged-weights": [
            *("--weights", stamp, "--adapter", "results/default/adapter", "--data", data),
            *("--manifest", "results/default/merged/manifest.json"),
        ],
    }
    for name, count in RESTORED.items():
        result[name] = count * timed([binaries / "zerolora", name, *options[name]], project).cpu_seconds
    return result | {"all": sum(result.values())}


def jobs_of(log: str) -> dict[str, float]:
    """Return the CPU seconds of the jobs in a log of TRAP, by stage."""
    result: dict[str, float] = defaultdict(float)
    for command, *times in re.findall(r"^(.*)\n(\S+ \S+)\n(\S+ \S+)$", log, re.MULTILINE):
        if JOB in command:
            name = re.search(r"--log results/logs/(\w+)", command)
            assert name, command
            result[name[1]] += sum(60 * int(minutes) + float(rest) for minutes, rest in TIME.findall(" ".join(times)))
    return result


def differing(one: Path, other: Path) -> list[str]:
    """Return the prepared data sets' files and the engine's options that differ. Other results name their commit, or
    are made of a training, an evaluation or a cost model that changed in between."""
    patterns = ("results/data/**/*", "results/*/zero.json")
    paths = ((each, path) for each in (one, other) for pattern in patterns for path in each.glob(pattern))
    names = sorted({path.relative_to(each) for each, path in paths if path.is_file()})
    assert names
    return [str(name) for name in names if not filecmp.cmp(one / name, other / name, shallow=False)]


def commit(project: Path) -> str:
    """Return the short name of a project's commit."""
    return timed(["git", "rev-parse", "--short=8", "HEAD"], project).stdout.strip()


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
