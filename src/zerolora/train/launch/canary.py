"""The canary: two short trainings before a run under risky settings, one of them under safe ones, must agree.

They make the same first optimizer steps, with the same seed and data. What they found is kept, so that a resumed run
does not repeat it:

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

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""Relative, of a loss, by precision: some ten times by how much strategies may differ in this project's own tests."""
NORM_TOLERANCE = 10
"""Of a gradient's norm, in tolerances of a loss. It shows what AdamW hides: gradients of another scale."""
Curves = dict[str, list[float]]
"""Loss and norm of the gradient of each step."""
Start = Callable[[int, list[str], Path], None]
"""Runs the ranks of training number n with these arguments and this directory for logs, and waits for them."""


def compare_first_steps(settings: TrainSettings, paths: dict[str, Path], logs: Path, start: Start) -> None:
    """Run the canary that zero.json asks for, if it has not run before. Raises UserError if the two trainings differ.

    `paths` are the arguments of training by option. Called by the launcher of every node: all make both trainings, and
    read what rank 0 wrote.
    """
    zero = ZeroJson.read(paths["zero"])
    canary = zero.choice.canary
    if canary is None:
        return
    result = (
        paths["checkpoints"].parent.parent
        / "canary"
        / paths["checkpoints"].name
        / f"{_key(settings, zero, paths)}.json"
    )
    if not result.exists():
        started = time.monotonic()
        LOGGER.info(f"canary: the first {canary.steps} steps, twice: {'; '.join(canary.reasons)}")
        work = result.with_suffix("")
        curves = {}
        for number, (name, own) in enumerate(_pair(zero, canary).items()):
            curves[name] = _short_run(settings, canary, paths, own, work / name, logs / "canary" / name, number, start)
        seconds = time.monotonic() - started
        write_json(result, {"reasons": canary.reasons, "curves": curves, "seconds": seconds})
        shutil.rmtree(work, ignore_errors=True)
        LOGGER.info(f"canary: took {seconds:.0f} s, which training's own times do not count")
    _check(read_json(result, "zerolora train")["curves"], zero.choice, canary, result)


def _pair(zero: ZeroJson, canary: Canary) -> dict[str, ZeroJson]:
    alone = zero.choice.model_copy(update={"canary": None})
    return {"risky": ZeroJson(options=zero.options, choice=alone), "safe": ZeroJson.of(canary.zero)}


def _short_run(
    settings: TrainSettings,
    canary: Canary,
    paths: dict[str, Path],
    zero: ZeroJson,
    work: Path,
    logs: Path,
    number: int,
    start: Start,
) -> Curves:
    short = settings.model_copy(
        update={
            "max_steps": canary.steps,
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
    start(number, ["--settings", canonical(short.model_dump(mode="json")), *arguments, "--losses-only"], logs)
    with (work / "telemetry.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name] or "nan") for row in rows] for name in ("loss", "gradient_norm")}


def _check(curves: dict[str, Curves], chosen: TrainingChoice, canary: Canary, record: Path) -> None:
    tolerance = TOLERANCE[chosen.precision]
    risky, safe = curves["risky"], curves["safe"]
    same = _agree(risky["loss"], safe["loss"], tolerance)
    if same and _agree(risky["gradient_norm"], safe["gradient_norm"], NORM_TOLERANCE * tolerance):
        return
    what = "gradient_norm" if same else "loss"
    told = {name: ", ".join(f"{value:.5g}" for value in curve[what]) for name, curve in curves.items()}
    name, instead = chosen.strategy, ZeroJson.of(canary.zero).choice
    raise UserError(
        f"train.canary: the first {canary.steps} steps under {name} ({'; '.join(canary.reasons)}) are not those of a "
        f"safe setting: {what.replace('_', ' ')} {told['risky']} instead of {told['safe']}; write render.strategy: "
        f"{instead.strategy} and train.attention: {instead.attention}, or train.canary: off (see {record})"
    )


def _agree(risky: list[float], safe: list[float], tolerance: float) -> bool:
    """Tell whether each value is the other's; one that neither has is (a norm that nothing needed)."""
    return len(risky) == len(safe) and all(
        math.isclose(one, other, rel_tol=tolerance) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(risky, safe, strict=True)
    )


def _key(settings: TrainSettings, zero: ZeroJson, paths: dict[str, Path]) -> str:
    inputs = [read_json(paths[name] / MANIFEST, "zerolora prepare")["files"] for name in ("data", "packing")]
    inputs.append(read_json(paths["weights"], "zerolora weights")["files"])
    decides = {key: value for key, value in compared(settings).items() if key not in ("resume", "tracker")}
    what = {"settings": decides, "zero": zero.as_json(), "inputs": inputs}
    return hashlib.sha256(canonical(what).encode()).hexdigest()[:16]
