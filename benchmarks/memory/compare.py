"""Hold the prediction against a trace of the real step, over models x methods x strategies x batches.

    .venv/bin/python benchmarks/memory/compare.py            # trace what is not traced yet, then compare and draw
    .venv/bin/python benchmarks/memory/compare.py --no-trace # compare with the traces there are

Traces are kept in benchmarks/results/memory_traces.jsonl, one a line, with what was asked; they take seconds to
minutes each. Writes benchmarks/results/memory.json (table and errors) and memory.svg (scatter plot).
"""

import argparse
import concurrent.futures
import itertools
import json
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerolora.files import write_json
from zerolora.memory.estimate import attentions
from zerolora.memory.predict import predict, sized
from zerolora.memory.read_spec import read_model_spec
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.registry import create
from zerolora.planner.candidates import Choice
from zerolora.planner.render import rendered
from zerolora.strategies.base import Target

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
TRACES = RESULTS / "memory_traces.jsonl"
MODELS = ROOT / "config/recipes/models"
# How many combinations of each model are drawn. Large models take minutes each, so the second draw has small ones only.
DRAWS: dict[int, dict[str, int]] = {
    4: {
        "smollm2-135m": 16, "gpt2": 6, "qwen2.5-0.5b": 16, "llama-3.2-1b": 12, "phi-3-mini-4k": 8, "qwen2.5-7b": 12,
        "mistral-7b": 8, "llama-3-8b": 16, "qwen3-8b": 8, "gemma-2-9b": 8, "qwen2.5-14b": 12, "llama-3-70b": 5,
    },
    5: {"smollm2-135m": 10, "gpt2": 4, "qwen2.5-0.5b": 8, "llama-3.2-1b": 6, "gemma-3-1b": 3},
    6: {"smollm2-135m": 4, "qwen2.5-0.5b": 4, "llama-3.2-1b": 3, "llama-3-8b": 2, "qwen2.5-14b": 1},
    7: {
        "smollm2-135m": 4, "gpt2": 2, "qwen2.5-0.5b": 4, "llama-3.2-1b": 3, "gemma-3-1b": 2, "phi-3-mini-4k": 1,
        "qwen2.5-7b": 2, "llama-3-8b": 2, "gemma-2-9b": 1, "qwen2.5-14b": 2,
    },
}  # fmt: skip
OURS = 7  # the draw of what training does: LoRA, the loss by chunks, the fastest attention that a model has
TRACED = {"qwen2.5-7b": 8, "mistral-7b": 4, "llama-3-8b": 8, "qwen3-8b": 4, "gemma-2-9b": 4, "qwen2.5-14b": 5,
          "llama-3-70b": 3}  # fmt: skip
METHODS = ("lora", "lora", "lora", "full", "dora", "ia3")
STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3", "zero3_offload")
WITHOUT_IA3 = ("qwen3-8b", "phi-3-mini-4k")  # peft does not know which of their modules to scale
LENGTHS = {1: (256, 1024, 2048, 4096), 4: (128, 512, 1024), 16: (64, 256)}
DROPPED = ("llama-3.2-1b", "mistral-7b", "gpt2")  # whose adapters are tried with dropout


def main() -> None:
    """Trace, compare, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", help="one model")
    options = parser.parse_args()
    wanted = [case for case in cases() if options.only in (None, case["model"])]
    traced = {key(trace["case"]): trace["bytes"] for trace in read_traces()}
    if not options.no_trace:
        trace_all([case for case in wanted if key(case) not in traced], options.workers)
        traced = {key(trace["case"]): trace["bytes"] for trace in read_traces()}
    rows = [compared(case, traced[key(case)]) for case in wanted if key(case) in traced]
    rows = [row | others(row) for row in rows]
    for row in sorted(rows, key=lambda row: row["error"]):
        print(f"{row['error']:+7.2%} {row['predicted'] / 2**30:9.2f} {row['traced'] / 2**30:9.2f} GiB  {label(row)}")
    summary = {"all": errors(rows), **grouped(rows)}
    print(markdown(summary))
    if not options.only:
        sys.path.append(str(ROOT / "benchmarks"))
        from draw import draw
        from machine import machine

        write_json(RESULTS / "memory.json", {"machine": machine(), **summary, "rows": rows})
        draw(rows, RESULTS / "memory.svg")


def all_compared() -> list[dict[str, Any]]:
    """Return predicted and traced bytes of every case that is traced."""
    return [compared(trace["case"], trace["bytes"]) for trace in read_traces()]


def cases() -> list[dict[str, Any]]:
    """Return what is asked: a seeded draw for each model, of methods, strategies and batches."""
    found: list[dict[str, Any]] = []
    for seed, counts in DRAWS.items():
        draw = random.Random(seed)  # noqa: S311 (a sample, no secret)
        for model, count in counts.items():
            # Weights of 4 bits are not sharded, and to trace them takes bitsandbytes: a draw apart, without stage 3.
            methods, strategies = (("qlora",), STRATEGIES[:5]) if seed == 6 else (METHODS, STRATEGIES)
            methods = ("lora",) if seed == OURS else methods
            both = list(itertools.product(methods, strategies))
            draw.shuffle(both)
            drawn = [case_of(draw, model, *each) for each in both[:count]]
            if seed == OURS:
                drawn = [as_trained(case) for case in drawn]
            drawn = [case for case in drawn if case["method"] != "ia3" or model not in WITHOUT_IA3]
            found += [case for case in drawn[: TRACED.get(model)] if case not in found]
    return found


def case_of(draw: random.Random, model: str, method: str, strategy: str) -> dict[str, Any]:
    """Return one drawn case."""
    if method == "full" and strategy == "ddp":
        strategy = "zero1"
    micro_batch = draw.choice((1, 1, 4, 16))
    length = draw.choice(LENGTHS[micro_batch])
    attention = draw.choice(("sdpa", "sdpa", "eager")) if length <= 2048 else "sdpa"
    if model == "gemma-2-9b":  # caps its scores, which fused kernels do not
        attention = "eager"
    ranks = draw.choice((2, 8, 64))
    return {
        "model": model,
        "method": method,
        "strategy": strategy,
        "ranks": 1 if strategy == "ddp" else ranks,
        "micro_batch": micro_batch,
        "length": length,
        "checkpointing": draw.random() < 0.5,
        "attention": attention,
        "logits": draw.choice((0, 0, length // 2)),
        "r": draw.choice((8, 16, 64)),
        "precision": "fp32" if model == "smollm2-135m" and draw.random() < 0.3 else "bf16",
        "dropout": 0.05 if model in DROPPED and method in ("lora", "dora", "qlora") else 0.0,
    }


def as_trained(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case with the loss and the attention that training takes."""
    best = attentions(read_model_spec(MODELS / f"{case['model']}.json"))[0]
    return {**case, "loss": "fused", "attention": best}


def key(case: dict[str, Any]) -> str:
    """Return a case as text."""
    return json.dumps(case, sort_keys=True)


def label(row: dict[str, Any]) -> str:
    """Return a case for people."""
    parts = (row[name] for name in ("model", "method", "strategy", "ranks", "attention", "precision"))
    saving = "checkpointing" if row["checkpointing"] else ""
    return " ".join(map(str, (*parts, f"{row['micro_batch']}x{row['length']}", row["logits"], saving, row["phase"])))


def spec_of(case: dict[str, Any]) -> TrainingSpec:
    """Return the training spec of a case."""
    return TrainingSpec(
        strategy=case["strategy"],
        method=create(case["method"], r=case["r"], dropout=case["dropout"]),
        nodes=max(1, case["ranks"] // 8),
        ranks_per_node=min(8, case["ranks"]),
        micro_batch=case["micro_batch"],
        accumulation=1,
        length=case["length"],
        activation_checkpointing=case["checkpointing"],
        attention=case["attention"],
        precision=case["precision"],
        loss=case.get("loss", "supervised" if case["logits"] else "full"),
        logits=case["logits"],
    )


NOT_TRACED = ("loading", "evaluation", "saving")  # a trace is of a step


def compared(case: dict[str, Any], traced: dict[str, int]) -> dict[str, Any]:
    """Return predicted and traced bytes of a case. A trace has one device, so what is offloaded counts in both."""
    prediction = predict(read_model_spec(MODELS / f"{case['model']}.json"), spec_of(case))
    step = {name: value + prediction.offloaded for name, value in prediction.phases.items() if name not in NOT_TRACED}
    for name in ("backward_end", "optimizer"):
        step[name] += prediction.offloaded_step
    phase = max(step, key=step.__getitem__)
    return {
        **case,
        "predicted": step[phase],
        "traced": traced["peak"],
        "phase": phase,
        "error": step[phase] / traced["peak"] - 1,
    }


def others(row: dict[str, Any]) -> dict[str, int | None]:
    """Return what DeepSpeed's and accelerate's own estimators answer for a case, in bytes of a GPU."""
    from baselines import baselines

    config = MODELS / f"{row['model']}.json"
    local = min(8, row["ranks"])
    found = baselines(config, row["strategy"], row["precision"], local, row["ranks"] // local)
    return {name: answer.gpu for name, answer in found.items()}


def grouped(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors by method, by strategy and by model size, and those of the other estimators."""
    result: dict[str, Any] = {
        f"by_{name}": {
            value: errors([row for row in rows if row[name] == value]) for value in sorted({row[name] for row in rows})
        }
        for name in ("method", "strategy", "model")
    }
    result["others"] = {}
    for name in ("deepspeed", "accelerate"):
        answered = [abs(row[name] / row["traced"] - 1) for row in rows if row[name]]
        factors = [max(row[name] / row["traced"], row["traced"] / row[name]) for row in rows if row[name]]
        result["others"][name] = {
            "combinations": len(answered),
            "mean_absolute_error": sum(answered) / len(answered),
            "worst_factor": max(factors),
        }
    return result


def markdown(summary: dict[str, Any]) -> str:
    """Return the table of docs/memory.md."""
    lines = ["| | combinations | mean error | worst | lowest |", "|---|---|---|---|---|"]
    groups = {"all": summary["all"]}
    for name in ("method", "strategy"):
        groups |= summary[f"by_{name}"]
    for name, found in groups.items():
        lines.append(
            f"| {name} | {found['combinations']} | {found['mean_absolute_error']:.2%} | {found['worst_error']:+.1%} | "
            f"{found['lowest_error']:+.1%} |"
        )
    for name, label in (("deepspeed", "DeepSpeed's estimator"), ("accelerate", "accelerate estimate-memory")):
        found = summary["others"][name]
        lines.append(
            f"| {label} | {found['combinations']} | {found['mean_absolute_error']:.0%} | "
            f"{found['worst_factor']:.0f} times off | |"
        )
    return "\n".join(lines)


def errors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean, worst and lowest relative error."""
    found = [row["error"] for row in rows]
    return {
        "combinations": len(found),
        "mean_absolute_error": sum(map(abs, found)) / len(found),
        "worst_error": max(found, key=abs),
        "lowest_error": min(found),
    }


def trace_all(wanted: list[dict[str, Any]], workers: int) -> None:
    """Trace cases in processes of their own, small models first, and keep each as it comes."""
    lock = threading.Lock()

    def one(case: dict[str, Any]) -> None:
        result = subprocess.run(command(case), capture_output=True, text=True, check=False)
        if result.returncode:
            print(f"FAILED {key(case)}\n{result.stderr[-2000:]}", file=sys.stderr)
            return
        with lock, TRACES.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, "bytes": json.loads(result.stdout.splitlines()[-1])}) + "\n")

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, wanted))


def command(case: dict[str, Any]) -> list[str]:
    """Return the command that traces a case."""
    options = {
        "--model": MODELS / f"{case['model']}.json",
        "--method": case["method"],
        "--lora-r": case["r"],
        "--lora-dropout": case["dropout"],
        "--strategy": case["strategy"],
        "--ranks": case["ranks"],
        "--micro-batch": case["micro_batch"],
        "--sequence-length": case["length"],
        "--logits": case["logits"],
        "--loss": case.get("loss", "plain"),
        "--attention": case["attention"],
        "--precision": case["precision"],
        "--zero": json.dumps(zero_json(case)),
    }
    texts = [str(text) for pair in options.items() for text in pair]
    saving = ["--activation-checkpointing"] if case["checkpointing"] else []
    return [sys.executable, str(Path(__file__).with_name("trace.py")), *texts, *saving]


def zero_json(case: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed JSON that render writes for a case; pinned memory and overlap are CUDA's alone."""
    spec = spec_of(case)
    sizes = sized(read_model_spec(MODELS / f"{case['model']}.json"), spec)
    choice = Choice(
        case["strategy"],
        case["micro_batch"],
        1,
        case["checkpointing"],
        case["attention"],
        replace(sizes, overlap=False),
    )
    target = Target(
        device="cpu", precision=case["precision"], nodes=spec.nodes, ranks_per_node=spec.ranks_per_node, nvme=None
    )
    return rendered(choice, target, 1.0)[0]


def read_traces() -> list[dict[str, Any]]:
    """Return the traces that are kept."""
    if not TRACES.exists():
        return []
    return [json.loads(line) for line in TRACES.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
