"""Hold training's FLOP/s against the matrix products that the device reaches, and count what a step spends beside them.

    .venv/bin/python benchmarks/train/limit.py
    .venv/bin/python benchmarks/train/limit.py --device cuda --model config/recipes/models/qwen2.5-7b.json

Needs the base model: run `make run` first. Trains with `zerolora train` on one rank and on all (one a core or GPU):
rows of the reference task, four at a time, and packed rows of a chat set. Right before each training `zerolora probe`
measures matrix products on as many ranks. FLOPs are those that nothing can save (planner/cost.py, useful_flops): what
is computed twice or for padding counts as time only. Overhead is the part of a step, from the end of the one before
to its
own, that is neither forward, backward nor optimizer; waiting for other ranks is told apart from it. Writes
benchmarks/results/train_limit.json.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from against_reference import VALIDATED, reference_task
from against_trl import chat_task
from contest import RESULTS, TRAIN, Ours, Run, about, add_options, model_of, ranks_of

from zerolora.files import read_json, write_json
from zerolora.probe.probe import probe

COMPUTING = ("forward", "backward", "optimizer")
ROWS = 4  # of the reference task at a time, as in config/config.yaml


def main() -> None:
    """Take turns, compare, write."""
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_of(options, folder)
        contestants = trainings(folder, model, options)
        values: dict[str, list[dict[str, float]]] = {label: [] for label in contestants}
        for number in range(options.rounds):
            for label, ours in contestants.items():
                rate = matmul_rate(folder / "probe.json", options, ours.ranks)
                values[label].append({"matmul_flops_per_second": rate, **judged(ours.train(), options.warm_up, rate)})
                print(f"round {number + 1}: {label}: {values[label][-1]}", flush=True)
        result = about(options.device) | {
            "model": options.model.stem, "precision": options.precision, "steps": options.steps,
            "warm_up": options.warm_up,
            "trainings": {
                label: {**medians(rounds), "rendered": contestants[label].zero.as_json()["zerolora"], "rounds": rounds}
                for label, rounds in values.items()
            },
        }  # fmt: skip
        write_json(options.output, result)


def trainings(folder: Path, model: Path, options: argparse.Namespace) -> dict[str, Ours]:
    """Return what is trained: both sets of rows, on one rank and on all."""
    (folder / "reference").mkdir()
    (folder / "chat").mkdir()
    reference = reference_task(folder / "reference", model, options, VALIDATED)
    chat = chat_task(folder / "chat", model, options)
    steps = {**TRAIN, "max_steps": options.steps, "precision": options.precision}
    pack = {"packing": True, "capacity": options.capacity}
    made = {}
    for ranks in sorted({1, ranks_of(options.device)[-1]}):
        single = {**steps, "ranks_per_node": ranks, "micro_batch": ROWS, "global_batch": ROWS * ranks}
        packed = {**steps, "ranks_per_node": ranks, "micro_batch": 1, "global_batch": options.accumulation * ranks}
        made[f"reference task, {ranks} ranks"] = reference.ours(f"{ranks}", single, {}, threads="1")
        made[f"chat, {ranks} ranks"] = chat.ours(f"{ranks}", packed, pack, threads="1")
    return made


def matmul_rate(path: Path, options: argparse.Namespace, ranks: int) -> float:
    """Return the FLOP/s of matrix products that each of so many ranks reaches now."""
    probe(path, options.device, ranks)
    measured = read_json(path, "zerolora probe")["measured"]
    return float(measured[f"matmul_{'fp32' if options.precision == 'fp32' else '16bit'}_flops_per_second"])


def judged(run: Run, warm_up: int, rate: float) -> dict[str, float]:
    """Return FLOP/s of a rank, their ratio to `rate`, and the shares of time beside computing."""
    steps = run.steps[warm_up:]
    seconds = sum(step.seconds for step in steps)
    flops = sum(step.flops for step in steps) / seconds
    spent = {part: sum(step.parts[part] for step in steps) for part in steps[0].parts}
    computing = sum(spent[part] for part in COMPUTING)
    return {
        "flops_per_second": flops,
        "ratio_to_matmul": flops / rate,
        "tokens_per_second": run.tokens_per_second(warm_up),
        "communication_share": spent["communication"] / seconds,
        "overhead_share": 1 - (computing + spent["communication"]) / seconds,
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median of every figure."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "train_limit.json")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of a row of the reference task")
    parser.add_argument("--longest", type=int, default=600, help="words of a conversation")
    parser.add_argument("--capacity", type=int, default=2048, help="tokens of a packed row")
    parser.add_argument("--accumulation", type=int, default=1, help="packed rows of a rank and step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
