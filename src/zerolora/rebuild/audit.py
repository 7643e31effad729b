"""An audit: only some segments of a training are run again, from one checkpoint to the next, drawn by a seed.

A segment that was tampered with ends in another checkpoint than the recorded one. Of n segments, of which m were
tampered with, a drawing of k without replacement has none of them with probability C(n - m, k) / C(n, k).
"""

import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import canonical, sha256
from zerolora.log import LOGGER
from zerolora.methods.peft_format import ADAPTER
from zerolora.publish.record import names_of
from zerolora.rebuild.folder import environment, run_command
from zerolora.rebuild.original import Original
from zerolora.rebuild.rebuilt_products import METRICS, RebuiltProduct, digest_or_fault
from zerolora.receipt import Receipt
from zerolora.train.checkpoint.names import newest_run_folder, steps_of
from zerolora.train.launch.stop_signals import STOPPED, Stopped
from zerolora.units import counted

WORK = Path("work/audit")
WAIT_SECONDS = 0.1


@dataclass(frozen=True)
class Segment:
    """The optimizer steps after one checkpoint, up to another. `start` is 0 for the beginning."""

    start: int
    end: int

    @property
    def steps(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Draw:
    """The segments that an audit runs again."""

    segments: tuple[Segment, ...]
    """Those that were drawn, in order."""
    all: tuple[Segment, ...]
    seed: int

    @property
    def share_of_steps(self) -> float:
        """The drawn steps, as a share of all."""
        return sum(each.steps for each in self.segments) / self.all[-1].end

    @property
    def meaning(self) -> str:
        """What the audit proves, in words."""
        few, many = len(self.segments), len(self.all)
        several = min(many, 3)
        return (
            f"{few} of {counted(many, 'segment')}, {_percent(self.share_of_steps)} of the steps, drawn by seed "
            f"{self.seed}, end in the recorded checkpoints; such an audit finds one tampered segment with a "
            f"probability of {_percent(caught(many, 1, few))}, and one of {several} with "
            f"{_percent(caught(many, several, few))}; metrics and merged weights are not made again"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the entry of rebuild.json."""
        drawn = [[each.start, each.end] for each in self.segments]
        return {"seed": self.seed, "drawn": drawn, "of": len(self.all), "share_of_steps": self.share_of_steps}

    def __str__(self) -> str:
        drawn = ", ".join(f"{each.start}-{each.end}" for each in self.segments)
        return f"steps {drawn}: {len(self.segments)} of {counted(len(self.all), 'segment')}, drawn by seed {self.seed}"


def _percent(share: float) -> str:
    """Return a share in percent, rounded down: it promises no more than it is."""
    return f"{math.floor(share * 1000) / 10:g}%"


def caught(segments: int, tampered: int, drawn: int) -> float:
    """Return the probability that a drawing without replacement has at least one of the tampered segments."""
    return 1 - math.comb(segments - tampered, drawn) / math.comb(segments, drawn)


def draw(steps: Sequence[int], share: float, seed: int) -> Draw:
    """Return a share of the segments between the beginning and the checkpoints of these steps, at least one."""
    every = tuple(Segment(start, end) for start, end in zip([0, *steps], steps, strict=False))
    chosen = random.Random(seed).sample(range(len(every)), math.ceil(share * len(every)))  # noqa: S311 (no secret)
    return Draw(tuple(every[number] for number in sorted(chosen)), every, seed)


def drawn(was: Original, share: float, seed: int) -> Draw:
    """Return the segments of an audit of a run. Raises UserError if its checkpoints are too few for the share."""
    if not 0 < share <= 1:
        raise UserError(f"--audit {share:g}: is no share; use one above 0 and at most 1, as in 0.05")
    steps = sorted(was.checkpoint_files)
    least = math.ceil(1 / share)
    if len(steps) < least:
        here = f"{counted(len(steps), 'checkpoint')} of run {was.run} {'is' if len(steps) == 1 else 'are'} here"
        trained = f"train it with train.keep_checkpoints: {least} or more and train.checkpoint_steps to match"
        remedy = f"{trained}{', and push it with --include checkpoints' if was.record else ''}, or audit a larger share"
        raise UserError(f"--audit {share:g}: needs the checkpoints of {least} segments, and {here}; {remedy}")
    settings = json.loads(was.receipts[f"train@{was.run}"].params["settings"])
    if settings.get("nodes", 1) > 1:
        raise UserError(
            f"--audit: run {was.run} was trained on {settings['nodes']} nodes; rebuild it without --audit there"
        )
    result = draw(steps, share, seed)
    total = json.loads(_metrics(was)).get("steps", steps[-1])
    if steps[-1] != total:
        raise UserError(
            f"--audit: the checkpoint of the last step, {total}, of run {was.run} is not here, only up to {steps[-1]}; "
            "rebuild it without --audit"
        )
    return result


def _metrics(was: Original) -> str:
    path = next(path for path in was.receipts[f"train@{was.run}"].outputs if path.endswith(f"/{METRICS}"))
    return was.contents.get(path, "{}")


def run(was: Original, folder: Path, chosen: Draw) -> Iterator[RebuiltProduct]:
    """Run the drawn segments in the folder, after the stages before training; yield the checkpoint that each ends in,
    and the adapter that the last checkpoint becomes."""
    stage = f"train@{was.run}"
    receipt = was.receipts[stage]
    _weights(was, folder, receipt)
    for each in chosen.segments:
        name = f"work/checkpoints/{was.run}/step-{each.end:08d}.safetensors, from step {each.start}"
        LOGGER.info(f"audit: steps {each.start} to {each.end}")
        begin = was.checkpoint_files.get(each.start)
        faults = [(file, digest_or_fault(file)) for file in (begin, was.checkpoint_files[each.end]) if file]
        if fault := next(((file, digest, why) for file, (digest, why) in faults if why), None):
            file, digest, why = fault
            yield RebuiltProduct(name, stage, digest, None, f"{file.name} is damaged: {why}")
            continue
        made, why = _segment(was, folder, receipt, each, begin)
        own = digest_or_fault(made)[0] if made else None
        yield RebuiltProduct(name, stage, faults[-1][1][0], own, why)
    yield from _adapter(was, folder, receipt)


def _segment(
    was: Original, folder: Path, receipt: Receipt, each: Segment, begin: Path | None
) -> tuple[Path | None, str]:
    """Train a segment, unless that was done; return its last checkpoint, or why there is none."""
    # Another checkpoint to begin with, another command or other code is another segment.
    parts = [receipt.params, digest_or_fault(begin)[0] if begin else None]
    work = WORK / f"{each.start}-{each.end}-{hashlib.sha256(canonical(parts).encode()).hexdigest()[:8]}"
    place = folder / work / "checkpoints" / was.run
    if made := _made(place, each.end):
        return made, ""
    shutil.rmtree(folder / work, ignore_errors=True)
    settings = {
        "checkpoint_steps": each.end,
        "checkpoint_minutes": 1e6,
        "resume": str(begin.resolve()) if begin else "never",
    }
    log = folder / work / "train.log"
    log.parent.mkdir(parents=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(was, receipt, settings, work, place.relative_to(folder)),
            cwd=folder,
            env=_one_thread(was, folder),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None and not _made(place, each.end):
                time.sleep(WAIT_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
    if made := _made(place, each.end):
        return made, ""
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    line = (text.splitlines() or ["it gave no reason"])[-1]
    if process.returncode == STOPPED:
        raise Stopped(f"stopped; {folder} keeps the segments that are done, and the same command continues")
    if "cannot be resumed, since " in line:
        return None, line.partition("cannot be resumed, since ")[2].partition("; put it back")[0]
    raise UserError(f"{folder / work}: steps {each.start} to {each.end} failed: {line.removeprefix('zerolora: ')}")


def _adapter(was: Original, folder: Path, receipt: Receipt) -> Iterator[RebuiltProduct]:
    """Yield the adapter, made of the last checkpoint without a step."""
    path = next((path for path in receipt.outputs if path.endswith(f"/adapter/{ADAPTER}")), None)
    if path is None:
        return
    last = was.checkpoint_files[max(was.checkpoint_files)]
    digest, fault = digest_or_fault(last)
    if fault:
        yield RebuiltProduct(path, f"train@{was.run}", receipt.outputs[path], None, f"{last.name} is damaged: {fault}")
        return
    work = WORK / f"adapter-{hashlib.sha256(canonical([receipt.params, digest]).encode()).hexdigest()[:8]}"
    own = folder / work / "output/adapter" / ADAPTER
    if not own.is_file():
        command = _command(was, receipt, {"resume": str(last.resolve())}, work, work / "checkpoints" / was.run)
        run_command(was, folder, command, "the adapter could not be made of the last checkpoint; see the message above")
    yield RebuiltProduct(path, f"train@{was.run}", receipt.outputs[path], sha256(own), "")


def _command(was: Original, receipt: Receipt, settings: dict[str, Any], work: Path, checkpoints: Path) -> list[str]:
    """Return the command of the stage as its rule calls it, with other settings and places."""
    values = {**json.loads(receipt.params["settings"]), **settings}
    return [
        *(sys.executable, "-m", "zerolora", "stage", "train", was.run),
        *receipt.params["names"].split(" "),
        *("--settings", canonical(values), "--keep-checkpoints", "1000000"),
        *("--checkpoints", str(checkpoints), "--output", str(work / "output"), "--logs", str(work / "logs")),
    ]


def _weights(was: Original, folder: Path, receipt: Receipt) -> None:
    names = names_of(receipt)
    model = names["model"]
    options = ("--model", f"resources/models/{model}", "--weights", f"resources/weights/{model}")
    command = [sys.executable, "-m", "zerolora", "weights", *options, "--device", receipt.params["device"]]
    run_command(was, folder, command, "the base model is not there; see the message above")


def _one_thread(was: Original, folder: Path) -> dict[str, str]:
    """Return the variables of training, as its rule sets them."""
    return {**environment(was, folder), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _made(of_run: Path, step: int) -> Path | None:
    folder = newest_run_folder(of_run)
    return steps_of(folder).get(step) if folder else None
