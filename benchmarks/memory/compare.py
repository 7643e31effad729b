"""Compare the prediction with traces of the real step, over models x methods x strategies x batches.

    .venv/bin/python benchmarks/memory/compare.py          # compare and draw
    .venv/bin/python benchmarks/memory/compare.py --trace  # first trace the missing cases; --again: all, in hours

benchmarks/results/memory_traces.jsonl has one trace a line, with its case; a trace takes seconds to minutes. Its cases
are combinations that were drawn at random for each model, and those listed here. Writes benchmarks/results/memory.json
(table and errors) and memory.svg (scatter plot), and puts the table into docs/memory.md.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import RESULTS, ROOT, machine, parser_of, put, table

from zerolora.errors import UserError
from zerolora.files import write_json
from zerolora.memory.predict import predict, sized
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.registry import create
from zerolora.model.read_spec import from_config
from zerolora.model.spec import ModelSpec, with_rows
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.candidates import Choice
from zerolora.planner.render import rendered
from zerolora.strategies.strategy import Target
from zerolora.train.objectives import OBJECTIVES

TRACES = RESULTS / "memory_traces.jsonl"
MODELS = ROOT / "config/recipes/models"
OWN_MODELS = Path(__file__).with_name("models")  # mixtures of experts, with published sizes
# Every method on every family, with few layers of published sizes; the drawn cases show how layers are extrapolated.
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
IN_8_BITS = ("llama-3.2-1b", "qwen2.5-0.5b", "gpt2")  # also traced with a base in int8
QUERIES = {"llama-3.2-1b": "q_proj", "qwen2.5-0.5b": "q_proj", "gpt2": "c_attn"}
# peft does not know the modules that (IA)³ scales in these.
WITHOUT_IA3 = ("qwen3-8b", "phi-3-mini-4k", "olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite",
               "deepseek-v3", "qwen1.5-moe-a2.7b")  # fmt: skip
OTHER_OBJECTIVES = tuple(name for name in OBJECTIVES if name != "sft")
WITH_OBJECTIVES = ("smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b")
NOT_TRACED = ("loading", "evaluation", "saving")  # a trace covers a step
GIB = 2**30
OTHERS = {"deepspeed": "DeepSpeed's estimator", "accelerate": "accelerate estimate-memory"}


def main() -> None:
    """Trace, compare, write and draw."""
    parser = parser_of(__doc__)
    parser.add_argument("--trace", action="store_true", help="trace the missing cases")
    parser.add_argument("--again", action="store_true", help="trace all cases")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.trace or options.again:
        traced = {key(trace["case"]) for trace in read_traces()}
        wanted = [case for case in cases() if options.again or key(case) not in traced]
        if options.again:
            TRACES.unlink()
        trace_all(wanted, options.workers)
    rows = [row | others(row) for row in all_compared()]
    for row in sorted(rows, key=lambda row: row["error"]):
        print(f"{row['error']:+7.2%} {row['predicted'] / GIB:9.2f} {row['traced'] / GIB:9.2f} GiB  {label(row)}")
    summary = {"all": errors(rows), **grouped(rows)}
    write_json(RESULTS / "memory.json", {"machine": machine(), **summary, "rows": rows})
    draw(rows, RESULTS / "memory.svg")
    put("memory.md", "errors of the estimate", markdown(summary))


def all_compared() -> list[dict[str, Any]]:
    """Return predicted and traced bytes of every traced case."""
    return [compared(trace["case"], trace["bytes"]) for trace in read_traces()]


def cases() -> list[dict[str, Any]]:
    """Return all cases: those of the traces, and the listed ones."""
    listed = (
        [trace["case"] for trace in read_traces()] + of_optimizers() + offloaded() + every_method() + of_objectives()
    )
    return list({key(case): case for case in listed}.values())


def offloaded() -> list[dict[str, Any]]:
    """Return a few cases of activation offload with long rows: the first layer's input is a leaf of the graph or not,
    weights are gathered, a layer's inputs include masks."""
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


def of_objectives() -> list[dict[str, Any]]:
    """Return cases of each objective on a few models, with pairs of 2 x 1,024 tokens in packed rows. Over its models,
    each objective has every strategy, both kinds of checkpointing, few and many supervised tokens."""
    few, many = 256, 0
    batch: dict[str, Any] = {"method": "lora", "layers": FEW_LAYERS, "micro_batch": 1, "length": 2048, "r": 8}
    batch |= {"precision": "bf16", "dropout": 0.0, "attention": "flash", "loss": "fused"}
    result = []
    for (place, objective), (number, model) in itertools.product(
        enumerate(OTHER_OBJECTIVES), enumerate(WITH_OBJECTIVES)
    ):
        for supervised in (few, many):
            strategy = ("ddp", "zero2", "zero3")[(place + number + (supervised == many)) % 3]
            case = {"model": model, "objective": objective, "strategy": strategy, "logits": supervised}
            case |= {
                "ranks": 1 if strategy == "ddp" else 2,
                "checkpointing": (place + number) % 2 == (supervised == few),
            }
            result.append(case | batch)
    return result


def of_optimizers() -> list[dict[str, Any]]:
    """Return a few cases of the other optimizers, whose states are a large part of full fine-tuning."""
    runs = itertools.product(("lion", "adamw_8bit", "adafactor"), ("lora", "full"), ("ddp", "zero0", "zero2", "zero3"))
    batch = {"micro_batch": 1, "length": 256, "checkpointing": False, "attention": "sdpa", "logits": 0, "r": 64}
    result = [
        {"model": "smollm2-135m", "method": method, "strategy": strategy, "ranks": 1 if strategy == "ddp" else 8}
        | {**batch, "precision": "bf16", "dropout": 0.0, "optimizer": optimizer}
        for optimizer, method, strategy in runs
        if (method, strategy) != ("full", "ddp")
    ]
    target = Target(device="cuda", precision="bf16", nodes=1, ranks_per_node=8, nvme=None)
    specs = [spec_of(case) for case in result]
    return [case for case, spec in zip(result, specs, strict=True) if not spec.optimizer.conflict(spec.layout, target)]


def every_method() -> list[dict[str, Any]]:
    """Return a case of each method on each family that both can run."""
    result = []
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
            model_spec = model_of(case)
            # Flash of what no table lists was not known to be possible when these were traced.
            masked = model_spec.counted != "config.json"
            case["attention"] = next(each for each in model_spec.attentions if not (masked and each == "flash"))
            if method == "ia3" and model in WITHOUT_IA3:
                continue
            if strategy == "zero3" and not model_of(case).experts:
                continue  # the drawn cases have stage 3
            if method == "qlora-peft" and model_of(case).experts:
                continue  # torch's fake kernel multiplies no experts in fp32
            with contextlib.suppress(UserError):  # peft has no DoRA of experts
                spec_of(case).parameters(model_of(case))
                result.append(case)
                if (method, strategy) == ("qlora", "zero2") and model in IN_8_BITS:
                    result += [{**case, "quantization": "int8", "checkpointing": each} for each in (False, True)]
                    # Modules without an adapter keep their input in int8 only.
                    result.append({**case, "quantization": "int8", "checkpointing": False, "targets": QUERIES[model]})
    return result


def config_of(name: str) -> Path:
    """Return the path of a model's config.json."""
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
    """Return a case as words."""
    parts = [row[name] for name in ("model", "method", "strategy", "ranks", "attention", "precision")]
    parts += [row.get("objective", "sft"), f"{row['micro_batch']}x{row['length']}", row["logits"]]
    return " ".join(map(str, (*parts, "checkpointing" if row["checkpointing"] else "", row["phase"])))


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
        masked=case.get("masked", True),
        loss=case.get("loss", "supervised" if case["logits"] else "full"),
        logits=case["logits"],
        sequence_parallel=case.get("sequence_parallel", 1),
        activation_offload=case.get("offload", False),
        on_cpu=case.get("device") == "cpu",
        objective=OBJECTIVES[case.get("objective", "sft")],
        optimizer=OPTIMIZERS[case.get("optimizer", "adamw")],
        reserve=0,
    )


def compared(case: dict[str, Any], traced: dict[str, int]) -> dict[str, Any]:
    """Return predicted and traced bytes of a case. A trace has one device, so offloaded bytes count on both sides."""
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
    """Return the estimates of DeepSpeed and accelerate for a case of a whole model, in bytes of a GPU."""
    if "layers" in row:
        return {"deepspeed": None, "accelerate": None}
    from memory.baselines import baselines

    local = min(8, row["ranks"])
    return baselines(config_of(row["model"]), row["strategy"], row["precision"], local, row["ranks"] // local)


def grouped(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors by method, strategy, model and objective, and those of the other estimators."""
    result: dict[str, Any] = {
        f"by_{name}": {
            value: errors([row for row in rows if row[name] == value]) for value in sorted({row[name] for row in rows})
        }
        for name in ("method", "strategy", "model")
    }
    result["by_objective"] = {
        name: errors([row for row in rows if row.get("objective") == name]) for name in sorted(OTHER_OBJECTIVES)
    }
    result["others"] = {}
    for name in OTHERS:
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
    rows = [
        (
            name,
            each["combinations"],
            f"{each['mean_absolute_error']:.2%}",
            f"{each['worst_error']:+.1%}",
            f"{each['lowest_error']:+.1%}",
        )
        for name, each in (
            {"all": summary["all"]} | summary["by_method"] | summary["by_strategy"] | summary["by_objective"]
        ).items()
    ]
    for name, title in OTHERS.items():
        each = summary["others"][name]
        error, factor = f"{each['mean_absolute_error']:.0%}", f"{each['worst_factor']:.0f} times off"
        rows.append((title, each["combinations"], error, factor, ""))
    return table(["", "combinations", "mean error", "worst", "lowest"], rows)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw predicted against traced bytes, one point a case; on the line both are equal."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "zerolora"  # equal figures give an equal file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 6.4))
    titles = {**OTHERS, "predicted": "zerolora stage estimate"}
    for (name, title), color in zip(titles.items(), ("tab:orange", "tab:red", "tab:blue"), strict=True):
        points = [(row["traced"] / GIB, row[name] / GIB) for row in rows if row.get(name)]
        traced, predicted = zip(*points, strict=True)
        axes.scatter(traced, predicted, s=14, color=color, alpha=1 if name == "predicted" else 0.5, label=title)
    ends = [min(traced) / 1.5, max(traced) * 1.5]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="traced peak, GiB", ylabel="predicted, GiB")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def errors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean, worst and lowest relative error."""
    result = [row["error"] for row in rows]
    return {
        "combinations": len(result),
        "mean_absolute_error": sum(map(abs, result)) / len(result),
        "worst_error": max(result, key=abs),
        "lowest_error": min(result),
    }


def trace_all(wanted: list[dict[str, Any]], workers: int) -> None:
    """Trace cases in separate processes, and append each trace to the file when it is done."""
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
    more = {"config": str(config_of(case["model"])), "zero": zero_json(case)}
    return [sys.executable, str(Path(__file__).with_name("trace.py")), json.dumps(case | more)]


def zero_json(case: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed JSON, or another engine's options, that render writes for a case on its device, by default
    a CPU: pinned memory and overlap are CUDA's alone."""
    spec, device = spec_of(case), case.get("device", "cpu")
    sizes = sized(model_of(case), spec)
    buckets = sizes if device == "cuda" else replace(sizes, overlap=False)
    choice = Choice(case["strategy"], case["micro_batch"], 1, case["checkpointing"], case["attention"], buckets)
    target = Target(
        device=device, precision=case["precision"], nodes=spec.nodes, ranks_per_node=spec.ranks_per_node, nvme=None
    )
    return rendered(choice, target, 1.0)[0]


def read_traces() -> list[dict[str, Any]]:
    """Return the recorded traces."""
    if not TRACES.exists():
        return []
    return [json.loads(line) for line in TRACES.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
