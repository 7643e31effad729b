"""The tables of docs/speed.md, from the results: .venv/bin/python benchmarks/train/tables.py prints those there are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolora.files import read_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
Found = dict[str, Any]


def main() -> None:
    """Print every table whose result is there."""
    for name in (name for name in TABLES if (RESULTS / name).is_file()):
        print(f"{name}\n\n{table(name)}\n")


def table(name: str) -> str:
    """Return the table of a result file."""
    return "\n".join(TABLES[name](read_json(RESULTS / name, "benchmarks/train")))


def _reference(found: Found) -> list[str]:
    lines = ["| | tokens/s | ours over it | host memory | ours over it |", "|---|---|---|---|---|"]
    for name, each in found["contestants"].items():
        ratios = [found[what][name]["median"] if name in found[what] else None for what in ("speed", "host_memory")]
        speed, memory = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| {name} | {each['tokens_per_second']:,.0f} | {speed} | {_gib(each)} | {memory} |")
    return lines


def _trl(found: Found) -> list[str]:
    lines = ["| | tokens/s | host memory | GPU memory |", "|---|---|---|---|"]
    for each in (found["ours"], found["theirs"]):
        gpu = f"{each['peak_gpu_bytes'] / 2**30:.2f} GiB" if each["peak_gpu_bytes"] else ""
        lines.append(f"| {each['label']} | {each['tokens_per_second']:,.0f} | {_gib(each)} | {gpu} |")
    ratios = [found[what] and f"{found[what]['median']:.2f}" for what in ("speed", "host_memory", "gpu_memory")]
    return [*lines, f"| ours over it | {' | '.join(ratio or '' for ratio in ratios)} |"]


def _limit(found: Found) -> list[str]:
    lines = ["| | GFLOP/s of a rank | of matrix products | overhead | waiting |", "|---|---|---|---|---|"]
    return lines + [
        f"| {name} | {each['flops_per_second'] / 1e9:,.0f} | {each['ratio_to_matmul']:.0%} | "
        f"{each['overhead_share']:.1%} | {each['communication_share']:.1%} |"
        for name, each in found["trainings"].items()
    ]


def _scaling(found: Found) -> list[str]:
    lines = ["| strategy | efficiency | MB sent a step | counted over predicted |", "|---|---|---|---|"]
    return lines + [
        f"| {name} | {each['efficiency']:.0%} | {sum(each['bytes_counted'].values()) / 1e6:,.1f} | "
        f"{each['counted_over_predicted']:.2f} |"
        for name, each in found["strategies"].items()
    ]


def _start_up(found: Found) -> list[str]:
    names = {"to_first_step": "to the beginning of the first step", "to_its_end": "to its end"}
    return ["| | first time | warm |", "|---|---|---|"] + [
        f"| {text} | {found[name]['first_seconds']:.1f} s | {found[name]['warm_seconds']:.1f} s |"
        for name, text in names.items()
    ]


def _forked_ranks(found: Found) -> list[str]:
    lines = [
        "| ranks, and how they start | first step made after | CPU time | memory | opened files | read |",
        "|---|---|---|---|---|---|",
    ]
    for ranks, ways in found["ranks"].items():
        for way, text in {"separate": "each loads by itself", "forked": "forked"}.items():
            each = ways[way]
            seconds = " | ".join(f"{each[name]:.1f} s" for name in ("first_step_seconds", "cpu_seconds"))
            lines.append(
                f"| {ranks}, {text} | {seconds} | {each['pss_bytes'] / 2**30:.2f} GiB | "
                f"{each['opened_files']} | {each['read_bytes'] / 2**20:.0f} MiB |"
            )
    return lines


def _loading(found: Found) -> list[str]:
    weights, libraries = (found[name] / 2**30 for name in ("weights_bytes", "libraries_anonymous_bytes"))
    lines = [
        f"| {weights:.2f} GiB of weights, {found['ranks']} ranks | all ranks together | most of one rank's own |",
        "|---|---|---|",
        f"| libraries alone | | {libraries:.2f} GiB |",
    ]
    return lines + [
        f"| {name} | {each['node_bytes'] / 2**30:.2f} GiB | {each['rank_anonymous_bytes'] / 2**30:.2f} GiB |"
        for name, each in found["strategies"].items()
    ]


def _gib(each: Found) -> str:
    return f"{each['peak_host_bytes'] / 2**30:.2f} GiB"


def _methods(found: Found) -> list[str]:
    lines = [
        "| method | trained | peak memory | estimated | step | over `lora` | besides the steps | published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {name} | {each['trained_parameters']:,.0f} | {each['peak_bytes'] / 2**30:.2f} GiB | "
        f"{each['predicted_bytes'] / 2**30:.2f} GiB | {each['step_seconds']:.2f} s | {each['step_over_lora']:.2f} | "
        f"{each['other_seconds']:.1f} s | {each['published_bytes'] / 1e6:,.1f} MB |"
        for name, each in found["methods"].items()
    ]


TABLES: dict[str, Callable[[Found], list[str]]] = {
    "train_reference.json": _reference,
    "train_trl.json": _trl,
    "train_limit.json": _limit,
    "train_scaling.json": _scaling,
    "train_start_up.json": _start_up,
    "train_forked_ranks.json": _forked_ranks,
    "train_loading.json": _loading,
    "train_methods.json": _methods,
}

if __name__ == "__main__":
    main()
