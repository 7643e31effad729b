"""Where the documents say what a GPU's figures are, or that there are none: both follow from the result files.

`zerolora`'s documents hold for every kind of item either the sentence that it was not measured or its table:

    .venv/bin/python benchmarks/gpu_kinds/docs.py      # what is missing or out of date, and the tables to write
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.files import read_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
GIB = 2**30
Found = dict[str, Any]


def main() -> None:
    """Print what the documents lack."""
    print("\n\n".join(faults(ROOT, RESULTS)) or "the documents agree with the results")


def faults(root: Path, results: Path) -> list[str]:
    """Return what is wrong in the documents of `root`, given the result files of a GPU in `results`: a sentence that
    something was not measured although it was, or that is missing although it was not; a table that is not there."""
    wrong = []
    for kind, topic in TOPICS.items():
        text = " ".join((root / topic.document).read_text(encoding="utf-8").split())
        found = measured(results, kind)
        if not found and topic.sentence not in text:
            wrong.append(f"{topic.document}: nothing was measured, so write: {topic.sentence}")
        if found and topic.sentence in text:
            wrong.append(f"{topic.document}: it was measured, so remove: {topic.sentence}")
        lines = topic.table(found) if found else []
        if [line for line in lines if line not in text]:
            wrong.append(
                "\n".join([f"{topic.document}: the table of {kind} is missing or out of date; write:", *lines])
            )
    return wrong


def measured(results: Path, kind: str) -> list[Found]:
    """Return the results of a kind that a GPU gave, without those that failed."""
    found = [read_json(path, "benchmarks/gpu.py") for path in sorted(results.glob("gpu_*.json"))]
    return [each for each in found if each["kind"] == kind and each["device"] == "cuda" and "measured" in each]


def _probe(found: list[Found]) -> list[str]:
    lines = ["| GPU | 16-bit products | planned with | memory | planned with |", "|---|---|---|---|---|"]
    for each in found:
        values, planned = each["measured"]["measured"], each["predicted"] or {}
        cells = []
        for name in ("matmul_16bit_flops_per_second", "memory_bytes_per_second"):
            unit = "TFLOP/s" if "flops" in name else "TB/s"
            rates = (values[name], planned.get(name))
            cells += [f"{rate / 1e12:,.1f} {unit}" if rate else "" for rate in rates]
        lines.append(f"| {each['measured']['hardware']['name']} | {' | '.join(cells)} |")
    return lines


def _memory(found: list[Found]) -> list[str]:
    lines = [
        "| model | strategy | trained | attention | kept | rows × tokens | predicted | allocated | error | reserved |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        asked = each["settings"]
        kept = "layer inputs" if asked["checkpointing"] else "all"
        kept += ", on the host" if asked.get("offload") else ""
        trained = ", ".join(asked[name] for name in ("method", "precision", "optimizer") if name in asked)
        what = (asked["model"], asked["strategy"], trained, asked["attention"], kept)
        for predicted, row in zip(each["predicted"], each["measured"], strict=True):
            size = f"{row['micro_batch']} × {row['length']:,}"
            if "error" not in row:
                why = row.get("failed") or row["skipped"]
                lines.append(f"| {' | '.join(what)} | {size} | {predicted['gpu']['total'] / GIB:.2f} GiB | {why} | | |")
                continue
            lines.append(
                f"| {' | '.join(what)} | {size} | {predicted['gpu']['total'] / GIB:.2f} GiB | "
                f"{row['gpu_allocated'] / GIB:.2f} GiB | {row['error']:+.1%} | {row['gpu_reserved'] / GIB:.2f} GiB |"
            )
    return lines


def _reserve(found: list[Found]) -> list[str]:
    names = ("context", "communication", "allocator", "libraries", "total")
    lines = [f"| model | strategy | {' | '.join(names)} | assumed |", f"|---|---|{'---|' * len(names)}---|"]
    for each in found:
        for strategy, parts in each["measured"].items():
            asked = f"{each['predicted'][strategy]['total'] / GIB:.2f} GiB"
            cells = " | ".join(f"{parts[name] / GIB:.2f} GiB" for name in names)
            lines.append(f"| {each['settings']['model']} | {strategy} | {cells} | {asked} |")
    return lines


def _speed(found: list[Found]) -> list[str]:
    lines = ["| model | chosen | predicted | measured | of matrix products | MFU |", "|---|---|---|---|---|---|"]
    for each in found:
        predicted, row = each["predicted"], each["measured"]
        kept = "checkpointing" if predicted["activation_checkpointing"] else "no checkpointing"
        chosen = f"`{predicted['strategy']}`, {predicted['micro_batch']} × {predicted['accumulation']}, {kept}"
        mfu = f"{row['mfu']:.0%}" if row["mfu"] else ""
        lines.append(
            f"| {each['settings']['model']} | {chosen} | {predicted['tokens_per_second']:,.0f} tokens/s | "
            f"{row['tokens_per_second']:,.0f} tokens/s | {row['of_matmul']:.0%} | {mfu} |"
        )
    return lines


def _reference(found: list[Found]) -> list[str]:
    lines = ["| model | | tokens/s | zerolora over it | GPU memory |", "|---|---|---|---|---|"]
    for each in found:
        for name, row in each["measured"]["contestants"].items():
            ratio = each["measured"]["speed"].get(name)
            over = f"{ratio['median']:.2f}" if ratio else ""
            speed = f"{row['tokens_per_second']:,.0f}"
            lines.append(f"| {each['settings']['model']} | {name} | {speed} | {over} | {_gib(row)} |")
    return lines


def _contest(found: list[Found]) -> list[str]:
    lines = ["| model | | tokens/s | GPU memory |", "|---|---|---|---|"]
    for each in found:
        model, rows = each["settings"]["model"], each["measured"]
        lines += [
            f"| {model} | {rows[side]['label']} | {rows[side]['tokens_per_second']:,.0f} | {_gib(rows[side])} |"
            for side in ("ours", "theirs")
        ]
        memory = f"{rows['gpu_memory']['median']:.2f}" if rows["gpu_memory"] else ""
        lines.append(f"| {model} | zerolora over the other | {rows['speed']['median']:.2f} | {memory} |")
    return lines


def _precision(found: list[Found]) -> list[str]:
    lines = ["| model | loss on | mean difference | worst |", "|---|---|---|---|"]
    for each in found:
        for label, row in sorted(each["measured"]["relative_difference"].items()):
            lines.append(f"| {each['settings']['model']} | {label} | {row['mean']:.2e} | {row['worst']:.2e} |")
    return lines


def _loading(found: list[Found]) -> list[str]:
    lines = ["| model | strategy | seconds | host peak | predicted for the run |", "|---|---|---|---|---|"]
    for each in found:
        for strategy, row in each["measured"]["strategies"].items():
            seconds = row["model_seconds"] + row["engine_seconds"]
            predicted = each["predicted"][strategy]["total"]
            lines.append(
                f"| {each['settings']['model']} | {strategy} | {seconds:.1f} s | {row['node_bytes'] / GIB:.2f} GiB | "
                f"{predicted / GIB:.2f} GiB |"
            )
    return lines


def _start_up(found: list[Found]) -> list[str]:
    lines = ["| model | to the beginning of the first step | to its end |", "|---|---|---|"]
    for each in found:
        cells = [f"{each['measured'][name]['warm_seconds']:.1f} s" for name in ("to_first_step", "to_its_end")]
        lines.append(f"| {each['settings']['model']} | {' | '.join(cells)} |")
    return lines


def _choice(found: list[Found]) -> list[str]:
    lines = ["| model | configurations | rank correlation | chosen over best |", "|---|---|---|---|"]
    for each in found:
        row, layers = each["measured"], each["settings"]["layers"]
        model = each["settings"]["model"] + (f", {layers} layers" if layers else "")
        correlation = "" if row["spearman"] is None else f"{row['spearman']:.2f}"
        ratio = "failed" if row["ratio"] is None else f"{row['ratio']:.1%}"
        lines.append(f"| {model} | {row['measured']} | {correlation} | {ratio} |")
    return lines


def _gib(row: Found) -> str:
    return f"{row['peak_gpu_bytes'] / GIB:.2f} GiB"


@dataclass(frozen=True)
class Topic:
    """What the documents say of one kind of item."""

    document: str
    """Where."""
    what: str
    """What the kind measures, as a part of a sentence."""
    table: Callable[[list[Found]], list[str]]
    """The table of its results."""

    @property
    def sentence(self) -> str:
        """What the document says as long as nothing was measured."""
        return f"Not measured on a GPU: {self.what}."


TOPICS = {
    "memory": Topic("docs/memory.md", "memory while training", _memory),
    "reserve": Topic("docs/memory.md", "the reserve", _reserve),
    "speed": Topic("docs/speed.md", "tokens/s and MFU", _speed),
    "reference": Topic("docs/speed.md", "the published experiment's way", _reference),
    "contest": Topic("docs/speed.md", "TRL", _contest),
    "loading": Topic("docs/speed.md", "loading", _loading),
    "start_up": Topic("docs/speed.md", "start-up", _start_up),
    "precision": Topic("docs/training.md", "losses in bf16 and fp16", _precision),
    "choice": Topic("docs/choice.md", "the choice", _choice),
    "probe": Topic("docs/choice.md", "the rates that the planner assumes", _probe),
}

if __name__ == "__main__":
    main()
