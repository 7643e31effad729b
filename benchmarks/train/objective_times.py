"""Compare the predicted seconds of a step with the measured ones, for each objective.

    .venv/bin/python benchmarks/train/objective_times.py

Probes this machine, predicts a step of each objective under each of --strategies, and trains with zerolora, in
turn. The model is SmolLM2-135M with --layers of its layers and random weights, on two ranks of a thread each, in fp32.
All objectives train the same sequences, two answers to each prompt: as two rows for next-token loss and KTO, as a pair
for the others. A step's seconds are the median of those after --warm-up. choice.py shows how far predictions of
next-token loss are off; here each objective is compared with it in the same round, measured and predicted. Writes
benchmarks/results/objective_times.json.
"""

import csv
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from chat_rows import document_words
from contest import TRAIN, Ours, about, finished, model_of
from measuring import RESULTS, ROOT, parser_of, random_model, turns
from preference_peers import OursOfPairs, Pairs

from zerolora.files import canonical, read_json, write_json
from zerolora.planner.choice import choose
from zerolora.planner.render import planning_of
from zerolora.probe.probe import probe
from zerolora.train.objectives import OBJECTIVES

RANKS = 2
PAIRS = 4  # of a rank and step, one micro-batch
PROMPT, ANSWER = (20, 60), (10, 50)
"""Fewest and most words."""
STRATEGIES = ("ddp", "zero3")
FIRST = "sft"


def main() -> None:
    """Probe, predict, train in turn, compare, write."""
    made = parser_of(__doc__)
    made.add_argument("--model", type=Path, default=ROOT / "config/recipes/models/smollm2-135m.json")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--strategies", nargs="+", default=STRATEGIES)
    made.add_argument("--steps", type=int, default=8, help="optimizer steps of each training")
    made.add_argument("--warm-up", type=int, default=2, help="the first of these steps, which do not count")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--objectives", nargs="+", default=[*OBJECTIVES], help="only these, added to the known results")
    made.add_argument("--output", type=Path, default=RESULTS / "objective_times.json")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = about("cpu") | {"model": options.model.stem, "layers": options.layers, "ranks": RANKS, "pairs": PAIRS}
        probe(folder / "probe.json", "cpu", RANKS)
        random_model(options.model, torch.float32, folder / "fewer", options.layers)
        options.model, options.precision = folder / "fewer/config.json", "fp32"
        options.tokenizer = folder / "none"
        model = model_of(options, folder)
        tasks = {
            name: Rows(folder / name, model, name, options.steps)
            for name in {FIRST: 0} | dict.fromkeys(options.objectives)
        }
        trainings = {
            f"{name}, {strategy}": prepared(task, strategy) for name, task in tasks.items()
            for strategy in options.strategies
        }  # fmt: skip
        known = read_json(options.output, "this script")["rows"] if {*options.objectives} < {*OBJECTIVES} else {}
        for measured in compared(trainings, options.rounds, options.warm_up):
            chosen = options.objectives if known else tasks
            rows = known | {name: row for name, row in measured["rows"].items() if name.split(", ")[0] in chosen}
            write_json(options.output, result | {"rows": rows})


class Rows(Pairs):  # type: ignore[misc]
    """The rows of an objective."""

    def __init__(self, folder: Path, model: Path, objective: str, steps: int) -> None:
        self.objective: dict[str, Any] = {"objective": objective}
        if OBJECTIVES[objective].taught:
            self.objective[objective] = {"teacher": "model"}
        self.probed = read_json(folder.parent / "probe.json", "zerolora probe")
        folder.mkdir()
        rows = as_rows(OBJECTIVES[objective].rows, steps * PAIRS * RANKS)
        path = folder / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        self.micro_batch = PAIRS * len(rows) // (steps * PAIRS * RANKS)
        section = {"path": str(path), "max_length": 1024, "split": {"validation": 0, "test": 0}}
        super().__init__(folder, model, "cpu", section)
        if OBJECTIVES[objective].reference:
            self.reference()
        if OBJECTIVES[objective].taught:
            self.teach()

    def teach(self) -> None:
        """Compute the values of a teacher, which is the model itself."""
        settings = self.resolved({"precision": "fp32"}, {}, {})["runs"]["default"]["teacher"]
        paths = {"data": self.data, "student": self.folder / "models/model"}
        paths |= {"weights": self.folder / "weights/model.json", "output": self.folder / "teacher"}
        options = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
        command = [sys.executable, "-m", "zerolora", "stage", "teacher", "--settings", canonical(settings), *options]
        finished([command], [{"OMP_NUM_THREADS": "1"}], self.folder)

    def resolved(self, train: dict[str, Any], pack: dict[str, Any], render: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of every stage, with the measured hardware."""
        result = super().resolved(train, pack, render)
        result["runs"]["default"]["render"]["hardware"] = {"probe": self.probed, "disk": "nvme"}
        return result


class OursTaught(Ours):  # type: ignore[misc]
    """Training with the teacher of its task."""

    def command(self) -> list[str]:
        """Return the command of `zerolora stage train`."""
        return [*super().command(), "--teacher", str(self.task.folder / "teacher")]


def as_rows(kind: str, count: int) -> list[dict[str, Any]]:
    """Return pairs of random words as rows that hold `kind`: a row for a pair, or for each of its answers."""
    draw, words = random.Random(0), document_words()  # noqa: S311 - data, not secrets

    def text(fewest: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(fewest, most)))

    result: list[dict[str, Any]] = []
    for _ in range(count):
        prompt = [{"role": "user", "content": text(*PROMPT)}]
        good, bad = ([{"role": "assistant", "content": text(*ANSWER)}] for _ in range(2))
        if kind == "pairs":
            result.append({"prompt": prompt, "chosen": good, "rejected": bad})
        elif kind == "labelled":
            result += [
                {"prompt": prompt, "completion": answer, "label": label}
                for answer, label in ((good, True), (bad, False))
            ]
        else:
            result += [{"messages": prompt + answer} for answer in (good, bad)]
    return result


def prepared(task: Rows, strategy: str) -> Ours:
    """Return a training, ready to start."""
    train = {
        **TRAIN, "global_batch": task.micro_batch * RANKS, "micro_batch": task.micro_batch, "ranks_per_node": RANKS,
        "precision": "fp32", "epochs": 1,
    }  # fmt: skip
    made = OursOfPairs if (task.folder / "reference").is_dir() else Ours
    made = OursTaught if (task.folder / "teacher").is_dir() else made
    return made(task, task.folder / strategy, train, {}, strategy, "1")


def compared(trainings: dict[str, Ours], rounds: int, warm_up: int) -> Iterator[dict[str, Any]]:
    """Yield the figures after each round."""
    predicted = {name: predicted_seconds(training) for name, training in trainings.items()}
    measured: dict[str, list[float]] = {name: [] for name in trainings}
    for number, name in enumerate(turns(trainings, rounds), 1):
        measured[name].append(step_seconds(trainings[name], warm_up))
        print(f"{name}: predicted {predicted[name]:.3f} s, measured {measured[name][-1]:.3f} s", flush=True)
        if number % len(trainings):
            continue
        yield {
            "rows": {
                name: {
                    "predicted_seconds": predicted[name],
                    "measured_seconds": statistics.median(seconds),
                    "rounds": seconds,
                    "measured_over_predicted": statistics.median(seconds) / predicted[name],
                    "against_sft": against(name, predicted, measured),
                }
                for name, seconds in measured.items()
            }
        }


def against(name: str, predicted: dict[str, float], measured: dict[str, list[float]]) -> dict[str, float]:
    """Return the seconds over those of next-token loss under the same strategy, predicted and measured."""
    first = f"{FIRST}, {name.split(', ')[1]}"
    rounds = [one / other for one, other in zip(measured[name], measured[first], strict=True)]
    return {"predicted": predicted[name] / predicted[first], "measured": statistics.median(rounds)}


def predicted_seconds(training: Ours) -> float:
    """Return the seconds of a step that `zerolora stage render` predicts."""
    planning, _ = planning_of(training.render, training.folder / "estimate.json")
    return choose(planning)[0].seconds


def step_seconds(training: Ours, warm_up: int) -> float:
    """Train; return the median seconds of a step."""
    finished([training.command()], [{"OMP_NUM_THREADS": "1"}], training.folder)
    with (training.folder / "run/metrics/telemetry.csv").open(newline="") as file:
        steps = [float(row["seconds"]) + float(row["between_seconds"]) for row in csv.DictReader(file)]
    return statistics.median(steps[warm_up:])


if __name__ == "__main__":
    main()
