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
from collections.abc import Callable
from pathlib import Path

from zerolora.config.compared import compared
from zerolora.config.settings import Canary, TrainingChoice, TrainSettings
from zerolora.config.values import NO_TRACKER
from zerolora.errors import UserError
from zerolora.files import MANIFEST, canonical, read_json, write_json
from zerolora.log import LOGGER
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.launch.canary_verdict import Verdict
from zerolora.types import Precision

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""Relative tolerance of a loss by precision: about ten times that between strategies in this project's tests."""
NORM_TOLERANCE = 10
"""Tolerance of a gradient's norm, in those of a loss. It reveals a wrong scale of gradients, which AdamW hides."""
Curves = dict[str, list[float]]
"""Loss and norm of the gradient of each step."""
Start = Callable[[int, list[str], Path], None]
"""Runs the ranks of training number n with arguments and a directory for logs, and waits for them."""


def compare_first_steps(settings: TrainSettings, paths: dict[str, Path], logs: Path, start: Start) -> list[str]:
    """Run the canary of zero.json, if it has not run before; return further arguments of training. Raises UserError if
    the two trainings differ.

    With train.kernels: auto, a third training without liger-kernel's kernels follows if they differ; if that one agrees
    with the safe one, training goes without them. `paths` are the arguments of training by option. The launcher of
    every node calls it: all take part in all trainings, and read the result of rank 0.
    """
    zero = ZeroJson.read(paths["zero"])
    canary = zero.choice.canary
    if canary is None:
        return []
    checkpoints = paths["checkpoints"]
    result = checkpoints.parents[1] / "canary" / checkpoints.name / f"{_key(settings, zero, paths)}.json"
    work = result.with_suffix("")
    alone = zero.choice.model_copy(update={"canary": None})
    own = alone.model_copy(update={"kernels": "off"})

    def curves_of(name: str, number: int, short: ZeroJson) -> Curves:
        arguments = _arguments(settings, canary.steps, paths, short, work / name)
        start(number, arguments, logs / "canary" / name)
        return _curves(work / name / "telemetry.csv")

    # Nodes may have separate homes, and all take part in a canary or none.
    verdict = Verdict(settings, zero, paths) if settings.nodes == 1 and not result.exists() else None
    passed = verdict.read() if verdict else None
    if verdict and passed and not _differs(passed.risky, passed.safe, zero.choice.precision):
        LOGGER.info(f"canary: passed on {passed.date} on this machine, with these versions and setting: {verdict.path}")
        curves = {"risky": passed.risky, "safe": passed.safe}
        write_json(result, {"reasons": canary.reasons, "curves": curves, "seconds": 0.0, "passed": passed.date})
        return []
    if not result.exists():
        started = time.monotonic()
        LOGGER.info(f"canary: the first {canary.steps} steps, twice: {'; '.join(canary.reasons)}")
        curves = {
            "risky": curves_of("risky", 0, ZeroJson(options=zero.options, choice=alone)),
            "safe": curves_of("safe", 1, ZeroJson.of(canary.zero).leaving_out(zero.choice.without_gradient)),
        }
        if zero.choice.kernels == "auto" and _differs(curves["risky"], curves["safe"], zero.choice.precision):
            curves["own"] = curves_of("own", 2, ZeroJson(options=zero.options, choice=own))
        seconds = time.monotonic() - started
        write_json(result, {"reasons": canary.reasons, "curves": curves, "seconds": seconds})
        shutil.rmtree(work, ignore_errors=True)
        LOGGER.info(f"canary: took {seconds:.0f} s, which training's own times do not count")
    record = read_json(result, "zerolora stage train")
    curves = record["curves"]
    if "own" not in curves:
        _check(curves, zero.choice, canary, result)
        if verdict:
            verdict.write(record)
        return []
    _check({"risky": curves["own"], "safe": curves["safe"]}, own, canary, result)
    LOGGER.info(
        "canary: fused kernels are off, since the first steps differ with them and agree without (train.kernels)"
    )
    return ["--no-kernels"]


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
            "compile": settings.compile and work.name != "safe",
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
    figure = _differs(curves["risky"], curves["safe"], chosen.precision)
    if figure is None:
        return
    values = {name: ", ".join(f"{value:.5g}" for value in curve[figure]) for name, curve in curves.items()}
    name, instead = chosen.strategy, ZeroJson.of(canary.zero).choice
    kernels = " and train.kernels: off" if chosen.kernels != "off" else ""
    raise UserError(
        f"train.canary: the first {canary.steps} steps under {name} ({'; '.join(canary.reasons)}) are not those of a "
        f"safe setting: {figure.replace('_', ' ')} {values['risky']} instead of {values['safe']}; set "
        f"render.strategy: {instead.strategy} and train.attention: {instead.attention}{kernels}, or train.canary: off "
        f"(see {record})"
    )


def _differs(risky: Curves, safe: Curves, precision: Precision) -> str | None:
    """Return the figure in which two trainings differ; None if they agree."""
    tolerance = TOLERANCE[precision]
    if not _agree(risky["loss"], safe["loss"], tolerance):
        return "loss"
    norms = _agree(risky["gradient_norm"], safe["gradient_norm"], NORM_TOLERANCE * tolerance)
    return None if norms else "gradient_norm"


def _agree(risky: list[float], safe: list[float], tolerance: float) -> bool:
    """Return whether two curves agree; norms that neither run computed (NaN) do."""
    return len(risky) == len(safe) and all(
        math.isclose(one, other, rel_tol=tolerance) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(risky, safe, strict=True)
    )


def _key(settings: TrainSettings, zero: ZeroJson, paths: dict[str, Path]) -> str:
    inputs = [read_json(paths[name] / MANIFEST, "zerolora stage prepare")["files"] for name in ("data", "packing")]
    inputs.append(read_json(paths["weights"], "zerolora weights")["files"])
    relevant = {key: value for key, value in compared(settings).items() if key not in ("resume", "tracker")}
    key = {"settings": relevant, "zero": zero.as_json(), "inputs": inputs}
    return hashlib.sha256(canonical(key).encode()).hexdigest()[:16]
