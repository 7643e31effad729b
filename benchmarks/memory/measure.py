"""Compare the prediction with the memory of real runs: on GPUs the bytes of CUDA's allocator, else resident bytes.

    .venv/bin/python benchmarks/memory/measure.py           # GPUs if there are any, else this machine's CPU
    .venv/bin/python benchmarks/memory/measure.py --cpu     # the CPU although there are GPUs
    .venv/bin/python benchmarks/memory/measure.py --only 7b # groups whose name contains this text
    .venv/bin/python benchmarks/memory/measure.py --no-measure  # only predict again

Nothing is downloaded: models have the shapes of config/recipes/models and random weights, rows on a CPU have random
lengths, the longest first. All else is training's own code, in its order: kernels, adapter, DeepSpeed's engine, check
of the loss, data, a validation, steps with a checkpoint written beside them, the adapter. The batches of a group share
one model and one start of as many ranks as there are GPUs (two, or one, on a CPU). A group that fails, runs out of
memory or out of time is a row too. GPUs must be otherwise idle. Several groups --at-once share a GPU, and are measured
by their allocators alone. Writes benchmarks/results/memory_gpu.json or memory_cpu.json, in bytes.
"""

import argparse
import functools
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import psutil
import pyarrow
import torch
from measuring import RESULTS, ROOT, last_lines, machine, parser_of, random_model, wait
from memory import compare

from zerolora.data.packing_plan import write_plan
from zerolora.data.prepared_rows import IGNORED, schema
from zerolora.files import read_json, write_json
from zerolora.machine.peak_memory import PeakMemory
from zerolora.memory.predict import Prediction, predict
from zerolora.memory.reserve import HOPPER, shares
from zerolora.memory.training_spec import TrainingSpec
from zerolora.model.read_spec import read_model_spec
from zerolora.planner.zero_json import ZeroJson
from zerolora.strategies import STRATEGIES
from zerolora.train.launch.launcher import CPU_MALLOC
from zerolora.train.launch.topology import topology

MODELS = ROOT / "config/recipes/models"
STEPS = 3  # the first creates the optimizer's states, the second has them from its start, the third repeats it
CPU_STEPS, CPU_TOKENS = 40, 8000  # of a rank: changing lengths fragment its heap for so long
SHORTEST = 0.85  # share of a row's length; rows of one global batch are similar in training too (train/order.py)
GROUP_SECONDS = 600  # only a hang takes this long, even on a busy machine
RESERVE = 3 * 2**30  # bytes of a GPU assumed for context, NCCL and fragments when batches are selected
LORA: dict[str, Any] = {
    "r": 8, "alpha": 16.0, "rank_stabilized": False, "plus_ratio": 1.0, "dropout": 0.0, "targets": "all-linear"
}  # fmt: skip
OF_THE_DEVICE = ("gpu_in_use", "gpu_context", "gpu_connected", "implied_reserve")
"""Figures of all processes on a GPU together."""
PREDICTED = ("predicted_gpu", "predicted_host", "error", "implied_reserve")
Group = dict[str, Any]
Batch = dict[str, Any]


def main() -> None:
    """Measure every group, compare, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", default="", help="groups whose name contains this text")
    parser.add_argument("--seconds", type=float, help="no group starts later; default: 480 on GPUs, an hour on a CPU")
    parser.add_argument("--at-once", type=int, default=1, help="groups at a time")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--no-measure", action="store_true", help="predict again for the rows of the output")
    parser.add_argument("--rank-of", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of)
        return
    on_cpu = options.cpu or not torch.cuda.is_available()
    output = options.output or RESULTS / f"memory_{'cpu' if on_cpu else 'gpu'}.json"
    rows: list[dict[str, Any]] = []
    if options.no_measure:
        earlier = read_json(output, "measure.py")
        rows = [predicted_again(each) for each in earlier["rows"]]
        write_json(output, {**earlier, **summary(rows), "rows": rows})
    else:
        groups = [group for group in (cpu_groups() if on_cpu else gpu_groups()) if options.only in name_of(group)]
        deadline = time.monotonic() + (options.seconds or (3600 if on_cpu else 480))
        for result in measured(groups, deadline, options.at_once):
            rows += result
            write_json(output, {**summary(rows), "rows": rows})  # should this process be killed
        # Last: the GPU's name needs a context on it, which would count as use.
        write_json(output, {"machine": machine(), **summary(rows), "rows": rows})
    print(json.dumps(summary(rows)))


def gpu_groups() -> list[Group]:
    """Return the groups for GPUs, the most important first."""
    ranks = torch.cuda.device_count()
    lengths = (512, 2048, 4096)
    batches = [
        {"micro_batch": 1, "length": length, "loss": loss, "logits": length // 2 if loss == "fused" else 0,
         "masked": loss == "fused"}
        for length in lengths
        for loss in ("fused", "full")
    ]  # fmt: skip
    chosen = (
        ("qwen2.5-7b", "zero2", True), ("qwen2.5-7b", "zero3", True), ("qwen2.5-0.5b", "zero0", False),
        ("qwen2.5-14b", "zero2", True), ("qwen2.5-7b", "zero2_offload", False), ("qwen2.5-7b", "zero3_offload", True),
        ("qwen2.5-0.5b", "zero1", True), ("qwen2.5-0.5b", "zero3", False), ("qwen2.5-14b", "zero3", False),
        ("qwen2.5-0.5b", "zero2_offload", True), ("qwen2.5-0.5b", "zero3_offload", False),
        ("qwen2.5-7b", "zero0", True), ("qwen2.5-14b", "zero3_offload", True), ("qwen2.5-7b", "zero1", False),
        ("qwen2.5-0.5b", "zero2", False), ("qwen2.5-0.5b", "zero0", True),
    )  # fmt: skip
    others: tuple[dict[str, Any], ...] = (
        *({"method": "full", "optimizer": name} for name in ("adamw", "adamw_8bit", "lion", "paged_adamw_8bit")),
        {"attention": "sdpa"}, {"attention": "eager"}, {"precision": "fp16"}, {"offload": True},
    )  # fmt: skip
    whole = [batch for batch in batches if batch["loss"] == "full"]  # with all weights the head has a gradient
    return [
        {"model": model, "strategy": strategy, "checkpointing": checkpointing, "precision": "bf16",
         "attention": "flash", "ranks": ranks, "device": "cuda", "batches": batches}
        for model, strategy, checkpointing in chosen
    ] + [
        {"model": "qwen2.5-0.5b", "strategy": "zero2", "checkpointing": True, "precision": "bf16",
         "attention": "flash", "ranks": ranks, "device": "cuda",
         "batches": whole if other.get("method") == "full" else batches} | other
        for other in others
    ]  # fmt: skip


def cpu_groups() -> list[Group]:
    """Return the groups for a CPU, of one batch each: memory freed by an earlier batch would stay resident."""
    chosen = (
        # strategy, ranks, precision, rows, tokens, checkpointing, logits (0: transformers' own loss), masked, attention
        ("zero0", 1, "fp32", 1, 128, False, 0, False, "sdpa"),
        ("zero0", 2, "fp32", 4, 64, False, 24, True, "flash"),
        ("zero0", 2, "bf16", 1, 1024, True, 0, False, "sdpa"),
        ("zero1", 2, "fp32", 4, 256, False, 64, True, "flash"),
        ("zero1", 2, "bf16", 8, 64, True, 24, True, "flash"),
        ("zero2", 1, "fp32", 1, 64, True, 0, False, "sdpa"),
        ("zero2", 2, "fp32", 4, 57, False, 24, True, "flash"),
        ("zero2", 2, "fp32", 1, 512, False, 256, False, "flash"),
        ("zero2", 2, "fp32", 1, 1024, True, 0, False, "sdpa"),
        ("zero2", 2, "fp32", 1, 512, False, 0, False, "eager"),
        ("zero2", 2, "bf16", 4, 128, False, 0, True, "eager"),
        ("zero2", 2, "bf16", 1, 512, True, 256, True, "flash"),
        ("zero2_offload", 2, "fp32", 1, 256, False, 64, False, "flash"),
        ("zero2_offload", 2, "bf16", 8, 128, True, 0, True, "sdpa"),
        ("zero3", 1, "fp32", 4, 128, True, 64, True, "flash"),
        ("zero3", 2, "fp32", 1, 64, False, 24, True, "flash"),
        ("zero3", 2, "fp32", 4, 128, False, 0, True, "sdpa"),
        ("zero3", 2, "bf16", 1, 512, True, 0, False, "sdpa"),
        ("zero3", 2, "bf16", 4, 64, False, 24, True, "eager"),
        ("zero3_offload", 2, "fp32", 1, 256, True, 64, True, "flash"),
        ("zero3_offload", 2, "bf16", 1, 128, False, 0, False, "sdpa"),
        ("ddp", 2, "fp32", 4, 64, False, 24, True, "flash"),
    )  # fmt: skip
    return [
        {"model": "smollm2-135m", "strategy": strategy, "checkpointing": checkpointing, "precision": precision,
         "attention": attention, "ranks": ranks, "device": "cpu",
         "batches": [{"micro_batch": rows, "length": tokens, "loss": "fused" if logits else "full",
                      "logits": logits, "masked": masked}]}
        for strategy, ranks, precision, rows, tokens, checkpointing, logits, masked, attention in chosen
    ]  # fmt: skip


def name_of(group: Group) -> str:
    """Return a group as words."""
    saving = "checkpointing" if group["checkpointing"] else "all"
    parts = [group["model"], group["strategy"], f"{group['ranks']}x{group['device']}", group["precision"]]
    return " ".join([*parts, saving, group["attention"]])


def spec_of(group: Group, batch: Batch) -> TrainingSpec:
    """Return the training spec of a batch of a group, without a reserve."""
    return compare.spec_of({"method": "lora", "r": LORA["r"], "dropout": 0.0} | group | batch)


def zero_json(group: Group) -> dict[str, Any]:
    """Return the DeepSpeed JSON, or another engine's options, that render writes for a group."""
    return compare.zero_json({"method": "lora", "r": LORA["r"], "dropout": 0.0} | group | group["batches"][0])


def steps_of(group: Group, batch: Batch) -> int:
    """Return the number of steps for a batch; a GPU allocator's peak needs few."""
    if group["device"] == "cuda":
        return STEPS
    tokens: int = batch["micro_batch"] * batch["length"]
    return min(CPU_STEPS, max(STEPS, CPU_TOKENS // tokens))


# --- parent process: one group at a time ---


def measured(groups: list[Group], deadline: float, at_once: int = 1) -> Iterator[list[dict[str, Any]]]:
    """Yield for each group a row for each of its batches: its figures, or the reason without them."""
    with tempfile.TemporaryDirectory(prefix="zerolora-memory-") as folder, ThreadPoolExecutor(at_once) as pool:

        def rows(number: int, group: Group) -> list[dict[str, Any]]:
            own = Path(folder) / str(number)
            own.mkdir()
            result = rows_of(group, own, deadline)
            for each in result if at_once > 1 else ():
                for name in OF_THE_DEVICE:
                    each.pop(name, None)
            return result

        yield from pool.map(rows, range(len(groups)), groups)


def rows_of(group: Group, folder: Path, deadline: float) -> list[dict[str, Any]]:
    """Return a row for each batch of a group."""
    shape = read_model_spec(MODELS / f"{group['model']}.json")
    predictions = [predict(shape, spec_of(group, batch)) for batch in group["batches"]]
    fault = "no time left" if time.monotonic() > deadline else None
    tried = [
        (batch, prediction, fault or too_large(group, prediction))
        for batch, prediction in zip(group["batches"], predictions, strict=True)
    ]
    fits = [(batch, prediction) for batch, prediction, why in tried if why is None]
    answers = start({**group, "batches": [batch for batch, _ in fits]}, folder) if fits else []
    result = [row(group, *pair, answer) for pair, answer in zip(fits, answers, strict=True)]
    result += [row(group, batch, prediction, {"skipped": why}) for batch, prediction, why in tried if why]
    print(name_of(group), *(each.get("error", "no figures") for each in result), file=sys.stderr)
    return result


def too_large(group: Group, prediction: Prediction) -> str | None:
    """Return the reason to skip a batch, None if it is tried."""
    if group["device"] == "cuda":
        total = gpu_memory()
        need = prediction.gpu["total"] + RESERVE
        if need > total:
            return f"predicted {need / 2**30:.1f} GiB with context, the GPU has {total / 2**30:.1f}"
    free, need = psutil.virtual_memory().available, prediction.host["total"]
    return f"predicted {need / 2**30:.1f} GiB of host memory, {free / 2**30:.1f} are free" if need > free else None


@functools.cache
def gpu_memory() -> int:
    """Return the bytes of one GPU, from another process: a context of this one would count as use."""
    code = "import torch; print(torch.cuda.mem_get_info()[1])"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def start(group: Group, folder: Path) -> list[dict[str, Any]]:
    """Start a group's ranks, wait, and return the figures of all ranks together for each of its batches."""
    weights = written_model(group, folder)
    data = [str(written_rows(group, batch, folder / f"rows{number}")) for number, batch in enumerate(group["batches"])]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}  # as the launcher sets it
    if group["device"] == "cpu":
        environment = CPU_MALLOC | environment | {"DS_ACCELERATOR": "cpu"}
    where = topology({}, 1, group["ranks"])
    outputs = [folder / f"rank{rank}.json" for rank in where.ranks]
    processes = []
    for rank, output in enumerate(outputs):
        output.write_text("")
        request = json.dumps({"group": group, "weights": str(weights), "output": str(output), "data": data})
        with (folder / f"rank{rank}.log").open("wb") as log:
            command = [sys.executable, __file__, "--rank-of", request]
            processes.append(where.start(rank, command, environment, log))
    codes = wait(processes, GROUP_SECONDS)
    lines = [line for rank in where.ranks if (line := reason_of(folder / f"rank{rank}.log"))]
    early = f"a rank ended early; {lines[0] if lines else 'no output'}"
    missing = {"failed": early if any(codes) or None not in codes else f"not done after {GROUP_SECONDS} s"}
    answers = [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]
    return [
        joined([answer[number] for answer in answers if number < len(answer)], group["ranks"]) or missing
        for number in range(len(group["batches"]))
    ]


def reason_of(log: Path) -> str:
    """Return the last line of a rank's log, without NCCL's about its process group, which ends every failed rank's."""
    lines = [line for line in last_lines(log, 20) if "destroy_process_group" not in line]
    return lines[-1][:300] if lines else ""


def joined(answers: list[dict[str, Any]], ranks: int) -> dict[str, Any] | None:
    """Return the figures of all ranks together: the worst GPU, the sum of the host's bytes; None if a rank is missing.

    If a rank fails, the others wait for it until they are killed: its reason counts.
    """
    failed = [answer for answer in answers if "failed" in answer]
    if failed or len(answers) < ranks:
        return failed[0] if failed else None
    result = {name: max(answer[name] for answer in answers) for name in answers[0] if name.startswith("gpu")}
    if "step_seconds" in answers[0]:
        steps = zip(*(each["step_seconds"] for each in answers), strict=True)
        result["step_seconds"] = [max(seconds) for seconds in steps]
    for name in answers[0]:
        if name.startswith("host"):
            result[name] = sum(answer[name] for answer in answers)
    return result


def row(group: Group, batch: Batch, prediction: Prediction, measured_figures: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the result."""
    case = {name: value for name, value in group.items() if name != "batches"} | batch
    result = {**case, "predicted_gpu": prediction.gpu, "predicted_host": prediction.host, **measured_figures}
    if "gpu_allocated" in measured_figures:
        result["error"] = allocated_of(group, batch, prediction) / measured_figures["gpu_allocated"] - 1
        if "gpu_in_use" in measured_figures:
            # Context, NCCL, and the allocator's unused blocks.
            result["implied_reserve"] = measured_figures["gpu_in_use"] - measured_figures["gpu_allocated"]
    elif "host_peak" in measured_figures:
        result["error"] = prediction.host["total"] / measured_figures["host_peak"] - 1
    return result


def allocated_of(group: Group, batch: Batch, prediction: Prediction) -> int:
    """Return the predicted bytes of torch's allocator: with cuBLAS's workspaces, without a paged optimizer's states."""
    spec = spec_of(group, batch)
    paged = prediction.gpu["moments"] if str(group.get("optimizer", "")).startswith("paged") else 0
    return (
        int(prediction.gpu["total"]) - paged + shares(replace(spec, reserve=None, capability=HOPPER), 0)["workspaces"]
    )


def predicted_again(each: dict[str, Any]) -> dict[str, Any]:
    """Return a row with today's prediction beside its measured figures."""
    prediction = predict(read_model_spec(MODELS / f"{each['model']}.json"), spec_of(each, each))
    measured = ("host_", "gpu_", "step_seconds", "failed", "skipped")
    result = {name: value for name, value in each.items() if name.startswith(measured)}
    case = {name: value for name, value in each.items() if name not in (*result, *PREDICTED)}
    return row({**case, "batches": None}, {}, prediction, result)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the relative errors of the measured rows: mean, worst, lowest; and the reserves that GPUs needed."""
    values = [each["error"] for each in rows if "error" in each]
    result: dict[str, Any] = {"measured": len(values), "not_measured": len(rows) - len(values)}
    if values:
        result |= {
            "mean_absolute_error": sum(map(abs, values)) / len(values),
            "worst_error": max(values, key=abs),
            "lowest_error": min(values),
        }
    reserves = [each["implied_reserve"] for each in rows if "implied_reserve" in each]
    if reserves:
        result |= {"implied_reserve_least": min(reserves), "implied_reserve_most": max(reserves)}
    return result


def written_model(group: Group, folder: Path) -> Path:
    """Return a directory with the model's config.json; on a CPU also with random weights, which training reads."""
    directory = folder / f"{group['model']}-{group['precision']}"
    config = MODELS / f"{group['model']}.json"
    if not directory.exists():
        directory.mkdir()
        (directory / "config.json").write_text(config.read_text())
        if group["device"] == "cpu":
            random_model(config, torch.bfloat16 if group["precision"] == "bf16" else torch.float32, directory)
    return directory


def written_rows(group: Group, batch: Batch, directory: Path) -> Path:
    """Write prepared rows for all steps and their plan, one row in each packed row, as prepare and pack do.

    The first row has the length of the batch, and on a CPU the others are somewhat shorter. On a GPU all have it: there
    the first step, which has no moments yet, does not have the peak.
    """
    draw = random.Random(1)  # noqa: S311 (lengths, no secret)
    count = steps_of(group, batch) * batch["micro_batch"] * group["ranks"]
    may_differ = batch["masked"] or batch["micro_batch"] == 1
    least = int(SHORTEST * batch["length"]) if group["device"] == "cpu" and may_differ else batch["length"]
    lengths = [batch["length"], *(draw.randint(least, batch["length"]) for _ in range(count - 1))]
    supervised = [min(batch["logits"] or length, length) for length in lengths]
    columns = {
        "input_ids": [[1] * length for length in lengths],
        "labels": [[IGNORED] * (all_ - some) + [1] * some for all_, some in zip(lengths, supervised, strict=True)],
        "length": lengths,
        "supervised": [min(some, length - 1) for length, some in zip(lengths, supervised, strict=True)],
        "source": [0] * count,
    }
    table = pyarrow.table(columns, schema=schema(held_out=False))
    directory.mkdir(exist_ok=True)
    with (
        pyarrow.OSFile(str(directory / "train.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    write_plan(directory / "plan.arrow", [[number] for number in range(count)])
    return directory


# --- one rank ---


def run_rank(request: dict[str, Any]) -> None:
    """Run one rank of a group; append one line for each batch to the output."""
    import torch.distributed

    from zerolora.train import adapter, base_model, isolation, rank
    from zerolora.train.engines import engine_class

    group, weights = request["group"], Path(request["weights"])
    plan = training_plan(group, group["batches"][0])
    config = ZeroJson(options=zero_json(group), choice=plan)
    engine_kind = engine_class(plan.engine)
    device = rank.claim_device(plan)
    if group["device"] == "cuda":
        base_model.read = random_on_device
    context = context_bytes(device)
    engine_kind.connect(config, device)
    torch.distributed.all_reduce(torch.zeros(1, device=device))  # NCCL allocates with its first collective
    memory = PeakMemory(device)
    marks = {"host_before": resident(), "gpu_connected": in_use(device)}
    full = group.get("method") == "full"
    model = adapter.adapt(weights, plan, config, device)
    marks |= {"host_model": resident(), "host_peak_model": memory.host()}
    engine = engine_kind(model, config, plan, device)
    marks |= {"host_engine": resident(), "host_peak_engine": memory.host()}
    isolation.check_loss(engine, adapter.base_of(engine.module), device, plan.precision)
    with Path(request["output"]).open("a") as output:
        for batch, data in zip(group["batches"], request["data"], strict=True):
            result = one_batch(engine, group, batch, Path(data), memory, device)
            if device.type == "cuda" and "failed" not in result:
                result |= {"gpu_context": context, "gpu_connected": marks["gpu_connected"]}
            if device.type == "cpu" and not full and "failed" not in result:
                result |= {"host_steps": resident()}
                expected = adapter.expected_tensors(weights, plan)
                base = {"name": str(weights), "revision": None}
                output_path, number = weights.parent / "adapter", torch.distributed.get_rank()
                adapter.save(engine, plan, output_path, number, expected, {}, {}, base)
                result |= {name: value for name, value in marks.items() if name.startswith("host")}
                result |= {"host_peak_steps": result["host_peak"], "host_peak": memory.host()}
            output.write(json.dumps(result) + "\n")
            output.flush()
            if "failed" in result:
                # The engine was left in the middle of a step.
                os._exit(1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def training_plan(group: Group, batch: Batch) -> Any:
    """Return training's plan for a batch of a group."""
    from zerolora.config.method_sections import Lora
    from zerolora.config.settings import TrainingPlan, UsefulFlops

    return TrainingPlan(
        method=group.get("method", "lora"), device=group["device"], engine=STRATEGIES[group["strategy"]].engine,
        strategy=group["strategy"],
        attention=group["attention"], activation_checkpointing=group["checkpointing"], precision=group["precision"],
        micro_batch=batch["micro_batch"], global_batch=batch["micro_batch"] * group["ranks"], accumulation=1, seed=1,
        activation_offload=group.get("offload", False), lora=Lora(**LORA), optimizer=group.get("optimizer", "adamw"),
        flops=UsefulFlops(token=0.0, squared_token=0.0, supervised_token=0.0, peak=None),
    )  # fmt: skip


def random_on_device(
    weights: Path,
    dtype: torch.dtype,
    attention: str,
    device: torch.device | None = None,
    quantization: Any = None,
    placed: Mapping[str, Any] | None = None,
) -> Any:
    """Return the model with random weights, created on the GPU: never whole on the host, at stage 3 nowhere whole."""
    assert quantization is None, "bitsandbytes quantizes what it reads from a file"
    assert not placed, "a rank has one GPU"
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(weights)
    with torch.device("cuda", torch.cuda.current_device()):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def in_use(device: torch.device) -> int:
    """Return the bytes of a GPU in use by all processes; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def context_bytes(device: torch.device) -> int:
    """Create CUDA's context and return its bytes; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.init()
    return in_use(device)


def one_batch(
    engine: Any, group: Group, batch: Batch, data: Path, memory: PeakMemory, device: torch.device
) -> dict[str, Any]:
    """Return this rank's peaks while it validates, makes steps on similar batches, and writes a checkpoint."""
    import torch.distributed

    from zerolora.data.packing_plan import open_plan
    from zerolora.data.prepared_rows import open_split
    from zerolora.train.checkpoint.store import Checkpoints
    from zerolora.train.feed import Batches
    from zerolora.train.loss import token_losses

    saver = Checkpoints(data.parent / "checkpoints", {}, {"steps": STEPS}, every_minutes=1e9)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # an earlier batch must not count
        torch.cuda.reset_peak_memory_stats(device)
    packing, plan = open_plan(data / "plan.arrow"), training_plan(group, batch)
    batches = Batches(open_split(data, "train"), packing, plan, torch.distributed.get_rank(), group["ranks"])
    seconds = []
    try:
        for number in range(batches.steps):
            started = time.perf_counter()
            inputs = micro_batch(batches, number, batch, device)
            if number == 0:
                engine.eval()
                with torch.no_grad():
                    token_losses(engine, inputs).sum()
                engine.train()
                settle(device)
                started = time.perf_counter()
            step(engine, inputs, batch["loss"])
            settle(device)
            seconds.append(time.perf_counter() - started)
            if number == batches.steps - 2 and group.get("method") != "full":
                save_beside(engine, saver, number)
        saver.wait()
    except torch.OutOfMemoryError as error:
        return {"failed": f"out of memory: {str(error).splitlines()[0][:200]}"}
    result: dict[str, Any] = {"host_peak": memory.host(), "step_seconds": seconds}
    if device.type == "cuda":
        result |= {
            "gpu_allocated": torch.cuda.max_memory_allocated(device),
            "gpu_reserved": torch.cuda.max_memory_reserved(device),
            "gpu_in_use": in_use(device),
        }
    return result


def micro_batch(batches: Any, number: int, batch: Batch, device: torch.device) -> dict[str, Any]:
    """Return this rank's micro-batch of a step, without a mask if the batch has none."""
    from zerolora.train.feed import collate

    inputs = collate(batches.at(number)[0][0], False, device)
    if not batch["masked"]:
        del inputs["attention_mask"]
    return inputs


def settle(device: torch.device) -> None:
    """Wait for a GPU's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def save_beside(engine: Any, saver: Any, number: int) -> None:
    """Start writing a checkpoint in the background, as training does."""
    import torch.distributed

    from zerolora.train.checkpoint.format import State
    from zerolora.train.engines.engine import WEIGHT

    parts = {part: engine.part(part) for part in (WEIGHT, *engine.recipe.states)}
    if torch.distributed.get_rank() == 0:
        saver.write(State(number, parts, number, {}, 0.0))


def step(engine: Any, inputs: dict[str, Any], loss: str) -> None:
    """Make one optimizer step on one micro-batch."""
    from zerolora.train.loss import token_losses

    if loss == "fused":
        total = token_losses(engine, inputs).sum()
    else:
        names = ("input_ids", "attention_mask")
        model_inputs = {name: inputs[name] for name in names if name in inputs}
        # `outputs` outlives the step, as in most loops.
        outputs = engine(**model_inputs, labels=inputs["input_ids"], use_cache=False)
        total = outputs.loss
    engine.backward(total)
    engine.step()


def resident() -> int:
    """Return this process's resident bytes now."""
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
