"""Four planted regressions that `zerolora bisect` must find by real trainings: the table of docs/bisect.md.

    .venv/bin/python benchmarks/planted_regressions.py

A copy of this project trains all weights of a two-layer model to sort words into four kinds. Between its commit `good`
and each bad one lie harmless changes of settings, rows, files and code, and one that costs quality: a rate, a wrong
kind in a tenth of the training rows, a template that drops the words, or a commit of code. Each search has a clone of
the copy, trains what it needs with several seeds, and goes by the loss on test rows that no change touches. A probe's
commands are forks of a process that has imported the libraries, with the code of the probe (tests/fork_server.py), so
the seconds are without imports, and those of a machine that does other things too. Writes
benchmarks/results/bisect.json, and exits with 1 unless each search named the planted change and nothing else.
"""

import json
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from measuring import RESULTS, ROOT, last_lines, machine, parser_of, put, table

sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/launchers", "tests/slurm", "tests/workflow")]

from conftest import SERVERS, TINY_CONFIG, Project, make_tiny_model, new_project  # noqa: E402

from zerolora.files import read_json, write_json  # noqa: E402

KINDS = {
    "1": ("ant", "bee", "cat", "dog"),
    "2": ("elm", "fir", "ivy", "oak"),
    "3": ("axe", "hoe", "jar", "key"),
    "4": ("gin", "rum", "tea", "lye"),
}
FORMS = ("Sort {}", "Kind of {}", "Sort the {}", "Kind of the {}", "Sort: {}")
ROWS, TEST_ROWS = 400, 80
ROWS_FILE, TEMPLATE, SCHEDULE = "kinds/train.jsonl", "config/templates/own.jinja", "src/zerolora/train/schedule.py"
PLAIN = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
RATE = 3e-3
HARMLESS = ("src/zerolora/units.py", "src/zerolora/train/loop.py", "src/zerolora/evaluate/intervals.py")
"""Files of code that get a comment, a commit each."""
FINDS = {
    "rows": rf"{ROWS_FILE} (\d+ rows|row \d+) changed",
    "code": r"commit \w+ Return the rate",
    "template": re.escape(TEMPLATE),
    "rate": r"train\.learning_rate",
}
"""What the one line that names the cause begins with."""
ENGINE = ("snakemake", "--profile", "profiles/local", "all")
ASK = (
    "import os, sys; from multiprocessing.connection import Client; asked = Client(sys.argv[1]); "
    "asked.send(os.getcwd()); code, text = asked.recv(); print(text); sys.exit(code)"
)
"""Has the engine run in its folder, by `serve`."""


def main() -> None:
    """Plant, search, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=FINDS, nargs="*", default=[*FINDS], help="search these alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        listener = Listener(address)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            project = planted(Path(folder))
            found = kept(options.only, options.seeds)
            for name in options.only:
                found[name] = searched(project, name, options.seeds, address)
                result = {"machine": machine(), "seeds": options.seeds, "searches": found}
                write_json(RESULTS / "bisect.json", result)
                put("bisect.md", "regressions", markdown(result))
        finally:
            SERVERS.stop()
            listener.close()
    sys.exit(not all(each["names_the_plant"] for each in found.values()))


def kept(names: list[str], seeds: int) -> dict[str, Any]:
    """Return the searches of an earlier start with as many seeds, but for those that are asked for."""
    path = RESULTS / "bisect.json"
    before = read_json(path, "this script") if path.is_file() else {}
    searches = before.get("searches", {}) if before.get("seeds") == seeds else {}
    return {name: each for name, each in searches.items() if name not in names}


def serve(listener: Listener) -> None:
    """Run the engine in each folder that is asked for, with the code there."""
    while True:
        try:
            asked = listener.accept()
        except OSError:  # it is closed
            return
        with asked:
            done = Project(Path(asked.recv())).run(*ENGINE, check=False)
            asked.send((done.returncode, done.stdout + done.stderr))


def planted(folder: Path) -> Project:
    """Return a project with a branch `good`, and one for each regression."""
    project = new_project(folder / "project", make_tiny_model(folder / "model"))
    project.served = False  # servers of the states of its probes take the place of its own
    (project.directory / "kinds").mkdir()
    random_ = random.Random(0)  # noqa: S311
    rows = [row(random_) for _ in range(ROWS)]
    write(project, ROWS_FILE, rows)
    write(project, "kinds/test.jsonl", [row(random_) for _ in range(TEST_ROWS)])
    (project.directory / TEMPLATE).write_text(PLAIN)
    sections: dict[str, dict[str, Any]] = {
        "prepare": {
            "rows": {
                **{"model": "tiny", "path": "kinds", "template": TEMPLATE, "max_length": 64, "check": "exact"},
                **{"split": {"validation": 0, "test": 0}},
                "sources": {"train.jsonl": {"split": "train"}, "test.jsonl": {"split": "test"}},
            }
        },
        "train": {
            **{"method": "full", "ranks_per_node": 1, "global_batch": 16, "micro_batch": 16, "epochs": 30},
            **{"learning_rate": RATE},
        },
        "merge": {"version": False},
        "evaluate": {"split": "test", "batch": 40, "max_new_tokens": 2},
    }
    project.config = {**TINY_CONFIG, **sections}
    commit(project, "Good")
    branch(project, "good")
    train, evaluate = sections["train"], sections["evaluate"]
    train |= {"weight_decay": 1e-3, "epsilon": 1e-7, "warmup_ratio": 0.05}
    evaluate["batch"] = 80
    project.config["report"] = {"examples": 3}
    (project.directory / "NOTES.md").write_text("Notes.\n")
    (project.directory / "config/templates/unused.jinja").write_text(PLAIN)
    rows[7::80] = [row(random_) for _ in rows[7::80]]
    write(project, ROWS_FILE, [*rows, *(row(random_) for _ in range(8))])
    commit(project, "Change settings, rows and notes")
    for number, path in enumerate(HARMLESS):
        with (project.directory / path).open("a") as file:
            file.write(f"# Comment {number}.\n")
        commit(project, f"Comment on {Path(path).stem}")
    branch(project, "harmless")
    for name, plant in PLANTS.items():
        project.run("git", "checkout", "--quiet", "--detach", "harmless")
        project.config["train"] = dict(train)
        plant(project)
        commit(project, "Return the rate of a step" if name == "code" else f"Change the {name}")
        branch(project, name)
    return project


def row(random_: random.Random) -> dict[str, str]:
    """Return a question about a word, and the number of its kind."""
    kind = random_.choice([*KINDS])
    return {"instruction": random_.choice(FORMS).format(random_.choice(KINDS[kind])), "input": "", "output": kind}


def change_rate(project: Project) -> None:
    """Train with a tenth of the rate."""
    project.config["train"]["learning_rate"] = RATE / 10


def change_rows(project: Project) -> None:
    """Give every tenth training row another kind."""
    rows = [json.loads(line) for line in (project.directory / ROWS_FILE).read_text().splitlines()]
    for wrong in rows[::10]:
        wrong["output"] = str(int(wrong["output"]) % len(KINDS) + 1)
    write(project, ROWS_FILE, rows)


def change_template(project: Project) -> None:
    """Write the first word of a question alone."""
    (project.directory / TEMPLATE).write_text(PLAIN.replace("message['content']", "message['content'].split()[0]"))


def change_code(project: Project) -> None:
    """Multiply the rate of each step with the peak twice."""
    file = project.directory / SCHEDULE
    before = file.read_text()
    after = before.replace("    return peak * factor(step)\n", "    return peak * peak * factor(step)\n")
    assert after != before
    file.write_text(after)


PLANTS: dict[str, Callable[[Project], None]] = {
    "rows": change_rows,
    "code": change_code,
    "template": change_template,
    "rate": change_rate,
}


def searched(project: Project, name: str, seeds: int, address: str) -> dict[str, Any]:
    """Return what a search named, and what it took."""
    began = time.monotonic()
    done = project.run(
        *("zerolora", "bisect", "good", name, "--metric", "loss", "--seeds", str(seeds), "--yes"),
        *("--", sys.executable, "-c", ASK, address),
        check=False,
    )
    print(done.stdout, done.stderr, sep="", flush=True)
    (file,) = project.directory.glob(f"work/bisect/*-{revision(project, name)}/bisect.json")
    record = read_json(file, "zerolora bisect")
    logs = sorted((file.parent / "logs").glob("*.log"))
    for log in logs if done.returncode else ():
        print(log, *last_lines(log, 5), sep="\n", flush=True)
    probes = record["probes"].values()
    lines = [line for line in done.stdout.splitlines() if line in record.get("verdict", "").splitlines()]
    return {
        "exit_code": done.returncode,
        "verdict": record.get("verdict", ""),
        "names_the_plant": done.returncode == 0
        and len(record["causes"]) == 1
        and len(record["causes"][0]["atoms"]) == 1
        and re.match(rf"{FINDS[name]}.* costs ", lines[0]) is not None,
        "difference": record.get("difference"),
        "atoms": len(record["atoms"]),
        "probes": len(probes) - 2,
        "planned_probes": record["plan"]["single"],
        "results": sum(len(probe["metrics"]) for probe in probes),
        "trainings": sum(len(re.findall(r"train \S+ +started", log.read_text(errors="replace"))) for log in logs),
        "loss_by_seed": {probe["name"]: [each["loss"] for each in probe["metrics"]] for probe in probes},
        "seconds": round(time.monotonic() - began),
    }


def revision(project: Project, name: str) -> str:
    """Return the short name of a branch's commit."""
    return project.run("git", "rev-parse", name).stdout[:8]


def branch(project: Project, name: str) -> None:
    """Begin a branch at the last commit."""
    project.run("git", "branch", name)


def commit(project: Project, title: str) -> None:
    """Commit all files with the config."""
    project.write_config()
    project.commit(title)


def write(project: Project, path: str, rows: list[dict[str, str]]) -> None:
    """Write rows as JSON lines."""
    (project.directory / path).write_text("".join(f"{json.dumps(each)}\n" for each in rows))


def markdown(result: dict[str, Any]) -> str:
    """Return a line for each search."""
    rows = []
    for name, each in result["searches"].items():
        low, loss, high = (f"{value:.3g}" for value in sorted(map(abs, each["difference"])))
        named = each["verdict"].splitlines()[0].split(" costs ")[0] if each["exit_code"] == 0 else "nothing"
        interval = f"{loss} ({low} to {high})"
        counts = (each["atoms"], each["probes"], each["planned_probes"], each["trainings"], each["seconds"])
        rows.append((name, interval, *counts, re.sub(r"commit [0-9a-f]+", "commit", named)))
    header = ("planted", "more loss in the bad commit (95 %)", "atoms", "probes", "at most", "trainings", "seconds")
    return table((*header, "named"), rows)


if __name__ == "__main__":
    main()
