"""Run the benchmarks that need a GPU: first what shows whether a run works there, then memory, then speed.

    .venv/bin/python benchmarks/gpu.py --output benchmarks/results --budget 3000
    .venv/bin/python benchmarks/gpu.py --output DIR --list    # the items in order, with estimated seconds and state

Each item is a process that writes one file, DIR/gpu_ITEM.json, when it ends; a later call skips the items that have
one. If an item fails, or takes three times as long as estimated, its file has the reason and the next one starts. An
item that the budget cuts short has no file; a later call tries it again. Models have the shapes of
config/recipes/models and random weights; nothing is downloaded. More: docs/gpu.md.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from measuring import ROOT, last_line, last_lines, parser_of

from zerolora.files import read_json, write_json

LIMIT = 3  # times an item's estimated seconds
LEAST_LIMIT = 120  # seconds: imports from a cold disk
SHOWN = 30  # lines of the log of an item that fails
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


@dataclass(frozen=True)
class Item:
    """A measurement: one process, one result file."""

    name: str
    seconds: int
    """Estimated."""
    command: list[str]
    """Without `--output FILE`."""


def items() -> list[Item]:
    """Return the items, for one GPU: NCCL refuses two ranks on one."""
    probe = [sys.executable, "-m", "zerolora", "probe", "--device", "cuda"]
    chosen = ("--layers", "0", "--length", "2048", "--packed", "4", "--global-batch", "16")
    few = ("--limit", "16", "--rounds", "2", "--steps", "2")
    return [
        training("stages_by_hand", "smollm2-135m", 120),
        Item("probe", 40, probe),
        memory("qwen2.5-7b", 150),
        memory("qwen2.5-0.5b", 120),
        training("limit", "qwen2.5-0.5b", 60, "--rounds", "1"),
        training("host_syncs", "qwen2.5-0.5b", 40),
        training("against_trl", "qwen2.5-0.5b", 200, "--rounds", "1", "--batch", "8"),
        training("against_reference", "qwen2.5-0.5b", 180, "--rounds", "2"),
        training("loading", "qwen2.5-7b", 200, "--ranks", "1", "--strategies", "zero2", "zero3"),
        training("start_up", "qwen2.5-0.5b", 120, "--rounds", "3"),
        training("methods", "qwen2.5-0.5b", 300, "--rounds", "1"),
        script("choice", "choice.py", "qwen2.5-0.5b", 450, "--ranks", "1", *chosen, *few),
        memory("qwen2.5-14b", 300),
        training("limit", "qwen2.5-7b", 300, "--rounds", "2"),
        training("against_trl", "qwen2.5-7b", 750, "--rounds", "2", "--batch", "8"),
    ]


def script(kind: str, path: str, model: str, seconds: int, *options: str) -> Item:
    """Return the item of a script for a model of config/recipes/models."""
    config = str(ROOT / f"config/recipes/models/{model}.json")
    return Item(f"{kind}_{model}", seconds, [sys.executable, f"benchmarks/{path}", "--model", config, *options])


def training(name: str, model: str, seconds: int, *options: str) -> Item:
    """Return the item of a script in benchmarks/train."""
    return script(name, f"train/{name}.py", model, seconds, "--device", "cuda", *options)


def memory(model: str, seconds: int) -> Item:
    """Return the item that compares predicted with measured memory, and measures the reserve beside tensors."""
    command = [sys.executable, "benchmarks/memory/measure.py", "--only", model, "--seconds", str(seconds)]
    return Item(f"memory_{model}", seconds, command)


def main() -> None:
    """Measure the missing items until the budget is spent."""
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the directory of the result files")
    parser.add_argument("--budget", type=float, default=3000, help="seconds after which nothing runs")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print(listed(items(), options.output))
        return
    # In another process: a context of this one would count as use.
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", code], check=False).returncode:
        raise SystemExit("torch sees no GPU")
    options.output.mkdir(parents=True, exist_ok=True)
    measure_all(items(), options.output, options.budget)


def measure_all(planned: list[Item], output: Path, budget: float) -> None:
    """Measure in order the items that have no result and are estimated to fit into the remaining budget."""
    deadline = time.monotonic() + budget
    skipped = []
    for item in planned:
        path = result_path(output, item)
        if path.is_file():
            continue
        result = None
        if item.seconds <= deadline - time.monotonic():
            print(f"{item.name}: about {item.seconds} s", flush=True)
            result = measured(item, path, deadline)
        if result is None:
            skipped.append(item)
            continue
        write_json(path, {"item": item.name, "command": item.command[1:], **result})
        print(f"{item.name}: {outcome(result)} in {result['seconds_used']} s", flush=True)
    if skipped:
        print(f"left for a later call: {', '.join(item.name for item in skipped)}")


def outcome(result: dict[str, Any]) -> str:
    """Return an item's outcome in words: why it failed, or what failed in what it measured."""
    if "failed" in result:
        return f"failed: {result['failed']}"
    failures = result["measured"].get("failures")
    return (
        f"done, with failures: {'; '.join(f'{name}: {why}' for name, why in failures.items())}" if failures else "done"
    )


def measured(item: Item, path: Path, deadline: float) -> dict[str, Any] | None:
    """Return an item's result, or the reason of its failure; None if the budget ended before the item's limit."""
    limit = max(LEAST_LIMIT, LIMIT * item.seconds)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zerolora-gpu-") as folder:
        answer, log = Path(folder) / path.name, Path(folder) / "log"
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        # Its temporary files are removed with this directory.
        own = OFFLINE | {"TMPDIR": folder, "CUDA_VISIBLE_DEVICES": first}
        with log.open("wb") as file:
            command = [*item.command, "--output", str(answer)]
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=file, stderr=file)
        end = min(started + limit, deadline)
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0, end - time.monotonic()))
        finally:
            end_all(process)
        used = {"seconds_used": round(time.monotonic() - started, 1)}
        if code is None:
            return {**used, "failed": f"not done after {limit} s"} if end < deadline else None
        if code == 0:
            return {**used, "measured": read_json(answer, item.name)}
        print(*last_lines(log, SHOWN), sep="\n", flush=True)
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return {**used, "failed": f"{reason}: {last_line(log) or 'no output'}"}


def end_all(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its descendants, whose memory the next item needs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family, timeout=30)
    process.wait()


def result_path(output: Path, item: Item) -> Path:
    """Return an item's result file."""
    return output / f"gpu_{item.name}.json"


def listed(planned: list[Item], output: Path) -> str:
    """Return the items in order, one a line, with their state."""
    lines = []
    for item in planned:
        path = result_path(output, item)
        result = read_json(path, "gpu.py") if path.is_file() else None
        state = "to do" if result is None else outcome(result)
        lines.append(f"{item.name:<40}{item.seconds:>6} s  {state}")
    return "\n".join([*lines, f"{'together':<40}{sum(item.seconds for item in planned):>6} s"])


if __name__ == "__main__":
    main()
