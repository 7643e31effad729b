"""The canary: before a run under risky settings, a short training under them must agree with one under safe settings.

Both make the same first optimizer steps, with the same seed and data. Their curves are saved, so that a resumed run
does not repeat them; canary_verdict.py lets other runs share those of a canary that passed:

    work/canary/<run>/<key>.json
"""

import csv
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerolora.config.compared import compared
from zerolora.config.settings import Canary, TrainingChoice, TrainSettings
from zerolora.config.values import NO_TRACKER
from zerolora.errors import UserError
from zerolora.files import MANIFEST, canonical, read_json, write_json
from zerolora.log import LOGGER
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.launch.canary_verdict import Verdict

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""Relative tolerance of a loss by precision: about ten times that between strategies in this project's tests."""
NORM_TOLERANCE = 10
"""Tolerance of a gradient's norm, in those of a loss. It reveals a wrong scale of gradients, which AdamW hides."""
Curves = dict[str, list[float]]
"""Loss and norm of the gradient of each step."""
Start = Callable[[int, list[str], Path], None]
"""Runs the ranks of training number n with arguments and a directory for logs, and waits for them."""


def compare_first_steps(settings: TrainSettings, paths: dict[str, Path], logs: Path, start: Start) -> None:
    """Run the canary of zero.json, if it has not run before. Raises UserError if the two trainings differ.

    `paths` are the arguments of training by option. The launcher of every node calls it: all take part in both
    trainings, and read the result of rank 0.
    """
    zero = ZeroJson.read(paths["zero"])
    canary = zero.choice.canary
    if canary is None:
        return
    checkpoints = paths["checkpoints"]
    result = checkpoints.parents[1] / "canary" / checkpoints.name / f"{_key(settings, zero, paths)}.json"
    # Nodes may have separate homes, and all take part in a canary or none.
    verdict = Verdict(settings, zero, paths) if settings.nodes == 1 and not result.exists() else None
    passed = verdict.read() if verdict else None
    if verdict and passed and not _differing(passed.curves, zero.choice):
        LOGGER.info(f"canary: passed on {passed.date} on this machine, with these versions and setting: {verdict.path}")
        record = {"reasons": canary.reasons, "curves": passed.curves, "seconds": 0.0, "passed": passed.date}
        write_json(result, record)
        return
    if not result.exists():
        started = time.monotonic()
        LOGGER.info(f"canary: the first {canary.steps} steps, twice: {'; '.join(canary.reasons)}")
        work = result.with_suffix("")
        alone = zero.choice.model_copy(update={"canary": None})
        pair = {"risky": ZeroJson(options=zero.options, choice=alone), "safe": ZeroJson.of(canary.zero)}
        curves = {}
        for number, (name, own) in enumerate(pair.items()):
            arguments = _arguments(settings, canary.steps, paths, own, work / name)
            start(number, arguments, logs / "canary" / name)
            curves[name] = _curves(work / name / "telemetry.csv")
        seconds = time.monotonic() - started
        write_json(result, {"reasons": canary.reasons, "curves": curves, "seconds": seconds})
        shutil.rmtree(work, ignore_errors=True)
        LOGGER.info(f"canary: took {seconds:.0f} s, which training's own times do not count")
    record = read_json(result, "zerolora train")
    _check(record["curves"], zero.choice, canary, result)
    if verdict:
        verdict.write(record)


def _arguments(settings: TrainSettings, steps: int, paths: dict[str, Path], zero: ZeroJson, work: Path) -> list[str]:
    """Return the arguments of a short training with output directory `work`."""
    short = settings.model_copy(
        update={
            "max_steps": steps,
            "validation_steps": None,
            "patience": None,
            "stop_above": [],
            "checkpoint_steps": None,
            "checkpoint_minutes": 1e6,
            "resume": "never",
            "tracker": NO_TRACKER,
        }
    )
    zero.write(work / "zero.json")
    own = {
        **paths,
        "zero": work / "zero.json",
        "checkpoints": work / "checkpoints" / paths["checkpoints"].name,
        "output": work,
    }
    arguments = [text for name, path in own.items() for text in (f"--{name}", str(path))]
    return ["--settings", canonical(short.model_dump(mode="json")), *arguments, "--losses-only"]


def _curves(telemetry: Path) -> Curves:
    with telemetry.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name] or "nan") for row in rows] for name in ("loss", "gradient_norm")}


def _check(curves: dict[str, Curves], chosen: TrainingChoice, canary: Canary, record: Path) -> None:
    figure = _differing(curves, chosen)
    if figure is None:
        return
    values = {name: ", ".join(f"{value:.5g}" for value in curve[figure]) for name, curve in curves.items()}
    name, instead = chosen.strategy, ZeroJson.of(canary.zero).choice
    raise UserError(
        f"train.canary: the first {canary.steps} steps under {name} ({'; '.join(canary.reasons)}) are not those of a "
        f"safe setting: {figure.replace('_', ' ')} {values['risky']} instead of {values['safe']}; write "
        f"render.strategy: {instead.strategy} and train.attention: {instead.attention}, or train.canary: off "
        f"(see {record})"
    )


def _differing(curves: Mapping[Any, Mapping[Any, list[float]]], chosen: TrainingChoice) -> str | None:
    """Return the first figure that differs between two trainings, None if all agree."""
    tolerances = {"loss": TOLERANCE[chosen.precision], "gradient_norm": NORM_TOLERANCE * TOLERANCE[chosen.precision]}
    risky, safe = curves["risky"], curves["safe"]
    agree = {name: _agree(risky[name], safe[name], tolerance) for name, tolerance in tolerances.items()}
    return next((name for name in agree if not agree[name]), None)


def _agree(risky: list[float], safe: list[float], tolerance: float) -> bool:
    """Return whether two curves agree; norms that neither run computed (NaN) do."""
    return len(risky) == len(safe) and all(
        math.isclose(one, other, rel_tol=tolerance) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(risky, safe, strict=True)
    )


def _key(settings: TrainSettings, zero: ZeroJson, paths: dict[str, Path]) -> str:
    inputs = [read_json(paths[name] / MANIFEST, "zerolora prepare")["files"] for name in ("data", "packing")]
    inputs.append(read_json(paths["weights"], "zerolora weights")["files"])
    relevant = {key: value for key, value in compared(settings).items() if key not in ("resume", "tracker")}
    key = {"settings": relevant, "zero": zero.as_json(), "inputs": inputs}
    return hashlib.sha256(canonical(key).encode()).hexdigest()[:16]
