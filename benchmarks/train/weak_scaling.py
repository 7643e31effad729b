"""Train with one rank and with several, each with the same work, under every stage, and count the bytes sent.

    .venv/bin/python benchmarks/train/weak_scaling.py
    .venv/bin/python benchmarks/train/weak_scaling.py --device cuda --model config/recipes/models/qwen2.5-7b.json

Needs the base model: run `make run` first. Rows are those of the reference task, --rows of them for each rank and step.
Each rank has one thread, also when it runs alone, so that the loss is due to the other ranks: waiting, sending, and
shared caches and memory. Efficiency is tokens/s of N ranks over N times those of one, round by round. Training counts
the bytes that a rank sends (full buffers by collective, here as a ring sends them); they are compared with the cost
model's formulas (planner/cost.py). Writes benchmarks/results/train_scaling.json.
"""

import statistics
from typing import Any

from contest import TRAIN, Ours, Run, Step, about, parser, ranks_of, ratio, reference, take_turns

from zerolora.files import write_json
from zerolora.planner.choice import choose
from zerolora.planner.render import planning_of

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")


def main() -> None:
    """Take turns, compare, write."""
    made = parser(__doc__, "train_scaling.json")
    made.add_argument("--ranks", type=int, help="the several; default: one a GPU, or a core")
    made.add_argument("--rows", type=int, default=4, help="of a rank and step")
    made.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    options = made.parse_args()
    most = options.ranks or max(2, ranks_of(options.device)[-1])
    with reference(options) as task:
        ours = {
            (strategy, ranks): task.ours(
                f"{strategy}-{ranks}",
                {
                    **TRAIN, "max_steps": options.steps, "precision": options.precision, "ranks_per_node": ranks,
                    "micro_batch": options.rows, "global_batch": options.rows * ranks,
                },
                {},
                strategy,
                threads="1",
            )
            for strategy in options.strategies
            for ranks in (1, most)
        }  # fmt: skip
        runs = take_turns({label(*key): each.train for key, each in ours.items()}, options.rounds)
        result = about(options.device) | {
            "model": options.model.stem, "precision": options.precision, "ranks": most, "rows_a_rank": options.rows,
            "data": task.stats, "steps": options.steps, "warm_up": options.warm_up,
            "strategies": {
                strategy: {
                    **efficiency(runs[label(strategy, 1)], runs[label(strategy, most)], most, options.warm_up),
                    **communication(ours[strategy, most], runs[label(strategy, most)][0], options.warm_up),
                }
                for strategy in options.strategies
            },
        }  # fmt: skip
        write_json(options.output, result)


def label(strategy: str, ranks: int) -> str:
    """Return a contestant's name."""
    return f"{strategy}, {ranks} ranks"


def efficiency(one: list[Run], several: list[Run], ranks: int, warm_up: int) -> dict[str, Any]:
    """Return tokens/s of N ranks over N times those of one, and each round's tokens/s."""
    result = ratio(several, one, lambda run: run.tokens_per_second(warm_up))
    return {
        "efficiency": result["median"] / ranks,
        "tokens_per_second": {
            str(count): [run.tokens_per_second(warm_up) for run in runs] for count, runs in ((1, one), (ranks, several))
        },
    }


def communication(ours: Ours, run: Run, warm_up: int) -> dict[str, Any]:
    """Return the bytes that a rank sends in a step: counted and predicted, by collective, and their ratio.

    Additional gathers of the first steps are excluded: stage 3 releases every weight until it knows the modules' order.
    """
    share = (ours.ranks - 1) / ours.ranks
    sizes = {name.removesuffix("_bytes_per_step"): size for name, size in run.sent.items()}
    if "all_gather" in sizes:
        sizes["all_gather"] -= mean(run.steps) - mean(run.steps[warm_up:])
    counted = {name: (2 if name == "all_reduce" else 1) * share * size for name, size in sizes.items()}
    planning, _ = planning_of(ours.render, ours.folder / "estimate.json")
    predicted = choose(planning)[0].cost.moved
    return {
        "bytes_counted": counted,
        "bytes_predicted": predicted,
        "counted_over_predicted": sum(counted.values()) / sum(predicted.values()),
    }


def mean(steps: list[Step]) -> float:
    """Return the mean bytes of a step's full buffers."""
    return statistics.mean(step.communicated for step in steps)


if __name__ == "__main__":
    main()
