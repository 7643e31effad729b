"""Compare training's FLOP/s with the matrix products that the device reaches, and measure the overhead of a step.

    .venv/bin/python benchmarks/train/limit.py
    .venv/bin/python benchmarks/train/limit.py --device cuda --model config/recipes/models/qwen2.5-7b.json

Needs the base model: run `make run` first. Trains with zerolora on one rank and on all (one a core or GPU):
rows of the reference task, four at a time, and packed rows of a chat set. Right before each training `zerolora probe`
measures matrix products on as many ranks. FLOPs are those that a step needs at least (planner/cost.py, useful_flops):
recomputation and padding count as time only. Overhead is the part of a step, from the end of the previous one to its
end, that is neither forward, backward nor optimizer; waiting for other ranks is separate from it. Writes
benchmarks/results/train_limit.json.
"""

import argparse
import tempfile
from pathlib import Path

from against_trl import chat_options, mixed_task
from contest import TRAIN, Ours, Run, about, model_of, parser, ranks_of, reference_task
from measuring import medians

from zerolora.files import read_json, write_json
from zerolora.probe.probe import probe

COMPUTING = ("forward", "backward", "optimizer")
ROWS = 4  # of the reference task at a time, as in config/config.yaml


def main() -> None:
    """Take turns, compare, write."""
    made = parser(__doc__, "train_limit.json")
    chat_options(made, batch=1)
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = model_of(options, folder)
        contestants = trainings(folder, model, options)
        values: dict[str, list[dict[str, float]]] = {label: [] for label in contestants}
        for number in range(options.rounds):
            for label, ours in contestants.items():
                rate = matmul_rate(folder / "probe.json", options, ours.ranks)
                values[label].append(
                    {"matmul_flops_per_second": rate, **figures_of(ours.train(), options.warm_up, rate)}
                )
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
    """Return the trainings: both sets of rows, on one rank and on all."""
    (folder / "reference").mkdir()
    (folder / "chat").mkdir()
    reference = reference_task(folder / "reference", model, options)
    chat = mixed_task(folder / "chat", model, options)
    steps = {**TRAIN, "max_steps": options.steps, "precision": options.precision}
    pack = {"packing": True, "capacity": options.capacity}
    made = {}
    for ranks in sorted({1, ranks_of(options.device)[-1]}):
        single = {**steps, "ranks_per_node": ranks, "micro_batch": ROWS, "global_batch": ROWS * ranks}
        packed = {**steps, "ranks_per_node": ranks, "micro_batch": 1, "global_batch": options.batch * ranks}
        made[f"reference task, {ranks} ranks"] = reference.ours(f"{ranks}", single, {}, threads="1")
        made[f"chat, {ranks} ranks"] = chat.ours(f"{ranks}", packed, pack, threads="1")
    return made


def matmul_rate(path: Path, options: argparse.Namespace, ranks: int) -> float:
    """Return the FLOP/s of matrix products that each of `ranks` ranks reaches now."""
    probe(path, options.device, ranks)
    measured = read_json(path, "zerolora probe")["measured"]
    return float(measured[f"matmul_{'fp32' if options.precision == 'fp32' else '16bit'}_flops_per_second"])


def figures_of(run: Run, warm_up: int, rate: float) -> dict[str, float]:
    """Return FLOP/s of a rank, their ratio to `rate`, and the shares of time without computation."""
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


if __name__ == "__main__":
    main()
