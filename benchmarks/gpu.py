"""Measure every figure that needs a GPU, the most missed first.

    .venv/bin/python benchmarks/gpu.py --output benchmarks/results --budget 3000
    .venv/bin/python benchmarks/gpu.py --output DIR --list                       # the items in order, estimated seconds
    .venv/bin/python benchmarks/gpu.py --output DIR --budget 300 --device cpu    # tiny stand-ins, without a GPU

Each item is a process of its own and writes one file, DIR/gpu_<item>.json, as soon as it ends; a later call leaves out
the items whose file is there. An item that runs out of memory, fails, or takes three times as long as estimated is
written with its reason and the next one begins. An item that the budget cuts short has no result; it is tried again
when a call has more time for it. The other benchmarks
and the training code itself do the measuring (benchmarks/gpu_kinds/kinds.py); models have drawn weights, nothing is
downloaded. docs/gpu.md says more.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent / "train"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import psutil

from benchmarks.gpu_kinds.plan import Item, items
from zerolora.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "peft", "deepspeed", "datasets", "pyarrow", "pydantic")
LIMIT = 3  # times an item's estimated seconds
LEAST_LIMIT = {"cuda": 120, "cpu": 900}  # seconds: imports from a cold disk, and stand-ins beside a busy test suite
TAIL = 15  # lines of a failed item's log that are shown
POLL_SECONDS = 0.2
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
Machine = dict[str, Any]


def main() -> None:
    """Measure what is not measured yet, until the budget is spent."""
    options = _options()
    if options.about:
        write_json(options.about, about())
        return
    if options.item:
        run_item(json.loads(options.item), options.output)
        return
    signal.signal(signal.SIGTERM, _interrupted)
    machine = described()
    device = options.device or ("cuda" if machine["cuda"] else "cpu")
    for line in machine["lacks"]:
        print(line, flush=True)
    planned = items(device, machine["trl"])
    if options.list:
        print(listed(planned, options.output, device))
        return
    if device == "cuda" and not machine["cuda"]:
        raise SystemExit("--device is cuda, but torch sees no GPU; write --device cpu for tiny stand-ins")
    if missing := [name for name in NEEDED if name in machine["missing"]]:
        raise SystemExit(f"nothing can be measured without {', '.join(missing)}")
    options.output.mkdir(parents=True, exist_ok=True)
    measure_all(planned, options.output, device, options.budget, machine)


def measure_all(planned: list[Item], output: Path, device: str, budget: float, machine: Machine) -> None:
    """Measure items in order, each of which has no result yet and is estimated to fit what is left of the budget."""
    deadline = time.monotonic() + budget
    left_out = []
    for item in planned:
        path = result_path(output, item, device)
        if path.is_file():
            continue
        left = deadline - time.monotonic()
        if max(item.seconds, cut_after(path)) > left:
            left_out.append(item)
            continue
        print(f"{item.name}: about {item.seconds} s", flush=True)
        result = measured(item, output, device, deadline)
        if result is None:
            left_out.append(item)
            cut_path(path).write_text(str(left))
            print(f"{item.name}: cut short by the budget, not written", flush=True)
            continue
        write_json(path, {**heading(item, device, machine), **result})
        cut_path(path).unlink(missing_ok=True)
        print(f"{item.name}: {result.get('failed') or 'measured'} in {result['seconds_used']} s", flush=True)
    if left_out:
        seconds = sum(item.seconds for item in left_out)
        print(f"left for a later call: {len(left_out)} items, about {seconds} s: {', '.join(i.name for i in left_out)}")


def cut_path(path: Path) -> Path:
    """Return the file that says how many seconds an item had when the budget cut it short."""
    return path.with_name(f"{path.stem}.cut")


def cut_after(path: Path) -> float:
    """Return how many seconds were not enough for an item before; 0 if it was never cut short."""
    return float(cut_path(path).read_text()) if cut_path(path).is_file() else 0.0


def measured(item: Item, output: Path, device: str, deadline: float) -> dict[str, Any] | None:
    """Return an item's result, or why there is none; None if the budget ended before the item's own limit."""
    limit = max(LEAST_LIMIT[device], LIMIT * item.seconds)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zerolora-gpu-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        asked = {
            "kind": item.kind, "settings": item.settings, "device": device, "folder": f"{folder}/work",
            "probed": str(output / f"{prefix(device)}_probe.json"),
        }  # fmt: skip
        command = [sys.executable, __file__, "--output", str(answer), "--item", json.dumps(asked)]
        with log.open("wb") as file:
            # Whatever it leaves in a temporary directory goes with this one.
            own = OFFLINE | {"TMPDIR": folder, "CUDA_VISIBLE_DEVICES": visible(device)}
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=file, stderr=file)
        try:
            end = min(started + limit, deadline)
            while process.poll() is None and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
        finally:
            code = process.poll()
            end_all(process)
        used = {"seconds_used": round(time.monotonic() - started, 1)}
        if answer.is_file():
            return {**used, **read_json(answer, "gpu.py")}
        if code is None:
            return {**used, "failed": f"not done after {limit} s"} if end < deadline else None
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        print("\n".join(lines[-TAIL:]), file=sys.stderr)
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return {**used, "failed": f"{reason}: {lines[-1][:300] if lines else 'it said nothing'}"}


def end_all(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started, whose memory the next item needs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family, timeout=30)
    process.wait()


def run_item(asked: dict[str, Any], answer: Path) -> None:
    """Be the process of one item: write `{"predicted", "measured"}`, or `{"failed": why}`."""
    from benchmarks.gpu_kinds.kinds import KINDS, Context, Failed
    from zerolora.errors import UserError

    folder = Path(asked["folder"])
    folder.mkdir(parents=True)
    where = Context(asked["device"], folder, Path(asked["probed"]))
    try:
        result = KINDS[asked["kind"]](asked["settings"], where)
    except (Failed, UserError) as error:
        result = {"failed": str(error)}
    except (RuntimeError, MemoryError) as error:
        # torch's own error on a GPU is a RuntimeError too; on a CPU it is one of the allocator's.
        text = str(error).strip() or type(error).__name__
        if not any(sign in text for sign in ("out of memory", "can't allocate memory", "MemoryError")):
            raise
        result = {"failed": f"out of memory: {text.splitlines()[0][:300]}"}
    write_json(answer, result)
    # Process groups and threads of libraries need not end in order: everything is written.
    sys.stdout.flush()
    os._exit(0)


def visible(device: str) -> str:
    """Return the GPU that an item may use, as CUDA_VISIBLE_DEVICES names it: the first one, on a CPU none."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if device == "cuda" else ""


def prefix(device: str) -> str:
    """Return what result files of a device begin with."""
    return "gpu" if device == "cuda" else "standin"


def result_path(output: Path, item: Item, device: str) -> Path:
    """Return an item's result file."""
    return output / f"{prefix(device)}_{item.name}.json"


def heading(item: Item, device: str, machine: Machine) -> dict[str, Any]:
    """Return what every result begins with: what was asked, and on what it was measured."""
    about = {name: machine[name] for name in ("machine", "driver", "cuda_version", "capability", "gpu_bytes")}
    return {"item": item.name, "kind": item.kind, "device": device, "settings": item.settings, **about}


def listed(planned: list[Item], output: Path, device: str) -> str:
    """Return the items in order, as a table for people."""
    lines = []
    for item in planned:
        path = result_path(output, item, device)
        state = "to do"
        if path.is_file():
            result = read_json(path, "gpu.py")
            state = f"failed: {result['failed']}" if "failed" in result else f"done on {result['machine']['date']}"
        lines.append(f"{item.name:<60}{item.seconds:>6} s  {state}")
    return "\n".join([*lines, f"{'together':<60}{sum(item.seconds for item in planned):>6} s"])


# --- the machine ---


def described() -> Machine:
    """Return what `about` finds, asked in another process: a CUDA context of this one would count as use."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "about.json"
        command = [sys.executable, __file__, "--output", folder, "--about", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(ended.stderr.strip().splitlines()[-1])
        return dict(read_json(path, "gpu.py"))


def about() -> Machine:
    """Return hardware, driver and versions, and a line for each thing that this installation lacks."""
    missing = {name: why for name in (*NEEDED, "trl") if (why := fault_of(name))}
    if "torch" in missing:
        raise SystemExit(f"torch cannot be imported: {missing['torch']}")
    import torch

    from benchmarks.machine import PACKAGES, machine

    lacks = [f"{name} cannot be imported ({why})" for name, why in missing.items()]
    if "trl" in missing:
        lacks[-1] += ": the opponent is transformers' Trainer with peft"
    if "transformers" not in missing:
        from zerolora.train.attention import has_varlen_kernel

        if not has_varlen_kernel():
            lacks.append(f"torch {torch.__version__} has no varlen_attn with grouped heads: flash attends row by row")
    cuda = torch.cuda.is_available()
    properties: Any = torch.cuda.get_device_properties(0) if cuda else None
    packages = tuple(name for name in (*PACKAGES, "datasets", "pyarrow", "trl") if name not in missing)
    return {
        "machine": machine(packages), "cuda": cuda, "driver": driver() if cuda else None,
        "cuda_version": torch.version.cuda, "trl": "trl" not in missing, "missing": missing, "lacks": lacks,
        "capability": f"{properties.major}.{properties.minor}" if cuda else None,
        "gpu_bytes": properties.total_memory if cuda else None,
    }  # fmt: skip


def driver() -> str | None:
    """Return the version of the GPU's driver, None if it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no library, no permission: a result without it is still one
        return None


def fault_of(package: str) -> str | None:
    """Return why a package cannot be imported, None if it can."""
    try:
        importlib.import_module(package)
    except Exception as error:  # a package can fail in any way while it is imported
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
    return None


def _interrupted(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the result files")
    parser.add_argument("--budget", type=float, default=3000, help="seconds after which no item is still running")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda if there is a GPU, else cpu")
    parser.add_argument("--list", action="store_true", help="print the items in order, and measure nothing")
    parser.add_argument("--item", help=argparse.SUPPRESS)
    parser.add_argument("--about", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
