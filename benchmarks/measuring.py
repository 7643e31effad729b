"""Shared code of the benchmarks: the machine of a result, timed commands, rounds, memory of processes, tables on pages.

It imports the standard library alone, so that make_run.py needs no virtual environment.
"""

import argparse
import datetime
import importlib.metadata
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PACKAGES = ("torch", "transformers", "peft", "deepspeed")


class Timed(NamedTuple):
    """CPU and wall seconds of a command with its children, and its output."""

    cpu_seconds: float
    wall_seconds: float
    stdout: str
    stderr: str


def machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Return date, processor, cores, memory in bytes, GPUs and the versions of packages."""
    import psutil
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def timed(command: Sequence[Any], directory: Path, expected: str = "", **variables: str) -> Timed:
    """Run a command to its end. Exits if it fails, or if `expected` is missing in its output."""
    before, started = children_cpu_seconds(), time.monotonic()
    result = subprocess.run(
        command, cwd=directory, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    seconds = children_cpu_seconds() - before, time.monotonic() - started
    if result.returncode or expected not in result.stdout + result.stderr:
        sys.exit(f"{command} in {directory}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return Timed(*seconds, result.stdout, result.stderr)


def children_cpu_seconds() -> float:
    """Return the user and system seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield all names once a round, in the opposite order every other round."""
    for number in range(rounds):
        yield from list(names)[:: 1 if number % 2 == 0 else -1]


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def by_round(rounds: list[float]) -> dict[str, Any]:
    """Return a figure's rounds, and their median."""
    return {"median": statistics.median(rounds), "rounds": rounds}


def wait(
    processes: "Sequence[subprocess.Popen[bytes]]",
    seconds: float = math.inf,
    every: float = 0.1,
    look: Callable[[], object] = lambda: None,
) -> list[int | None]:
    """Wait until all processes have ended, one has failed, or `seconds` have passed; then kill the rest.

    Calls `look` before each pause of `every` seconds, and also stops if it returns true. Returns the exit codes, None
    for a killed process.
    """
    deadline = time.monotonic() + seconds
    try:
        while any(each.poll() is None for each in processes) and not any(each.poll() for each in processes):
            if look() or time.monotonic() > deadline:
                break
            time.sleep(every)
    finally:
        codes = [each.poll() for each in processes]
        for each in processes:
            each.kill()
            each.wait()
    return codes


def kernel_sizes(process: int | str, file: str) -> Counter[str]:
    """Return the sizes in /proc/PROCESS/FILE in bytes, by name; none if the process has ended."""
    try:
        text = Path(f"/proc/{process}/{file}").read_text(encoding="ascii")
    except OSError:
        return Counter()
    return Counter({name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)})


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank, "" if there is none."""
    lines = last_lines(log, 1)
    return lines[-1][:300] if lines else ""


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not blank."""
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-count:]


def random_model(config: Path, dtype: Any, directory: Path, layers: int = 0, seed: int = 0) -> Any:
    """Write a model of a config.json with random weights; with `layers` only the first ones. Return its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(config)
    if layers:
        settings.num_hidden_layers = layers
        if getattr(settings, "layer_types", None):
            settings.layer_types = settings.layer_types[:layers]
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(settings, dtype=dtype).save_pretrained(directory)
    return settings


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], right: int = 0) -> str:
    """Return a Markdown table; its last `right` columns are aligned to the right."""
    marks = "---|" * (len(header) - right) + "---:|" * right
    return "\n".join([f"| {' | '.join(header)} |", f"|{marks}", *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def put(page: str, name: str, text: str) -> None:
    """Replace the text between <!-- NAME --> and <!-- end --> in a page of docs/. Raises ValueError without them."""
    path = ROOT / "docs" / page
    before = path.read_text(encoding="utf-8")
    marks = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
    after, count = re.subn(marks, lambda match: f"{match[1]}{text}\n{match[2]}", before, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{path}: {count} sections called {name}")
    path.write_text(after, encoding="utf-8")
