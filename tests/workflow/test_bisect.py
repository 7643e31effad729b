"""`zerolora bisect` on projects under git: planted regressions, what a probe has, and what is refused.

Most probes are run by a stand-in for Snakemake that computes a metric from the config, rows, template and code of its
folder, since what is tested is which folder it gets; one bisection trains.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY_CONFIG, Project, project_environment, served, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEMPLATE = "config/templates/own.jinja"
PLAIN = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
UNITS = "src/zerolora/units.py"
STAND_IN = """
import json, os, random, sys
from pathlib import Path
import yaml
from zerolora.units import GIB

config = yaml.safe_load(Path("config/config.yaml").read_text())
rows, train = json.loads(Path(config["prepare"]["rows"]["path"]).read_text()), config["train"]
with Path(sys.argv[1]).open("a+") as file:
    file.write(Path.cwd().name + "\\n")
    file.seek(0)
    if len(file.readlines()) == int(os.environ.get("KILL_AT", 0)):
        if "TRAINS" not in os.environ:
            os.kill(os.getppid(), 9)
            sys.exit(1)
        Path("results/default/checkpoint").mkdir(parents=True, exist_ok=True)
        sys.exit("CUDA out of memory")
if "GIT_DIR" in os.environ:
    sys.exit("a hook's repository")
if not Path("model/config.json").exists():
    sys.exit("model: there is no such directory; correct the path")
if train.get("betas") and "epsilon" not in train:
    sys.exit("config/config.yaml: train.betas: needs train.epsilon; add it")
accuracy = 0.9 - 0.2 * (train["learning_rate"] > 0.1) - 0.2 * (GIB != 1024**3)
accuracy -= 0.2 * ("Answer" in Path(config["prepare"]["rows"]["template"]).read_text())
accuracy -= 2 * sum(row["output"] == "wrong" for row in rows) / len(rows)
accuracy -= 0.2 * (train["max_steps"] == 9 and train["lora"]["r"] == 9)
(run, values), = config["runs"].items()
first = train.get("seed", 42)
for seed in range(first, first + values.get("repeats", 1)):
    name = run if seed == first else f"{run}-seed{seed}"
    folder = Path("results", name)
    folder.mkdir(parents=True, exist_ok=True)
    noise = random.Random(f"{seed}{accuracy}").gauss(0, 0.002)
    if accuracy > 0.8:
        (folder / "metrics").mkdir(exist_ok=True)
        (folder / "metrics/difference.json").write_text(json.dumps({"accuracy": accuracy + noise}))
    (folder / "summary.json").write_text(json.dumps({"accuracy": accuracy + noise, "loss": 1 - accuracy, "own": 1.0}))
"""


class Planted:
    """A small project with code of its own in a folder of its repository, and harmless changes after its commit
    `good`."""

    def __init__(self, folder: Path) -> None:
        self.directory, self.script = folder / "repository/project", folder / "stand_in.py"
        self.runs = folder / "runs"
        folder.mkdir(exist_ok=True)
        self.script.write_text(STAND_IN)
        self.train: dict[str, Any] = {}
        self.path = "rows.json"
        self.write(UNITS, "GIB = 1024**3\n")
        self.write("src/zerolora/__init__.py", "")
        self.write(".gitignore", "/work/\n/results/\n/model/\n__pycache__/\n")
        self.write("model/config.json", "{}")  # in no commit: the probes have it too
        self.write(TEMPLATE, PLAIN)
        self.git("init", "--quiet", "--initial-branch", "main", "..")
        write_rows(self.directory / "rows.json", 20)
        self.commit("good", **TINY_CONFIG["train"])
        self.git("branch", "good")
        further = {
            "weight_decay": 0.1,
            "warmup_ratio": 0.1,
            "schedule": "linear",
            "betas": [0.9, 0.98],
            "epsilon": 1e-7,
        }
        self.write("NOTES.md", "Notes.\n")
        self.write("../beside.txt", "In no project.\n")
        rows = self.rows()
        self.write_rows([rows[1], rows[0], *rows[2:]])
        self.commit("settings, notes, order of rows", **further)
        for number in range(3):
            self.write(f"src/zerolora/harmless{number}.py", "")
            self.commit(f"code {number}")
        self.git("branch", "harmless")

    def write(self, path: str, text: str) -> None:
        (self.directory / path).parent.mkdir(parents=True, exist_ok=True)
        (self.directory / path).write_text(text)

    def git(self, *arguments: str) -> str:
        command = ["git", *arguments]
        environment = project_environment(ROOT)
        done = subprocess.run(command, cwd=self.directory, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    def commit(self, message: str, **train: Any) -> None:
        """Commit all files, and a config with these values of `train` besides the former ones."""
        self.train |= train
        config = json.loads(json.dumps(TINY_CONFIG | {"train": self.train}))
        config["prepare"]["rows"] |= {"template": TEMPLATE, "path": self.path}
        self.write("config/config.yaml", yaml.safe_dump(config))
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def rows(self) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = json.loads((self.directory / "rows.json").read_text())
        return result

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        self.write("rows.json", json.dumps(rows, indent=0))

    def begin(self, branch: str, start: str = "harmless") -> None:
        """Begin a branch at a commit, with the harmless changes by default."""
        self.git("checkout", "--quiet", "--force", "-B", branch, start)
        config = yaml.safe_load((self.directory / "config/config.yaml").read_text())
        self.train, self.path = config["train"], "rows.json"

    def bisect(self, *arguments: str, code: int = 0, **variables: str) -> str:
        """Return what the command prints, with the stand-in."""
        command = ("zerolora", "bisect", *arguments, "--", sys.executable, str(self.script), str(self.runs))
        done = served(*command, directory=self.directory, **variables)
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def ran(self) -> int:
        """Return how often the stand-in has begun."""
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0

    def record(self, bad: str) -> dict[str, Any]:
        """Return bisect.json of the bisection with this bad commit."""
        commit = self.git("rev-parse", bad)[:8]
        (file,) = self.directory.glob(f"work/bisect/*-{commit}/bisect.json")
        result: dict[str, Any] = json.loads(file.read_text())
        return result


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    planted = Planted(tmp_path_factory.mktemp("bisect"))
    planted.begin("worse")
    planted.commit("worse", learning_rate=0.2)
    return planted


def rate(planted: Planted) -> None:
    planted.train["learning_rate"] = 0.2


def rows(planted: Planted) -> None:
    mislabelled = [
        row | ({"output": "wrong"} if number in (3, 13) else {}) for number, row in enumerate(planted.rows())
    ]
    planted.write_rows(mislabelled)


def template(planted: Planted) -> None:
    planted.write(TEMPLATE, PLAIN + "Answer:")


def code(planted: Planted) -> None:
    """Of as many bytes as before, within the same second, by which Python tells compiled files."""
    planted.write(UNITS, "GIB = 1000**3\n")


CAUSES: dict[Callable[[Planted], None], str] = {
    rate: "train.learning_rate 0.01 -> 0.2 costs 0.2",
    rows: "rows.json 2 rows changed, among rows 4 to 14 costs 0.2",
    template: f"{TEMPLATE} costs 0.2",
    code: "the regression costs 0.2",
}


@pytest.mark.parametrize("plant", CAUSES, ids=lambda plant: plant.__name__)
def test_planted_regression_is_found(planted: Planted, plant: Callable[[Planted], None]) -> None:
    """Among harmless changes of every kind, in at most 2 log2 of the atoms. In the user's folder nothing changes. The
    command runs in a hook of git."""
    name = plant.__name__
    planted.begin(name)
    plant(planted)
    planted.commit("the regression")
    tree = {file: file.stat().st_mtime_ns for file in planted.directory.glob("[!.w]*/**/*") if file.is_file()}
    before = planted.ran()
    said = planted.bisect("good", name, "--yes", GIT_DIR=planted.git("rev-parse", "--absolute-git-dir").strip())
    assert {file: file.stat().st_mtime_ns for file in planted.directory.glob("[!.w]*/**/*") if file.is_file()} == tree
    assert planted.git("status", "--porcelain") == "" and planted.git("worktree", "list").count("\n") == 1
    (line,) = [line for line in said.splitlines() if " costs 0.2" in line]
    assert CAUSES[plant] in line and line.endswith(")") and " of accuracy (95 %: 0.1" in line
    assert "BAD without this costs" in said and "no loss beyond the noise" in said
    record = planted.record(name)
    (cause,) = record["causes"]
    assert len(cause["atoms"]) == 1 and cause["atoms"][0] in line
    states = len(record["probes"]) - 2  # good and bad
    assert states <= record["plan"]["single"] <= 2 * math.ceil(math.log2(len(record["atoms"]))) + 2 * 2 + 1
    ran = planted.ran()
    assert ran - before >= len([each for each in record["probes"].values() if each["metrics"]])
    assert line in planted.bisect("good", name, "--yes") and planted.ran() == ran  # all is kept


def test_interaction_is_one_cause_and_a_killed_search_resumes(planted: Planted) -> None:
    """Two keys that only together cost quality; betas and epsilon, of which one cannot run without the other. What
    failed after a stage began is tried again."""
    planted.begin("interaction")
    planted.commit("the interaction", max_steps=9, lora={"r": 9})
    before = planted.ran()
    planted.bisect("good", "interaction", "--yes", code=-9, KILL_AT=str(before + 5))
    kept = len(planted.record("interaction")["probes"])
    assert 2 < kept <= 4
    planted.bisect("good", "interaction", "--yes", TRAINS="1", KILL_AT=str(planted.ran() + 1))
    (failed,) = [each for each in planted.record("interaction")["probes"].values() if each["began"] and each["reason"]]
    assert failed["reason"] == "CUDA out of memory"
    said = planted.bisect("good", "interaction", "--yes")
    assert "CUDA" not in said and "What was refused before its first stage is not tried again; " in said
    assert "train.lora.r 4 -> 9 and train.max_steps 2 -> 9 cost together 0.2" in said
    assert "an interaction: none costs it alone" in said and "alone: train.lora.r 4 -> 9: " in said
    record = planted.record("interaction")
    (cause,) = record["causes"]
    assert len(cause["atoms"]) == 2
    refused = [each for each in record["probes"].values() if each["reason"]]
    assert refused and all("train.betas: needs train.epsilon" in each["reason"] for each in refused)


def test_moved_rows_and_code_that_needs_an_earlier_commit(planted: Planted) -> None:
    """A data set that moved to another file is compared row by row. A commit's code without the one that it builds on
    conflicts, which costs no run: both are named."""
    planted.begin("moved", "good")
    planted.git("mv", "rows.json", "moved.json")
    planted.path = "moved.json"
    planted.write("moved.json", json.dumps([*json.loads((planted.directory / "moved.json").read_text())[:-1]]))
    planted.write(UNITS, "# One.\nGIB = 1024**3\n")
    planted.commit("first")
    planted.write(UNITS, "# Two.\nGIB = 1000**3\n")
    planted.commit("second")
    before = planted.ran()
    said = planted.bisect("good", "moved", "--yes")
    first, second = (
        f"commit {planted.git('log', '-1', '--format=%h %s', each).strip()}" for each in ("moved^", "moved")
    )
    assert planted.record("moved")["atoms"] == ["moved.json row 20 removed", "code of 2 commits"]
    assert f"{first} and {second} cost together 0.2" in said
    assert f"alone: {second}: cannot run alone (git apply: " in said
    assert planted.ran() - before <= 8


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("good", "gone", "--yes"), 2, "'gone' is no revision that git knows here; `git log --oneline` lists them"),
        (("good", "HEAD^{tree}", "--yes"), 2, "is no revision that git knows here"),
        (("good", "good", "--yes"), 2, "'good' and 'good' are the same commit"),
        (("good", "worse", "--run", "other"), 2, "config/config.yaml has no run 'other'; choose among default"),
        (("good", "worse", "--metric", "own"), 2, "which way is better is not known; add --better higher or lower"),
        (("good", "worse", "--metric", "pref", "--yes"), 2, "a result has no such number; choose among accuracy, "),
        (
            ("good", "worse", "--metric", "loss"),
            0,
            "--metric loss: results/default has no such number, but the commits",
        ),
        (("good", "worse", "--seeds", "1"), 2, "the noise of one seed is not known; use 2 or more"),
        (("good", "worse"), 0, "Nothing has run; the same command with --yes starts it."),
        (("good", "harmless", "--yes"), 1, "not beyond the noise of the seeds"),
        (("good", "worse", "--metric", "own", "--better", "lower", "--yes"), 1, "not beyond the noise of the seeds"),
        (("worse", "good", "--yes"), 1, "BAD is the better one"),
        (("good", "noted", "--yes"), 1, "not beyond the noise of the seeds"),
    ],
)
def test_what_cannot_be_bisected_is_said_in_one_line(
    planted: Planted, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    if "noted" in arguments:
        planted.begin("noted", "good")
        planted.write("NOTES.md", "Notes.\n")
        planted.commit("notes")
    own = planted.directory / "results/default/summary.json"  # of the user, before anything runs
    if "loss" in arguments:
        own.parent.mkdir(parents=True)
        own.write_text('{"accuracy": 0.9, "chosen": true}')
    before = planted.ran()
    said = planted.bisect(*arguments, code=code)
    own.unlink(missing_ok=True)
    (line,) = [line for line in said.splitlines() if expected in line]
    if code == 2:
        assert planted.ran() == before + ("pref" in arguments) and said.splitlines()[-1] == line
    elif "--yes" not in arguments:
        assert "Plan: both revisions with 3 seeds (6 runs)" in said and planted.ran() == before


def test_project_without_code(planted: Planted, tmp_path: Path) -> None:
    """The installed package runs the probes, again if a file in no commit changes. That dvc.lock has another version of
    it is said, since no probe has it."""
    lock = "stages:\n  train@default:\n    params:\n      results/settings/runs/default.json:\n        code.train: "
    planted.begin("whole", "good")
    project, planted.directory = planted.directory, tmp_path / "project"
    try:
        for path in ("rows.json", TEMPLATE, ".gitignore", "model/config.json"):
            planted.write(path, (project / path).read_text())
        planted.git("init", "--quiet", ".")
        planted.write("dvc.lock", f"{lock}one\n")
        planted.commit("good")
        planted.write("dvc.lock", f"{lock}two\n")
        template(planted)
        planted.commit("bad", learning_rate=0.01)
        said = planted.bisect("HEAD~1", "HEAD", "--yes")
        before = planted.ran()
        planted.write("model/config.json", '{"another": "model"}')
        assert "costs 0.2" in planted.bisect("HEAD~1", "HEAD", "--yes") and planted.ran() > before
    finally:
        planted.directory = project
        planted.git("checkout", "--quiet", "--force", "harmless")
    assert f"{TEMPLATE} costs 0.2" in said
    assert "every probe runs the installed zerolora" in said
    assert "different versions of it, as dvc.lock says" in said


def test_rows_in_dvc_are_compared_and_its_cache_is_left_as_it_is(planted: Planted) -> None:
    """The rows that DVC has of each commit, from its cache."""

    def dvc(*arguments: str) -> None:
        assert served("dvc", *arguments, directory=planted.directory).returncode == 0

    planted.begin("dvc-good", "good")
    dvc("init", "--quiet", "--subdir")
    planted.git("rm", "--quiet", "--cached", "rows.json")
    dvc("add", "--quiet", "rows.json")
    planted.commit("dvc")
    planted.git("checkout", "--quiet", "-b", "dvc-bad")
    rows(planted)
    dvc("add", "--quiet", "rows.json")
    planted.commit("rows")
    cache = planted.directory / ".dvc/cache/files"
    before = {file: file.read_bytes() for file in cache.rglob("*") if file.is_file()}
    repository = planted.git("rev-parse", "--absolute-git-dir").strip()
    said = planted.bisect("dvc-good", "dvc-bad", "--yes", GIT_DIR=repository, GIT_WORK_TREE="/")  # as in a hook
    assert "rows.json 2 rows changed, among rows 4 to 14 costs 0.2" in said
    assert {file: file.read_bytes() for file in cache.rglob("*") if file.is_file()} == before
    planted.git("checkout", "--quiet", "--force", "harmless")


def test_uncommitted_changes_are_not_compared(planted: Planted) -> None:
    planted.begin("dirty")
    planted.write(TEMPLATE, PLAIN + "Answer:")
    said = planted.bisect("good", "worse")
    assert f"without the uncommitted changes in {TEMPLATE}" in said
    planted.git("checkout", "--quiet", "--force", "harmless")


def test_trained_probes_use_results_that_dvc_has(copy_finished: Callable[[str], Project]) -> None:
    """The finished run of the good commit is not trained again, only its second seed."""
    project = copy_finished("bisect-trained")
    project.commit("good")
    project.config["train"]["learning_rate"] = 1e-9
    project.config["prepare"]["rows"]["template"] = TEMPLATE
    (project.directory / TEMPLATE).write_text(PLAIN)
    project.write_config()
    project.commit("bad")
    options = ("--metric", "loss", "--seeds", "2", "--yes")
    command = ("snakemake", "--profile", "profiles/local", "all")
    done = project.run("zerolora", "bisect", "HEAD^", "HEAD", *options, "--", *command, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^train.learning_rate 0.01 -> 1e-09 costs 0.\d+ of loss \(95 %: 0", done.stdout, re.MULTILINE)
    good, bad, *others = sorted(project.directory.glob("work/bisect/*/logs/*.log"))
    # Both seeds are ready at once, so that Snakemake begins with either.
    trained = [sorted(re.findall(r"train (\S+) +started", log.read_text())) for log in (good, bad)]
    assert trained == [["default-seed43"], ["default", "default-seed43"]] and len(others) == 2
    assert "restored from DVC's cache" in good.read_text()
    assert project.run("git", "status", "--porcelain").stdout == ""
