"""Run by hand, on one device, every stage of a run that Snakemake would start, and then two trainings at once.

    .venv/bin/python benchmarks/train/stages_by_hand.py --device cuda

The reference task of the embedded default, with its own base model after `make run`, or with a config.json as --model.
The commands are those of workflow/rules/, in the order in which a run needs them; the base model's evaluation comes
first. A stage that fails is recorded with its last line, and so are those that lack its output. The two trainings are
started at once on one GPU, which src/zerolora/machine/assigned_gpus.py assigns; `overlapped` must be false. Writes
benchmarks/results/stages_by_hand.json: seconds and failure of each stage, both evaluations, and the peak memory of
training.
"""

import os
import subprocess
import sys
import time
from typing import Any

from contest import QUIET, Task, about, parser, reference, training_settings
from measuring import ROOT, last_line, last_lines, wait

from zerolora.files import canonical, read_json, write_json

SHOWN = 20  # lines of the log of a stage that fails
LONGEST_SECONDS = 900  # of one stage; only a hang takes this long
# Notes when a command has its GPU and when it ends; the device's own lock is released with the process.
TIMED = 'date +%s.%N > "$0.begun"; "$@"; code=$?; date +%s.%N > "$0.ended"; exit $code'


class Stages:
    """The stages of one run, in a folder."""

    def __init__(self, task: Task, steps: int, answered: int) -> None:
        """`steps`: optimizer steps; `answered`: held-out rows to answer."""
        self.task, self.folder = task, task.folder / "results/default"
        self.folder.mkdir(parents=True)
        train = training_settings() | {"max_steps": steps, "ranks_per_node": 1, "nodes": 1}
        resolved = task.resolved(train, {}, {})
        self.run = resolved["runs"]["default"]
        self.base_settings = resolved["evaluate"]["rows"] | {"rows": answered}
        self.run["evaluate"] |= {"rows": answered}
        self.records: list[dict[str, Any]] = []

    def commands(self) -> dict[str, list[str]]:
        """Return the command of each stage, in order."""
        task, run, folder = self.task, self.run, self.folder
        weights, packing = task.folder / "weights/model.json", folder / "packing"
        model, base, merged = task.folder / "models/model", task.folder / "results/base", folder / "merged"
        planned = {
            "estimate": folder / "estimate.json",
            "zero": folder / "zero.json",
            "reasons": folder / "render.json",
        }
        adapter, work = folder / "adapter", task.folder / "work"
        return {
            "evaluate_base": stage(
                "evaluate", self.base_settings, data=task.data, weights=weights, output=base,
                answers=base / "answers.json", work=work / "base",
            ),
            "pack": stage("pack", run["pack"], data=task.data, output=packing),
            "estimate": stage(
                "estimate", run["estimate"], model=model, packing=packing, output=planned["estimate"]
            ),
            "render": stage(
                "render", run["render"], model=model, weights=task.folder / "weights/model", data=task.data,
                estimate=planned["estimate"], output=planned["zero"], reasons=planned["reasons"],
            ),
            "train": self.training("run"),
            "merge": stage(
                "merge", run["merge"], weights=weights, adapter=adapter, data=task.data, unversioned=merged,
                output=merged,
            ),
            "merged_weights": command_of(
                "merged-weights", weights=weights, adapter=adapter, data=task.data, manifest=merged / "manifest.json"
            ),
            "evaluate": stage(
                "evaluate", run["evaluate"], data=task.data, weights=merged / "manifest.json", base=weights,
                adapter=adapter, output=folder / "metrics", answers=folder / "answers.json", work=work / "run",
            ),
            "report": stage(
                "report", run["report"], run="default", model=model, data=task.data, packing=packing, **planned,
                base=base, results=folder, lock=ROOT / "envs/requirements.lock", config=task.folder / "config.yaml",
                usage=folder / "usage.json", summary=folder / "summary.json", timings=folder / "timings.json",
                difference=folder / "metrics/difference.json", row=task.folder / "results/compare/rows/default.json",
                output=folder / "report.html",
            ),
        }  # fmt: skip

    def training(self, name: str) -> list[str]:
        """Return the command of training: the run's own as "run", others beside it."""
        folder = self.folder if name == "run" else self.task.folder / name
        return stage(
            "train", self.run["train"], data=self.task.data, packing=self.folder / "packing",
            zero=self.folder / "zero.json", weights=self.task.folder / "weights/model.json",
            checkpoints=self.task.folder / "work/checkpoints" / name, output=folder,
            logs=self.task.folder / "logs" / name,
        )  # fmt: skip

    def make(self) -> None:
        """Run all stages; record the seconds of each, and why it failed."""
        for name, command in self.commands().items():
            log, started = self.task.folder / f"{name}.log", time.monotonic()
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, env=os.environ | QUIET, stdout=file, stderr=file, cwd=self.task.folder
                )
            (code,) = wait([process], LONGEST_SECONDS)
            failed = None if code == 0 else f"exit code {code}: {last_line(log)}"
            seconds = round(time.monotonic() - started, 1)
            self.records.append({"stage": name, "seconds": seconds, "failed": failed})
            print(f"{name}: {failed or 'done'} after {seconds} s", flush=True)
            if failed:
                print(*last_lines(log, SHOWN), sep="\n", flush=True)

    def both(self) -> dict[str, Any]:
        """Start two trainings at once on the one GPU; return whether they overlapped, and why one failed."""
        folder, processes = self.task.folder, {}
        for name in ("one", "two"):
            command = ["sh", "-c", TIMED, str(folder / name), *self.training(name)]
            own = os.environ | QUIET | {"TMPDIR": str(folder)}
            assigned = [sys.executable, "-m", "zerolora.machine.assigned_gpus", "1", "1", "1", *command]
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(assigned, env=own, stdout=log, stderr=log, cwd=folder)
        codes = wait(list(processes.values()), LONGEST_SECONDS)
        failed = [
            f"{name}: {last_line(folder / f'{name}.log')}" for name, code in zip(processes, codes, strict=True) if code
        ]
        if failed or None in codes:
            return {"overlapped": None, "failed": "; ".join(failed) or f"not done after {LONGEST_SECONDS} s"}
        times = [[float((folder / f"{name}.{at}").read_text()) for at in ("begun", "ended")] for name in processes]
        (_, first_end), (second_begin, _) = sorted(times)
        return {"overlapped": second_begin < first_end, "failed": None}


def stage(name: str, settings: Any, **options: Any) -> list[str]:
    """Return the command of a stage."""
    return command_of("stage", name, settings=canonical(settings), **options)


def command_of(*words: str, **options: Any) -> list[str]:
    """Return a command of zerolora."""
    made = [sys.executable, "-m", "zerolora", *words]
    return made + [text for name, value in options.items() for text in (f"--{name}", str(value))]


def main() -> None:
    """Run all, write."""
    made = parser(__doc__, "stages_by_hand.json")
    made.add_argument("--rows", type=int, default=64, help="held-out rows to answer")
    options = made.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    result: dict[str, Any] = about(options.device) | {"model": options.model.stem}
    with reference(options, validated=None) as task:
        stages = Stages(task, options.steps, options.rows)
        stages.make()
        result["stages"] = stages.records
        result["two_trainings"] = stages.both()
        result["metrics"] = {
            name: read_json(path, "evaluate")
            for name, path in {
                "base": task.folder / "results/base/evaluate.json",
                "tuned": stages.folder / "metrics/evaluate.json",
                "training": stages.folder / "metrics/train_resources.json",
            }.items()
            if path.is_file()
        }
    failures = {each["stage"]: each["failed"] for each in result["stages"] if each["failed"]}
    overlapped = {"overlapped": "two trainings on one GPU at once"} if result["two_trainings"]["overlapped"] else {}
    result["failures"] = (
        failures
        | overlapped
        | ({"two_trainings": result["two_trainings"]["failed"]} if result["two_trainings"]["failed"] else {})
    )
    write_json(options.output, result)
    print(result["failures"] or "nothing failed")


if __name__ == "__main__":
    main()
