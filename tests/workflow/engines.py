"""Which stages an engine runs, or would run, read from its own words."""

import json
import os
import re
import tempfile
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml
from conftest import SERVERS, Project, project_environment

ASKER = str(Path(__file__).with_name("asker.py"))
TARGETS = {"all", "default", "judge_all"}
STARTED = re.compile(r"^\d\d:\d\d:\d\d  (\w+)((?: \S+)*?) +started$", re.MULTILINE)
WILDCARDS = re.compile(r"^    wildcards: (.+)$", re.MULTILINE)
JOB = re.compile(r"^(?:local)?rule (\w+):\n((?:    .*\n)+)", re.MULTILINE)


def snakemake_ran(project: Project, target: str = "all") -> set[str]:
    """Run `snakemake all`, or another target, and return the stages that ran, as in train@default."""
    return _jobs(project.snakemake(target))


def snakemake_would_run(project: Project) -> set[str]:
    """Return the stages that a dry run shows."""
    return _jobs(project.snakemake("--dry-run", "--verbose", "all"))


def dvc_ran(project: Project) -> set[str]:
    """Run `dvc repro` and return the stages whose command ran."""
    return set(re.findall(r"^Running stage '(.+)':", project.run("dvc", "repro").stdout, re.M))


def dvc_changed(project: Project) -> set[str]:
    """Return the stages that `dvc status` calls changed."""
    return set(json.loads(project.run("dvc", "status", "--json").stdout))


class Asker:
    """Both engines in one process (asker.py), for many questions about one project whose code stays as it is."""

    def __init__(self, project: Project) -> None:
        self._folder = tempfile.TemporaryDirectory()
        names = [str(Path(self._folder.name) / name) for name in ("questions", "answers")]
        for name in names:
            os.mkfifo(name)
        variables = project_environment(project.directory)
        text = f"import runpy; runpy.run_path({ASKER!r})['main'](*{names!r})"
        server = SERVERS.of(project.directory, variables)
        self._process = server.start(("python", "-c", text), project.directory, variables)
        self._questions, self._answers = Path(names[0]).open("w"), Path(names[1]).open()  # noqa: SIM115 (until the end)

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self._questions.close()
        self._answers.close()
        self._process.wait()
        self._folder.cleanup()

    def snakemake_would_run(self) -> set[str]:
        """Return the stages that a dry run shows."""
        return _stages_in(self._answer("snakemake"))

    def dvc_changed(self) -> set[str]:
        """Return the stages that `dvc status` calls changed."""
        return set(self._answer("dvc"))

    def settings(self) -> dict[str, dict[str, str]]:
        """Return what both engines compare of each stage besides files."""
        result: dict[str, dict[str, str]] = self._answer("settings")
        return result

    def resolve(self) -> None:
        """Do what the stage resolve does."""
        self._answer("resolve")

    def _answer(self, question: str) -> Any:
        print(question, file=self._questions, flush=True)
        line = self._answers.readline()
        assert line, f"asked for {question}, it ended with {self._process.wait()}: {self._process.errors()}"
        return json.loads(line)


Edges = dict[str, set[str]]


def with_followers(edges: Edges, stages: set[str]) -> set[str]:
    """Return `stages` and all that come after them, except that settings reach a stage by their values alone."""
    reached = set(stages)
    for stage in TopologicalSorter(edges).static_order():
        if edges.get(stage, set()) & (reached - {"resolve"}):
            reached.add(stage)
    return reached


def edges_of(project: Project) -> Edges:
    """Return {stage: the stages it depends on}."""
    edges: Edges = {}
    for line in project.run("dvc", "dag", "--dot").stdout.splitlines():
        names = re.findall(r'"([^"]+)"', line)
        if len(names) == 2:
            edges.setdefault(names[1], set()).add(names[0])
    return edges


def _jobs(result: Any) -> set[str]:
    return _stages_in(result.stdout + result.stderr)


def _stages_in(printed: str) -> set[str]:
    stages = {"@".join([rule, *filter(None, ["-".join(values.split())])]) for rule, values in STARTED.findall(printed)}
    for rule, block in JOB.findall(printed):
        if rule not in TARGETS:
            match = WILDCARDS.search(block)
            values = [each.partition("=")[2] for each in match[1].split(", ")] if match else []
            stages.add(f"{rule}@{'-'.join(values)}" if values else rule)
    return stages


def edit_config(project: Project, **values: Any) -> None:
    """Set dotted keys of the project's config and write it; a value of None removes the key."""
    for dotted, value in values.items():
        *parents, last = dotted.split(".")
        section = project.config
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = value
    project.write_config(yaml.safe_dump(project.config, sort_keys=False))
