"""Hold the prediction against a trace of the real step, over models x methods x strategies x batches.

    .venv/bin/python benchmarks/memory/compare.py            # trace what is not traced yet, then compare and draw
    .venv/bin/python benchmarks/memory/compare.py --no-trace # compare with the traces there are

Traces are kept in benchmarks/results/memory_traces.jsonl, one a line, with what was asked; they take seconds to
minutes each. Writes benchmarks/results/memory.json (table and errors) and memory.svg (scatter plot).
"""

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import json
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import write_json
from zerolora.memory.estimate import attentions
from zerolora.memory.predict import predict, sized
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.registry import create
from zerolora.model.read_spec import from_config
from zerolora.model.spec import ModelSpec, with_rows
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.candidates import Choice
from zerolora.planner.render import rendered
from zerolora.strategies.strategy import Target

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
TRACES = RESULTS / "memory_traces.jsonl"
MODELS = ROOT / "config/recipes/models"
OWN_MODELS = Path(__file__).with_name("models")  # mixtures of experts, with published sizes
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
# Every method on every family, with few layers of published sizes; the draws show how layers are extrapolated.
EVERY = ("olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b", "mixtral-8x22b",
         "pythia-1.4b", "falcon-7b", "opt-1.3b", "bloom-560m", "gpt2", "gemma-2-9b", "gemma-3-1b", "phi-3-mini-4k",
         "qwen3-8b", "qwen2.5-0.5b", "mistral-7b", "llama-3.2-1b", "deepseek-v3", "gemma-2b")  # fmt: skip
FEW_LAYERS = 5
VARIANTS = (
    ("lora", "ddp"),
    ("qlora", "zero2"),
    ("qlora-peft", "ddp"),
    ("full", "zero1"),
    ("ia3", "ddp"),
    ("dora", "zero0"),
    ("lora", "zero3"),
    ("qdora", "zero2"),
    ("full", "ddp"),
    ("qdora", "ddp"),
    ("vera", "zero2"),
    ("vera", "ddp"),
)
IN_8_BITS = ("llama-3.2-1b", "qwen2.5-0.5b", "gpt2")  # whose base is traced in int8 as well
QUERIES = {"llama-3.2-1b": "q_proj", "qwen2.5-0.5b": "q_proj", "gpt2": "c_attn"}
METHODS = ("lora", "lora", "lora", "full", "dora", "ia3")
STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3", "zero3_offload")
# peft does not know which of their modules to scale.
WITHOUT_IA3 = ("qwen3-8b", "phi-3-mini-4k", "olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite",
               "deepseek-v3", "qwen1.5-moe-a2.7b")  # fmt: skip
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
    return found + of_optimizers() + offloaded() + every_method()


def offloaded() -> list[dict[str, Any]]:
    """Return a few cases of activation offload, of rows long enough for it to matter: with a leaf of the graph as the
    first layer's input and without, with weights that are gathered, and with masks among a layer's inputs."""
    batch: dict[str, Any] = {"ranks": 2, "micro_batch": 1, "length": 4096, "logits": 0, "r": 8, "checkpointing": True}
    batch |= {"offload": True, "precision": "bf16", "dropout": 0.0}
    long = batch | {"attention": "flash", "loss": "fused"}
    masked = batch | {"micro_batch": 4, "length": 1024, "attention": "eager", "loss": "fused"}
    return [
        {"model": "llama-3.2-1b", "method": "lora", "strategy": "zero2"} | long,
        {"model": "qwen2.5-0.5b", "method": "lora", "strategy": "zero3"} | long,
        {"model": "gpt2", "method": "lora", "strategy": "zero2"} | masked,
        {"model": "llama-3.2-1b", "method": "full", "strategy": "zero2"} | batch | {"attention": "sdpa"},
    ]


def of_optimizers() -> list[dict[str, Any]]:
    """Return a few cases of the other optimizers. In full fine-tuning their states are a large part of the bytes."""
    runs = itertools.product(("lion", "adamw_8bit", "adafactor"), ("lora", "full"), ("ddp", "zero0", "zero2", "zero3"))
    batch = {"micro_batch": 1, "length": 256, "checkpointing": False, "attention": "sdpa", "logits": 0, "r": 64}
    found = [
        {"model": "smollm2-135m", "method": method, "strategy": strategy, "ranks": 1 if strategy == "ddp" else 8}
        | {**batch, "precision": "bf16", "dropout": 0.0, "optimizer": optimizer}
        for optimizer, method, strategy in runs
        if (method, strategy) != ("full", "ddp")
    ]
    target = Target(device="cuda", precision="bf16", nodes=1, ranks_per_node=8, nvme=None)
    specs = [spec_of(case) for case in found]
    return [case for case, spec in zip(found, specs, strict=True) if not spec.optimizer.conflict(spec.layout, target)]


def every_method() -> list[dict[str, Any]]:
    """Return a case of each method on each family that both can run."""
    found = []
    for variant, (method, strategy) in enumerate(VARIANTS):
        for number, model in enumerate(EVERY):
            case = {
                **{"model": model, "method": method.partition("-")[0], "strategy": strategy, "layers": FEW_LAYERS},
                **{"ranks": 1 if strategy == "ddp" else 2, "micro_batch": 1, "length": 1024, "logits": 0},
                "r": 256 if method == "vera" else 8,
                **{"checkpointing": (number + variant) % 2 == 1, "precision": "bf16", "dropout": 0.0},
            }
            if method == "qlora-peft":
                case["prepared_by"] = "peft"
            case["attention"] = attentions(model_of(case))[0]
            if method == "ia3" and model in WITHOUT_IA3:
                continue
            if strategy == "zero3" and not model_of(case).experts:
                continue  # the draws have stage 3
            if method == "qlora-peft" and model_of(case).experts:
                continue  # torch's fake kernel multiplies no experts in fp32
            with contextlib.suppress(UserError):  # peft has no DoRA of experts, transformers no 4-bit Falcon
                spec_of(case).parameters(model_of(case))
                found.append(case)
                if (method, strategy) == ("qlora", "zero2") and model in IN_8_BITS:
                    found += [{**case, "quantization": "int8", "checkpointing": each} for each in (False, True)]
                    # What is not adapted keeps its input in int8 only.
                    found.append({**case, "quantization": "int8", "checkpointing": False, "targets": QUERIES[model]})
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
    best = attentions(model_of(case))[0]
    return {**case, "loss": "fused", "attention": best}


def config_of(name: str) -> Path:
    """Return a model's config.json."""
    path = MODELS / f"{name}.json"
    return path if path.exists() else OWN_MODELS / f"{name}.json"


@functools.cache
def spec_of_model(name: str, layers: int | None) -> ModelSpec:
    """Return a model's spec, with another number of layers if one is given."""
    path = config_of(name)
    config = json.loads(path.read_text(encoding="utf-8"))
    return from_config(config | ({"num_hidden_layers": layers} if layers else {}), path)


def model_of(case: dict[str, Any]) -> ModelSpec:
    """Return the spec of a case's model."""
    return with_rows(spec_of_model(case["model"], case.get("layers")), case.get("added_tokens", 0))


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
        method=create(
            case["method"],
            r=case["r"],
            dropout=case["dropout"],
            prepared_by=case.get("prepared_by", "zerolora"),
            added_tokens=case.get("added_tokens", 0),
            quantization=case.get("quantization", "nf4"),
            targets=(case["targets"],) if "targets" in case else "all-linear",
        ),
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
        sequence_parallel=case.get("sequence_parallel", 1),
        activation_offload=case.get("offload", False),
        optimizer=OPTIMIZERS[case.get("optimizer", "adamw")],
        reserve=0,
    )


NOT_TRACED = ("loading", "evaluation", "saving")  # a trace is of a step


def compared(case: dict[str, Any], traced: dict[str, int]) -> dict[str, Any]:
    """Return predicted and traced bytes of a case. A trace has one device, so what is offloaded counts in both."""
    prediction = predict(model_of(case), spec_of(case))
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
    """Return what DeepSpeed's and accelerate's own estimators answer for a case, in bytes of a GPU.

    They are asked of whole models only, not of a few layers.
    """
    if "layers" in row:
        return {"deepspeed": None, "accelerate": None}
    from baselines import baselines

    config = config_of(row["model"])
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
        "--model": config_of(case["model"]),
        "--method": case["method"],
        "--prepared-by": case.get("prepared_by", "zerolora"),
        "--quantization": case.get("quantization", "nf4"),
        "--lora-targets": case.get("targets", "all-linear"),
        "--lora-r": case["r"],
        "--lora-dropout": case["dropout"],
        "--added-tokens": case.get("added_tokens", 0),
        "--optimizer": case.get("optimizer", "adamw"),
        "--strategy": case["strategy"],
        "--ranks": case["ranks"],
        "--micro-batch": case["micro_batch"],
        "--sequence-parallel": case.get("sequence_parallel", 1),
        "--sequence-length": case["length"],
        "--logits": case["logits"],
        "--loss": case.get("loss", "plain"),
        "--attention": case["attention"],
        "--precision": case["precision"],
        "--zero": json.dumps(zero_json(case)),
    }
    texts = [str(text) for pair in options.items() for text in pair]
    if "layers" in case:
        texts += ["--layers", str(case["layers"])]
    saving = ["--activation-checkpointing"] if case["checkpointing"] else []
    saving += ["--activation-offload"] if case.get("offload") else []
    return [sys.executable, str(Path(__file__).with_name("trace.py")), *texts, *saving]


def zero_json(case: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed JSON that render writes for a case; pinned memory and overlap are CUDA's alone."""
    spec = spec_of(case)
    sizes = sized(model_of(case), spec)
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
