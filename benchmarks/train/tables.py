"""Print the tables of docs/speed.md and docs/methods.md.

.venv/bin/python benchmarks/train/tables.py
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measuring
from measuring import RESULTS

from zerolora.files import read_json

Result = dict[str, Any]


def main() -> None:
    """Print the table of every result file."""
    for name in TABLES:
        if (RESULTS / name).is_file():
            print(f"{name}\n\n{table(name)}\n")


def table(name: str) -> str:
    """Return the table of a result file."""
    return TABLES[name](read_json(RESULTS / name, "benchmarks/train"))


def _reference(result: Result) -> str:
    rows = []
    for name, each in result["contestants"].items():
        ratios = [result[what][name]["median"] if name in result[what] else None for what in ("speed", "host_memory")]
        speed, memory = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        rows.append((name, f"{each['tokens_per_second']:,.0f}", speed, _gib(each["peak_host_bytes"]), memory))
    return measuring.table(["", "tokens/s", "ours over it", "host memory", "ours over it"], rows)


def _trl(result: Result) -> str:
    rows: list[Sequence[str]] = []
    for each in (result["ours"], result["theirs"]):
        gpu = _gib(each["peak_gpu_bytes"]) if each["peak_gpu_bytes"] else ""
        rows.append([each["label"], f"{each['tokens_per_second']:,.0f}", _gib(each["peak_host_bytes"]), gpu])
    ratios = [result[what] and f"{result[what]['median']:.2f}" for what in ("speed", "host_memory", "gpu_memory")]
    rows.append(["ours over it", *(ratio or "" for ratio in ratios)])
    return measuring.table(["", "tokens/s", "host memory", "GPU memory"], rows)


def _preference_peers(result: Result) -> str:
    rows = []
    for name, each in result["contestants"].items():
        seconds = each["cpu_seconds_a_step"]["median"] + each["reference_cpu_seconds_a_step"]["median"]
        ratios = [f"{result[what][name]['median']:.2f}" if name in result[what] else "" for what in ("speed", "memory")]
        cells = (f"{seconds:.2f}", f"{each['pairs_a_cpu_second']:.2f}", ratios[0])
        rows.append((name, *cells, _gib(each["peak_host_bytes"]["median"]), ratios[1]))
    header = ["DPO", "CPU seconds a step", "pairs a CPU second", "seconds over ours", "host memory", "ours over it"]
    return measuring.table(header, rows)


def _limit(result: Result) -> str:
    shares = {"ratio_to_matmul": ".0%", "overhead_share": ".1%", "communication_share": ".1%"}
    rows = [
        (name, f"{each['flops_per_second'] / 1e9:,.0f}", *(format(each[key], form) for key, form in shares.items()))
        for name, each in result["trainings"].items()
    ]
    return measuring.table(["", "GFLOP/s of a rank", "of matrix products", "overhead", "waiting"], rows)


def _scaling(result: Result) -> str:
    rows = []
    for name, each in result["strategies"].items():
        sent = f"{sum(each['bytes_counted'].values()) / 1e6:,.1f}"
        rows.append((name, f"{each['efficiency']:.0%}", sent, f"{each['counted_over_predicted']:.2f}"))
    return measuring.table(["strategy", "efficiency", "MB sent a step", "counted over predicted"], rows)


def _start_up(result: Result) -> str:
    names = {"to_first_step": "to the beginning of the first step", "to_its_end": "to its end"}
    rows = [
        (text, f"{result[name]['first_seconds']:.1f} s", f"{result[name]['warm_seconds']:.1f} s")
        for name, text in names.items()
    ]
    return measuring.table(["", "first time", "warm"], rows)


def _forked_ranks(result: Result) -> str:
    rows = []
    for ranks, ways in result["ranks"].items():
        for way, text in {"separate": "each loads by itself", "forked": "forked"}.items():
            each = ways[way]
            seconds = (f"{each[name]:.1f} s" for name in ("first_step_seconds", "cpu_seconds"))
            read = f"{each['read_bytes'] / 2**20:.0f} MiB"
            rows.append((f"{ranks}, {text}", *seconds, _gib(each["pss_bytes"]), each["opened_files"], read))
    header = ["ranks, and how they start", "first step made after", "CPU time", "memory", "opened files", "read"]
    return "\n\n".join([measuring.table(header, rows), _starts(result["start"])])


def _starts(start: Result) -> str:
    rows = []
    for device in ("cpu", "cuda"):
        for ranks, ways in start.get(device, {}).items():
            seconds = [f"{ways[way]['cpu_seconds']:.1f} s" for way in ("separate", "forked")]
            walls = [f"{ways[way]['wall_seconds']:.1f} s" for way in ("separate", "forked")]
            rows.append((f"{ranks}, {device}", *seconds, f"{ways['cpu_forked_over_separate']:.2f}", *walls))
    header = ["ranks", "CPU time separately", "forked", "ratio", "wall time separately", "forked"]
    return measuring.table(header, rows)


def _loading(result: Result) -> str:
    weights = f"{_gib(result['weights_bytes'])} of weights, {result['ranks']} ranks"
    rows = [("libraries alone", "", _gib(result["libraries_anonymous_bytes"]))] + [
        (name, _gib(each["node_bytes"]), _gib(each["rank_anonymous_bytes"]))
        for name, each in result["strategies"].items()
    ]
    return measuring.table([weights, "all ranks together", "most private memory of a rank"], rows)


def _loading_quantized(result: Result) -> str:
    def most(way: Result, figure: str) -> str:
        return _gib(max(each[figure] for each in way["ranks"]))

    figures = ("model_peak_bytes", "model_end_bytes", "engine_peak_bytes")
    rows = [
        (name, text, *(most(ways[way], figure) for figure in figures))
        for name, ways in result["strategies"].items()
        for way, text in {"shard_by_shard": "shard by shard", "whole": "whole"}.items()
    ]
    base = f"{_gib(result['weights_bytes'])} in {result['precision']}, {_gib(result['quantized_bytes'])} in 4 bits"
    header = [base, "read", "while it is read", "then", "while its engine is made"]
    return measuring.table(header, rows)


def _methods(result: Result) -> str:
    rows = [
        (
            name,
            f"{each['trained_parameters']:,.0f}",
            _gib(each["peak_bytes"]),
            _gib(each["predicted_bytes"]),
            f"{each['step_seconds']:.2f} s",
            f"{each['step_over_lora']:.2f}",
            f"{each['other_seconds']:.1f} s",
            f"{each['published_bytes'] / 1e6:,.1f} MB",
        )
        for name, each in result["methods"].items()
    ]
    header = ["method", "trained", "peak memory", "estimated", "step", "over `lora`", "besides the steps", "published"]
    return measuring.table(header, rows)


def _common_prefix(result: Result) -> str:
    rows = []
    for name, each in result["tasks"].items():
        whole, once = (
            (each["positions"][variant], each["cpu_seconds"][variant]) for variant in ("whole rows", "prefix once")
        )
        seconds = (f"{whole[1]:.2f} s", f"{once[1]:.2f} s", f"{each['ratio']['median']:.2f}")
        rows.append((name, f"{once[0] / whole[0]:.0%}", *seconds))
    return measuring.table(["", "positions computed", "whole rows", "prefix once", "ratio"], rows)


def _peers(result: Result) -> str:
    tasks = result["tasks"]
    rows = []
    for name in dict.fromkeys(name for each in tasks.values() for name in each["cpu_seconds_a_step"]):
        cells = []
        for each in tasks.values():
            seconds = each["cpu_seconds_a_step"].get(name)
            over = f" ({each['over_ours'][name]:.2f})" if name in each["over_ours"] else ""
            cells.append(f"{seconds['median']:.2f}{over}" if seconds else "")
        rows.append((name, *cells))
    return measuring.table(["CPU seconds a step (over ours)", *tasks], rows)


def _host_optimizers(result: Result) -> str:
    rows = [
        (name, f"{each['parameters_per_second'] / 1e6:,.0f} million", f"{each['time_over_adamw']:.1f}", "", "")
        for name, each in result["optimizers"].items()
    ]
    names = {"adamw": "fused", "adamw, unfused": "unfused"}
    steps = [(each, result["zero2_offload"].get(names.get(each[0], ""))) for each in rows]
    return measuring.table(
        ["optimizer", "parameters/s", "time over `adamw`", "offloaded step", "its optimizer"],
        [
            each if step is None else (*each[:3], f"{step['step_seconds']:.2f} s", f"{step['optimizer_seconds']:.2f} s")
            for each, step in steps
        ],
    )


COMPILING = ("own code", "own code, padded", "compiled")  # the variants of compile.py


def _compile(result: Result) -> str:
    rows = []
    for name, case in result["cases"].items():
        own, padded, compiled = (case["epoch_cpu_seconds"][variant] for variant in COMPILING)
        count = sum(each["micro_batches_of_the_data"] for each in case["lengths"].values())
        before, after = (case["bytes_of_longest"][variant] for variant in COMPILING[1:])
        rows.append(
            (
                name, *(f"{each / count:.2f} s" for each in (own, padded, compiled)), f"{own / compiled:.2f}",
                f"{padded / compiled:.2f}", f"{case['compile_cpu_seconds']:.0f} s",
                f"{after['saved'] / before['saved']:.2f}", f"{after['peak'] / before['peak']:.2f}",
            )
        )  # fmt: skip
    header = ["", "own code", "own code, padded", "compiled", "own over compiled", "padded over compiled", "compiling"]
    return measuring.table([*header, "saved bytes", "peak bytes"], rows)


def _kernels(result: Result) -> str:
    rows = []
    for name, precisions in result["models"].items():
        for precision, each in precisions.items():
            less, whole = (each["saved_bytes_a_token"][what] for what in ("less", "whole"))
            cells = [
                f"{less[part]['measured']:,.0f} ({less[part]['predicted']:,.0f})" if part in less else ""
                for part in ("norm", "mlp", "all")
            ]
            share = whole["all"]["measured"] / whole["own"]["measured"]
            errors = [f"{each[what]['gradients']:.1e}" for what in ("own_from_fp32", "fused_from_fp32")]
            errors = errors if precision != "fp32" else ["", f"{each['fused_from_own']['gradients']:.1e}"]
            rows.append((f"{name}, {precision}", *cells, f"{share:.2f}", *errors))
    header = ["bytes a token that kernels do not save", "norm", "MLP", "all", "saved, over own"]
    return measuring.table([*header, "own gradients from fp32", "fused gradients from fp32"], rows)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


TABLES: dict[str, Callable[[Result], str]] = {
    "train_reference.json": _reference,
    "train_trl.json": _trl,
    "train_common_prefix.json": _common_prefix,
    "train_compile.json": _compile,
    "train_kernels.json": _kernels,
    "train_peers.json": _peers,
    "preference_peers.json": _preference_peers,
    "train_limit.json": _limit,
    "train_scaling.json": _scaling,
    "train_start_up.json": _start_up,
    "train_forked_ranks.json": _forked_ranks,
    "train_loading.json": _loading,
    "train_loading_quantized.json": _loading_quantized,
    "train_methods.json": _methods,
    "train_host_optimizers.json": _host_optimizers,
}

if __name__ == "__main__":
    main()
