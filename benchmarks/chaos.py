"""Kills, signals, full disks and damaged files: does the same command lead to the bytes of an undisturbed run?

    .venv/bin/python benchmarks/chaos.py --rounds 200 --seed 0

A round copies a project with a tiny model, fresh or finished, disturbs it once, and runs the same command again. It
must end in the bytes of an undisturbed run, or in one clear line whose remedy leads there; then both engines must have
nothing to do. Seed and number of a round determine its disturbance and the state of the run in which it comes. Each
round is added to benchmarks/results/chaos.json, so that rounds measured in parts add up to one result.

The project's commands run as forks of a process that has imported their libraries (tests/fork_server.py), except where
the kernel's limit on file sizes simulates a full disk, which a fork of another process would not have.
"""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from measuring import RESULTS, ROOT, machine, parser_of, put, table

TESTS = ("tests", "tests/browser", "tests/launchers", "tests/slurm", "tests/workflow")
sys.path[:0] = [str(ROOT / folder) for folder in TESTS]

from conftest import SERVERS, Project, copy_tracked, make_tiny_model, project_environment, write_rows  # noqa: E402
from engines import edit_config  # noqa: E402
from fork_server import Started  # noqa: E402

RESULT = RESULTS / "chaos.json"
ENGINES = {"snakemake": ("snakemake", "--profile", "profiles/local", "all"), "dvc": ("dvc", "repro")}
# Edits of the config before a run over a finished project, and the stages that then run.
EDITS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "report": ({"report.examples": 1}, ("resolve", "report")),
    "evaluate": ({"evaluate.max_new_tokens": 5}, ("evaluate_base", "evaluate")),
    "train": ({"train.learning_rate": 2e-2}, ("train",)),
}
# DVC's wordings of a file that is no YAML or has unknown keys, and ours.
DAMAGED_LOCK = re.compile("dvc.lock' (is invalid|validation failed)|dvc.lock: is not what DVC wrote")
OURS = re.compile('  File "[^"]*/(workflow|zerolora)/')
# Files that are equal in two undisturbed runs: those without times or memory.
SAME = (
    *("results/config.json", "results/settings/**/*.json", "results/data/**/*", "results/default/packing/*"),
    *("results/default/estimate.json", "results/default/zero.json", "results/default/adapter/*"),
    *("results/default/metrics/train.json", "results/default/metrics/loss.csv", "results/default/merged/*"),
    *("results/default/metrics/evaluate.json", "results/default/answers.json", "results/base/**/answers.json"),
)
# Globs of the files to damage, of which a round damages one.
DAMAGED = {
    "results": "results/default/**/*",
    "data": "results/data/**/*",
    "settings": "results/settings/**/*.json",
    "resolved": "results/config.json",
    "resources": "resources/**/*",
    "work": "work/**/*",
    "cache": ".dvc/cache/files/**/*",
    "records": ".snakemake/metadata/*",
    "hashes": ".snakemake/*.json",
    "receipts": "results/receipts/*",
    "lock": "dvc.lock",
}
BUSY = ("another run works in this directory", "Unable to acquire lock", "being trained by", "is busy")
WAIT_SECONDS = 600
STEP = re.compile(r"`(dvc checkout --force [^`]+)` restores it|[:;] (delete it), and|(move it out) of")


class Broken(AssertionError):
    """A round failed."""


@dataclasses.dataclass
class Round:
    """One disturbance of one copy."""

    project: Project
    engine: str
    base: str
    edit: str | None
    chance: random.Random
    output: str = ""

    def begin(self) -> Started:
        """Start the engine."""
        variables = project_environment(self.project.directory)
        server = SERVERS.of(self.project.directory, variables)
        variables["PATH"] = f"{server.stand_ins}:{variables['PATH']}"
        return server.start(ENGINES[self.engine], self.project.directory, variables)

    def again(self) -> tuple[int, str]:
        """Run the engine to its end, and return its exit code and output."""
        result = self.project.run(*ENGINES[self.engine], check=False)
        return result.returncode, result.stdout + result.stderr

    def stage(self, *among: str) -> str:
        """Choose a stage that will run."""
        stages = EDITS[self.edit][1] if self.edit else ("prepare", "pack", "train", "merge", "evaluate", "report")
        return self.chance.choice([name for name in stages if not among or name in among] or list(stages))

    def wait_for_stage(self, run: Started, stage: str) -> None:
        """Wait until the engine reports the start of a stage."""
        line = re.compile(rf"^Running stage '{stage}\W|^\d\d:\d\d:\d\d  {stage}\b.* started$", re.MULTILINE)
        until(lambda: bool(line.search(run.output() + run.errors())) or not run.runs(), f"{stage} starts")

    def wait_for(self, run: Started, kind: str) -> list[psutil.Process]:
        """Wait for a process of a kind, and return all of them."""
        processes: list[psutil.Process] = []

        def there() -> bool:
            processes[:] = self.processes(run).get(kind, [])
            return bool(processes) or not run.runs()

        until(there, f"a process that is the {kind}")
        return processes

    def processes(self, run: Started) -> dict[str, list[psutil.Process]]:
        """Return the processes in the project's directory, by kind."""
        by_kind: dict[str, list[psutil.Process]] = {"all": []}
        here = self._here()
        shells = [process for process in here if _named(process, "ZEROLORA_JOB_SHELL")]
        engines = {run.pid, *(shell.ppid() for shell in shells if shell.is_running())}
        for process in here:
            with suppress(psutil.Error):
                if process in shells:
                    kind = "shell"
                elif process.name().startswith("zl-rank"):
                    kind = "rank"
                elif process.pid in engines:
                    kind = "engine"
                elif _named(process, "-IS") or process.name() in ("sh", "rule", "snakemake", "dvc"):
                    kind = "other"
                else:
                    kind = "command"
                by_kind.setdefault(kind, []).append(process)
                by_kind["all"].append(process)
        return by_kind

    def _here(self) -> list[psutil.Process]:
        processes, here = [], str(self.project.directory)
        for name in os.listdir("/proc"):  # noqa: PTH208 (many times a second)
            with suppress(OSError, psutil.Error):
                if name.isdigit() and os.readlink(f"/proc/{name}/cwd") == here:  # noqa: PTH115 (as above)
                    processes.append(psutil.Process(int(name)))
        return processes

    def wait_for_the_end(self, run: Started) -> None:
        """Wait until the project's directory has no process."""
        until(lambda: not self.processes(run)["all"], "that all processes have ended")
        run.wait()
        self.output = run.output() + run.errors()


def send(processes: list[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the processes that still run."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def until(happened: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait for a state."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise Broken(f"not after {seconds} s: {what}")
        time.sleep(0.05)


def _named(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in word for word in process.cmdline()[:4])
    except psutil.Error:
        return False


def kill(kind: str) -> Callable[[Round], str]:
    """Return a disturbance: SIGKILL of every process of a kind, or of all, while a stage runs."""

    def disturb(this: Round) -> str:
        stage = this.stage("train") if kind in ("rank", "launcher") else this.stage()
        run = this.begin()
        this.wait_for_stage(run, stage)
        state = "started"
        if kind in ("rank", "launcher"):
            state = this.chance.choice(["started", "trains"])
            this.wait_for(run, "rank")
            if state == "trains":
                saved = "work/checkpoints/default/*/step-*.safetensors"
                until(lambda: any(this.project.directory.glob(saved)) or not run.runs(), "a checkpoint")
        elif kind in ("shell", "command"):
            this.wait_for(run, kind)
        processes = this.processes(run)
        send(processes["all"] if kind == "everything" else processes.get("command" if kind == "launcher" else kind, []))
        this.wait_for_the_end(run)
        return f"{stage} {state}"

    return disturb


def twice(number: signal.Signals) -> Callable[[Round], str]:
    """Return a disturbance: a signal to all processes, as from a terminal, twice in a row."""

    def disturb(this: Round) -> str:
        stage, run = this.stage(), this.begin()
        this.wait_for_stage(run, stage)
        this.wait_for(run, "command")
        for _ in range(2):
            send(this.processes(run)["all"], number)
            time.sleep(0.3)
        this.wait_for_the_end(run)
        no_traceback(this.output)
        return stage

    return disturb


def stop(kind: str) -> Callable[[Round], str]:
    """Return a disturbance: a process is stopped, the same command started beside it, and the engine killed."""

    def disturb(this: Round) -> str:
        stage, run = this.stage(), this.begin()
        this.wait_for_stage(run, stage)
        stopped = this.wait_for(run, kind)
        send(stopped, signal.SIGSTOP)
        if run.runs():
            code, text = this.again()
            if code == 0 or not any(line in text for line in BUSY):
                raise Broken(f"a second run beside the first: exit code {code}, {text[-600:]}")
            no_traceback(text)
            send(this.processes(run).get("engine", []))
        send(stopped, signal.SIGCONT)
        this.wait_for_the_end(run)
        return stage

    return disturb


def full_disk(this: Round) -> str:
    """Run the engine with a limit on the size of files, in place of a full disk."""
    limit = this.chance.choice([4, 16, 64, 256])
    words = " ".join(ENGINES[this.engine])
    result = subprocess.run(
        ["bash", "-c", f"ulimit -f {limit}; exec {words}"],
        cwd=this.project.directory,
        env=project_environment(this.project.directory),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    this.output = result.stdout + result.stderr
    return f"{limit} KiB"


def damage(how: str, what: str) -> Callable[[Round], str]:
    """Return a disturbance: a file is truncated, edited, flipped in place, made unreadable or deleted."""

    def disturb(this: Round) -> str:
        root = this.project.directory
        files = sorted(path for path in root.glob(DAMAGED[what]) if path.is_file() and ".tmp" not in path.name)
        if not files:
            return "nothing there"
        path = this.chance.choice(files)
        content = path.read_bytes()
        if what in ("records", "hashes"):
            this.engine = "snakemake"  # DVC does not read them
        if how == "deleted":
            path.unlink()
        elif how == "chmodded":
            path.chmod(0)
        elif how == "torn":
            path.unlink()
            path.write_bytes(content[: len(content) // 2])
        elif how == "edited":
            path.unlink()
            path.write_bytes(content + b" ")
        else:  # in place, as a failing disk does; a hard link of DVC's cache changes with it
            flipped = bytearray(content or b"0")
            flipped[len(flipped) // 2] ^= 1
            path.chmod(0o644)
            path.write_bytes(flipped)
        return str(path.relative_to(root)) if what != "cache" else "a file of the cache"

    return disturb


def edit_during(this: Round) -> str:
    """Change the config while a stage runs."""
    stage, run = this.stage(), this.begin()
    this.wait_for_stage(run, stage)
    this.edit = " ".join(dict.fromkeys([*(this.edit or "").split(), "report"]))
    edit_config(this.project, **EDITS["report"][0])
    this.wait_for_the_end(run)
    return stage


KINDS: dict[str, Callable[[Round], str]] = {
    **{f"kill {kind}": kill(kind) for kind in ("everything", "engine", "shell", "command", "launcher", "rank")},
    **{f"{number.name} twice": twice(number) for number in (signal.SIGINT, signal.SIGTERM)},
    **{f"stop {kind}": stop(kind) for kind in ("engine", "command")},
    "full disk": full_disk,
    "edit during a run": edit_during,
    **{
        f"{how} in {what}": damage(how, what)
        for how in ("torn", "edited", "flipped", "chmodded", "deleted")
        for what in DAMAGED
    },
}
RUNNING = [kind for kind in KINDS if " in " not in kind]
FRESH = [kind for kind in RUNNING if kind != "edit during a run"]


def no_traceback(text: str) -> None:
    """Raise Broken if a traceback was printed, but for that of Ctrl-C while Snakemake or DVC loads, before any code of
    the project."""
    traceback = "Traceback (most recent call last)" in text or '\n  File "' in text
    if traceback and ("KeyboardInterrupt" not in text or OURS.search(text)):
        raise Broken(f"a traceback: {text[-3000:]}")


class Chaos:
    """The projects that rounds start with, and the files of their undisturbed runs."""

    def __init__(self, folder: Path) -> None:
        """Use the projects in `folder`, or create them."""
        self.folder, self.finished = folder, folder / "finished"
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a process that a shell starts with &
        if not (folder / "ready").exists():
            self._build()
            (folder / "ready").touch()
        self._references: dict[str, dict[str, bytes]] = {}

    def _build(self) -> None:
        directory = self.finished
        copy_tracked(directory, ("docs/", "tests/", "benchmarks/"))
        make_tiny_model(directory / "model")
        write_rows(directory / "rows.json", 20)
        project = Project(directory)
        project.config["train"] |= {"ranks_per_node": 2, "micro_batch": 1, "checkpoint_steps": 1, "max_steps": 3}
        project.write_config()
        project.run("git", "init", "--quiet", "--initial-branch", "main")
        project.commit("start")
        subprocess.run(["cp", "-a", str(directory), str(self.folder / "fresh")], check=True)
        project.snakemake("all")
        self.check_agreement(project)

    def reference(self, edit: str | None) -> dict[str, bytes]:
        """Return the files of an undisturbed run over the finished project after one or more edits."""
        name = edit or "none"
        if name not in self._references:
            project = self.copy("finished", f"reference-{len(self._references)}-{os.getpid()}")
            for each in (edit or "").split():
                edit_config(project, **EDITS[each][0])
            if edit:
                project.snakemake("all")
            self._references[name] = written(project)
            shutil.rmtree(project.directory)
        return self._references[name]

    def copy(self, base: str, name: str) -> Project:
        """Return a copy of a project, with its links to DVC's cache."""
        project = Project(self.folder / name)
        subprocess.run(["cp", "-a", str(self.folder / base), str(project.directory)], check=True)
        project.config["train"] |= {"ranks_per_node": 2, "micro_batch": 1, "checkpoint_steps": 1, "max_steps": 3}
        return project

    def round(self, seed: int, number: int, kinds: list[str], cheap: bool = False) -> dict[str, Any]:
        """Make one round; return its description and how it ended. Raises Broken if it failed.

        `cheap`: over the finished project, with the edit after which the fewest stages run.
        """
        chance = random.Random(f"{seed} {number}")  # noqa: S311 (no secret)
        kind, engine = chance.choice(kinds), chance.choice(sorted(ENGINES))
        base = chance.choice(["finished", "finished", "fresh"]) if kind in FRESH else "finished"
        needs_training = kind in ("kill launcher", "kill rank")
        edits = ["train"] if needs_training else ["report", "report", "evaluate", "train"]
        if cheap:
            base, edits = "finished", ["report"]
        edit = chance.choice(edits) if base == "finished" and kind in RUNNING else None
        this = Round(self.copy(base, f"round-{seed}-{number}"), engine, base, edit, chance)
        if edit:
            edit_config(this.project, **EDITS[edit][0])
        what = {"kind": kind, "engine": engine, "base": base, "edit": edit, "seed": seed, "number": number}
        try:
            what |= {"where": KINDS[kind](this), "engine": this.engine}
            what["ended"] = self.ended(this)
        except BaseException as error:
            raise Broken(f"{what}: {error}; left in {this.project.directory}") from error
        shutil.rmtree(this.project.directory)
        return what

    def ended(self, this: Round) -> str:
        """Run the same command again, follow the remedy of its error if it fails, and return how it ended."""
        ended, lines = "in the same bytes", []
        for _ in range(6):
            code, text = this.again()
            no_traceback(text)
            if code == 0:
                break
            ended = "in a clear line, whose remedy worked"
            lines.append(text)
            if not remedied(this.project, text):
                raise Broken(f"exit code {code} without a remedy: {text[-1500:]}")
        else:
            raise Broken(f"no remedy worked: {lines[-1][-1500:]}")
        differing = [
            name
            for name, content in self.reference(this.edit).items()
            if not (path := this.project.directory / name).is_file() or path.read_bytes() != content
        ]
        if differing:
            raise Broken(f"other bytes than of an undisturbed run: {differing[:5]}; {text[-1500:]}")
        self.check_agreement(this.project)
        return ended

    def check_agreement(self, project: Project) -> None:
        """Raise Broken unless neither engine has anything to do."""
        changed = json.loads(project.run("dvc", "status", "--json").stdout)
        if changed:
            raise Broken(f"DVC calls these changed: {json.dumps(changed)[:1500]}")
        result = project.snakemake("--dry-run", "all")
        if "Nothing to be done" not in result.stdout + result.stderr:
            raise Broken(f"Snakemake would run: {(result.stdout + result.stderr)[-1500:]}")


def remedied(project: Project, text: str) -> bool:
    """Follow the remedies in the lines of an error, and return whether there were any."""
    done = False
    for line in text.splitlines():
        if match := STEP.search(line):
            path = project.directory / line.partition(": ")[0].strip()
            if match[1]:
                project.run(*match[1].split())
            else:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            done = True
    if DAMAGED_LOCK.search(text):
        (project.directory / "dvc.lock").unlink()
        done = True
    return done


def written(project: Project) -> dict[str, bytes]:
    """Return the files of SAME by name."""
    root = project.directory
    paths = {path for pattern in SAME for path in root.glob(pattern) if path.is_file()}
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(paths)}


def summary(rounds: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the number of rounds by kind and ending."""
    by_kind: dict[str, dict[str, int]] = {}
    for each in rounds:
        counts = by_kind.setdefault(each["kind"].partition(" in ")[0] if " in " in each["kind"] else each["kind"], {})
        counts[each["ended"]] = counts.get(each["ended"], 0) + 1
    return dict(sorted(by_kind.items()))


def rounds(folder: Path, seed: int, numbers: range, kinds: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Make rounds in order; a failed one has its error in "broken"."""
    chaos = Chaos(folder)
    for number in numbers:
        try:
            yield chaos.round(seed, number, kinds or list(KINDS))
        except Broken as broken:
            yield {"kind": "?", "seed": seed, "number": number, "ended": "broken", "broken": str(broken)}


def main() -> None:
    """Make rounds and add them to the result. Exits with 1 if one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round, to measure in parts")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="make rounds of these kinds and record none")
    parser.add_argument("--keep", type=Path, help="directory to work in; failed rounds stay there")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos"))
    folder.mkdir(parents=True, exist_ok=True)
    broken = False
    try:
        for each in rounds(folder, options.seed, range(options.first, options.first + options.rounds), options.kinds):
            print(json.dumps(each), flush=True)
            broken = broken or each["ended"] == "broken"
            if not options.kinds:
                put("checkpoints.md", "chaos", markdown(add(each)))
    finally:
        SERVERS.stop()
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(broken)


def markdown(result: dict[str, Any]) -> str:
    """Return the table of a result: rounds by kind and ending."""
    endings = sorted({ending for counts in result["kinds"].values() for ending in counts})
    rows = [[kind, *(counts.get(ending, 0) for ending in endings)] for kind, counts in result["kinds"].items()]
    text = (
        f"{result['count']} rounds on {result['machine']['date']} ({result['machine']['processor']}, "
        f"{result['machine']['cores']} cores):"
    )
    return f"{text}\n\n{table(['disturbance', *endings], rows)}"


def add(each: dict[str, Any]) -> dict[str, Any]:
    """Add a round to the result file, in place of an earlier one of the same seed and number; return the result."""
    earlier = json.loads(RESULT.read_text(encoding="utf-8"))["rounds"] if RESULT.exists() else []
    made = {(one["seed"], one["number"]): one for one in [*earlier, each]}
    made_rounds = [made[key] for key in sorted(made)]
    result = {"machine": machine(), "count": len(made)}
    result |= {"kinds": summary(made_rounds), "rounds": made_rounds}
    RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
