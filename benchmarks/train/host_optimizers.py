"""Measure the optimizers on the host, where offload updates: rates on one thread, equality, and a whole step.

    .venv/bin/python benchmarks/train/host_optimizers.py

Times are CPU seconds of one thread: a step of each optimizer on matrices of a layer, in turn, as
`train.optimizer` builds it, and of torch's AdamW unfused and with foreach. `time_over_adamw` is `host_time` in
src/zerolora/optimizers. Then 20 steps of fused and unfused AdamW with the same gradients are compared, and a training
of all weights under zero2_offload is made with either. Needs the base model (`make run`) or --model. Writes
benchmarks/results/train_host_optimizers.json.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from contest import QUIET, TRAIN, Ours, about, parser, reference
from measuring import turns

from zerolora.files import read_json, write_json
from zerolora.optimizers import OPTIMIZERS
from zerolora.optimizers.adamw import AdamW
from zerolora.train import rank
from zerolora.train.engines.deepspeed import DeepSpeedEngine
from zerolora.train.launch.launcher import environment_of
from zerolora.train.launch.topology import topology
from zerolora.train.loop import Loop

SHAPES = [(2048, 2048)] * 4 + [(5632, 2048)]  # 28 million parameters: with their states more than a cache
STEPS = 20
TIMES = "times.json"
Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def main() -> None:
    """Measure and write, or be the rank of a training."""
    if len(sys.argv) > 1 and sys.argv[1] == "rank":
        _rank()
    options = parser(__doc__, "train_host_optimizers.json").parse_args()
    torch.set_num_threads(1)
    result = about("cpu") | {"threads": 1, "parameters": sum(one * other for one, other in SHAPES)}
    result |= {"optimizers": rates(options.rounds), "fused_against_unfused": difference()}
    with reference(options) as task:
        train = {
            **TRAIN, "method": "full", "max_steps": options.steps, "precision": "fp32", "ranks_per_node": 1,
            "micro_batch": 4, "global_batch": 4,
        }  # fmt: skip
        ours = task.ours("offloaded", train, {}, "zero2_offload", threads="1")
        result |= {"zero2_offload": {"model": options.model.stem, "method": "full", **offloaded(ours, options)}}
    write_json(options.output, result)


def builders() -> dict[str, Build]:
    """Return the function that builds each optimizer, those of `train.optimizer` as on a host."""
    torchs = {
        "adamw, unfused": partial(torch.optim.AdamW, foreach=False),
        "adamw, foreach": partial(torch.optim.AdamW, foreach=True),
    }
    others = ("adafactor", "lion", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
    return {"adamw": built("adamw"), **torchs, **{name: built(name) for name in others}}


def built(name: str) -> Build:
    """Return the function that builds an optimizer of `train.optimizer`."""
    recipe = OPTIMIZERS[name]
    return lambda groups: recipe.build(groups, 1e-3, 0.0, recipe.betas, recipe.epsilon, on_host=True)


def tensors(seed: int = 0) -> list[torch.nn.Parameter]:
    """Return parameters with gradients."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for each in made:
        each.grad = torch.randn(each.shape, generator=generator)
    return made


def rates(rounds: int) -> dict[str, dict[str, float]]:
    """Return parameters/s of each optimizer, and its time over AdamW's in the same round."""
    optimizers = {name: build([{"params": tensors()}]) for name, build in builders().items()}
    for optimizer in optimizers.values():
        optimizer.step()  # allocates the states
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for name in turns(optimizers, rounds):
        started = time.process_time()
        optimizers[name].step()
        seconds[name].append(time.process_time() - started)
    count = sum(one * other for one, other in SHAPES)
    return {
        name: {
            "parameters_per_second": count / statistics.median(taken),
            "time_over_adamw": statistics.median(
                one / other for one, other in zip(taken, seconds["adamw"], strict=True)
            ),
        }
        for name, taken in seconds.items()
    }


def difference() -> dict[str, float]:
    """Return the largest difference of a weight after STEPS steps, and the largest change of a weight in them."""
    fused, unfused, start = tensors(1), tensors(1), tensors(1)
    both = built("adamw")([{"params": fused}]), torch.optim.AdamW(unfused, foreach=False, weight_decay=0.0)
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        for one, other in zip(fused, unfused, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in both:
            optimizer.step()
    pairs = list(zip(fused, unfused, start, strict=True))
    return {
        "steps": STEPS,
        "largest_difference": max(float((one - other).detach().abs().max()) for one, other, _ in pairs),
        "largest_change": max(float((one - before).detach().abs().max()) for one, _, before in pairs),
    }


def offloaded(ours: Ours, options: Any) -> dict[str, Any]:
    """Return the seconds of a step and of its optimizer, unfused and fused."""
    runs: dict[str, list[dict[str, float]]] = {"unfused": [], "fused": []}
    for name in turns(runs, options.rounds):
        runs[name].append(trained(ours, name, options.warm_up))
        print(f"zero2_offload, {name}: {runs[name][-1]}", flush=True)
    figures = {name: {key: statistics.median(each[key] for each in of) for key in of[0]} for name, of in runs.items()}
    return {**figures, "rounds": runs}


def trained(ours: Ours, name: str, warm_up: int) -> dict[str, float]:
    """Train once, and return the medians of a step's CPU seconds, and the last loss."""
    where = topology({}, 1, 1)
    assert where.listener
    script, arguments = str(Path(__file__).resolve()), ours.arguments()
    command = [sys.executable, script, "rank", name, *without(arguments, "--logs")]
    environment = environment_of("cpu") | QUIET | where.environment(0)
    subprocess.run(command, env=environment, check=True, pass_fds=[where.listener.fileno()])
    where.listener.close()
    steps = read_json(ours.folder / TIMES, "host_optimizers.py")[warm_up:]
    figures = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
    return {**figures, "loss_last": ours.read().steps[-1].loss}


def without(arguments: list[str], option: str) -> list[str]:
    """Return arguments without an option and its value."""
    index = arguments.index(option)
    return arguments[:index] + arguments[index + 2 :]


def _rank() -> None:
    """Train as the rank of this process, with AdamW as torch chooses its kernels unless it is "fused"."""
    _, _, name, *arguments = sys.argv
    if name == "unfused":
        create = AdamW.create
        recipe_class = cast(Any, AdamW)
        recipe_class.create = lambda recipe, groups, on_host, **options: create(recipe, groups, False, **options)
    sys.argv[1:] = arguments
    times: list[dict[str, float]] = []
    engine_step, loop_step = DeepSpeedEngine.step, Loop._optimizer_step

    def step(engine: Any) -> None:
        started = time.process_time()
        engine_step(engine)
        times[-1]["optimizer_seconds"] += time.process_time() - started

    def counted(loop: Any, due: bool) -> Any:
        times.append({"optimizer_seconds": 0.0})
        started = time.process_time()
        result = loop_step(loop, due)
        times[-1]["step_seconds"] = time.process_time() - started
        write_json(loop.checkpoints.folder.parents[2] / TIMES, times)
        return result

    engine, loop = cast(Any, DeepSpeedEngine), cast(Any, Loop)
    engine.step, loop._optimizer_step = step, counted
    rank.main()


if __name__ == "__main__":
    main()
