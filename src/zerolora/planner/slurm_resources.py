"""What each job asks of a scheduler, whichever it is: minutes, memory of a node, GPUs. The rules pass it on.

A request is a prediction with room: `seconds` and `host_bytes` are what is predicted, `minutes` and `mem_mib` what is
asked for. Training's is made by render, with the choice; those of the stages around it from the files they read.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_json
from zerolora.logit_chunks import EVALUATION_TOKENS
from zerolora.memory.decoder import evaluation
from zerolora.memory.estimate import training_spec
from zerolora.memory.glibc_heap import PROCESS as PROCESS_BYTES
from zerolora.memory.gpu import largest_module
from zerolora.memory.headroom import asked
from zerolora.memory.model_spec import ModelSpec
from zerolora.memory.predict import predict
from zerolora.memory.projections import NOTHING, ForwardSpec
from zerolora.memory.read_spec import read_model_spec
from zerolora.memory.states import BYTES
from zerolora.planner.choice import Candidate, estimate_settings, steps_of, work_of
from zerolora.planner.cost import OPERATIONS, step_seconds
from zerolora.planner.machines import hardware_of, unmeasured_cpu
from zerolora.strategies import STRATEGIES
from zerolora.types import Precision

SLACK = 4
"""Seconds asked for over seconds predicted. Of the configurations that benchmarks/choice.py measured, the worst took
3.3 times as long as predicted; other machines are less well known."""
FLOOR = 15
"""Minutes that every job gets: Python and its libraries from a cold shared disk, and the warning before the limit."""
PACE = 2e8
"""Bytes/s of a file system that many nodes share: an assumption."""
# Measured by benchmarks/prepare_memory.py: bytes of a process, bytes a byte of input, bytes/s that one process reads.
PREPARE_PROCESS, PREPARE_GROWTH, PREPARE_PACE = 170_000_000, 0.4, 2.0e5
PREPARE_LIBRARIES = 780_000_000
"""Resident bytes of libraries, as Slurm counts them: also what others on the node have mapped too.
tests/unit/test_requests.py holds it against a real run."""
LIBRARIES = 375 * 1024**2
"""Resident bytes of a process that merges or writes a page: no rank, which reads data too (glibc_heap.PROCESS).
tests/unit/test_requests.py holds merging against a real run."""

Request = dict[str, Any]


def training(found: Candidate, shape: ModelSpec, settings: dict[str, Any], data: dict[str, Any]) -> Request:
    """Return the request of training: every step, every validation, weights read and checkpoints written.

    `settings` are those of render, `data` is memory/estimate.py's data_of.
    """
    steps = steps_of(settings, data)
    ranks = settings["nodes"] * settings["ranks_per_node"]
    # A row that is validated takes less than one that is learned.
    validations = 1 + (steps // settings["validation_steps"] if settings["validation_steps"] else 0)
    stepping = found.seconds * (steps + validations * data["validation_rows"] / settings["global_batch"])
    prediction = predict(shape, found.plan)
    moved = prediction.disk["model"] * settings["nodes"] + prediction.disk["adapter"] + prediction.disk["checkpoints"]
    on_gpu = settings["device"] == "cuda"
    gpus = settings["ranks_per_node"] if on_gpu else 0
    seconds = stepping + moved / PACE
    return _request(seconds, found.host, gpus) | {
        "nodes": settings["nodes"],
        "ranks": ranks,
        # What torch's allocator holds, to be set beside what it reports.
        "gpu_bytes": found.gpu - prediction.gpu["reserve"] if on_gpu else 0,
    }


def rendered(reasons: Path) -> Request:
    """Return the request of training that render wrote. Raises UserError if there is none."""
    found = read_json(reasons, "zerolora render")
    if "request" not in found:
        raise UserError(f"{reasons}: is of another version; run `zerolora render` again")
    return dict(found["request"])


def merging(model: Path, adapter: Path) -> Request:
    """Return the request of merging an adapter into the model in a directory: one weight file at a time.

    Raises UserError if a manifest or config.json is missing.
    """
    files = _weight_files(model)
    added = sum(file["bytes"] for file in read_json(adapter / MANIFEST, "zerolora train")["files"].values())
    # A file's tensors, and their bytes as they are written; a matrix in fp32, its update and their sum.
    held = 2 * max(files) + 3 * BYTES["fp32"] * largest_module(read_model_spec(model)) + added
    return _request(3 * sum(files) / PACE, LIBRARIES + held)


def evaluating(settings: dict[str, Any], model: Path, data: Path, run: dict[str, Any]) -> Request:
    """Return the request of asking a model: on one GPU if the run has some and the model fits, else in fp32 on the CPU.

    `settings` are those of evaluate, `run` those of render. Raises UserError if a stage's file is missing.
    """
    shape, stats = read_model_spec(model), read_json(data / "stats.json", "zerolora prepare")
    stored = sum(_weight_files(model))
    rows, longest = stats[f"{settings['split']}_rows"], max(1, stats[f"{settings['split']}_longest_row"])
    rows = min(rows, settings["rows"] or rows)
    half = _answering(shape, settings, longest, BYTES["bf16"])
    on_gpu = run["device"] == "cuda" and stored + half + run["reserve"] <= run["gpu_memory"]
    # On its way to a GPU the model is on the host; on a CPU it computes in fp32.
    held = stored if on_gpu else shape.parameters * BYTES["fp32"] + _answering(shape, settings, longest, BYTES["fp32"])
    seconds = _asking(shape, settings, rows, longest, run, on_gpu)
    return _request(seconds + stored / PACE, PROCESS_BYTES + held, int(on_gpu))


def preparing(rows: Path, processes: int) -> Request:
    """Return the request of tokenizing a file, or all files of a folder, in so many processes."""
    size = sum(path.stat().st_size for path in [rows, *rows.rglob("*")] if path.is_file())
    held = PREPARE_LIBRARIES + PREPARE_PROCESS * (processes + 1) + PREPARE_GROWTH * size
    return _request(size / (PREPARE_PACE * processes), held)


def reporting() -> Request:
    """Return the request of writing a page."""
    return _request(0, LIBRARIES)


def _request(seconds: float, host: float, gpus: int = 0) -> Request:
    return {
        "seconds": seconds,
        "host_bytes": int(host),
        "minutes": max(FLOOR, math.ceil(SLACK * seconds / 60)),
        "mem_mib": math.ceil(asked(host) / 1024**2),
        "gpus": gpus,
    }


def _weight_files(model: Path) -> list[int]:
    """Return the bytes of each weight file of a model that fetch brought."""
    files = read_json(model / MANIFEST, "zerolora fetch")["files"]
    return [file["bytes"] for name, file in files.items() if name.endswith(".safetensors")]


def _answering(shape: ModelSpec, settings: dict[str, Any], longest: int, width: int) -> float:
    """Return the bytes beside the weights while prompts are answered, or while the loss is measured."""
    length = longest + settings["max_new_tokens"]
    cache = 2 * shape.layers * shape.key_heads * shape.head_dim * width * settings["batch"] * length
    together = max(1, EVALUATION_TOKENS // longest)
    answering, measuring = (
        evaluation(shape, ForwardSpec(batch, tokens, width, "sdpa", True, False, "supervised", logits), NOTHING)
        for batch, tokens, logits in ((settings["batch"], length, 1), (together, longest, longest))
    )
    return max(cache + answering, measuring)


def _asking(
    shape: ModelSpec, settings: dict[str, Any], rows: int, longest: int, run: dict[str, Any], on_gpu: bool
) -> float:
    """Return the seconds that answers to all prompts and the loss take on one device."""
    precision: Precision = run["precision"] if on_gpu else "fp32"
    if run["device"] == "cuda" and not on_gpu:
        hardware = unmeasured_cpu(1, 1, run["hardware"]["disk"])
    else:
        hardware = replace(hardware_of(run | {"precision": precision})[0], nodes=1, gpus_per_node=1)

    def forward(length: int) -> float:
        data = {"packing": False, "longest_packed_row": length, "most_supervised": length, "packed_rows": 1}
        data |= {"tokens": length, "supervised_tokens": length, "mean_row_of_a_token": length}
        plan = replace(
            training_spec(shape, estimate_settings(run), data),
            precision=precision,
            micro_batch=settings["batch"],
            accumulation=1,
        )
        issuing = shape.layers * OPERATIONS["full"][0] * hardware.kernel_seconds
        return step_seconds(work_of(shape, plan, data), STRATEGIES["zero0"], hardware).forward + issuing

    # The loss reads each row once more than its prompt was.
    batches = math.ceil(rows / settings["batch"])
    return batches * (2 * forward(longest) + settings["max_new_tokens"] * forward(1))
