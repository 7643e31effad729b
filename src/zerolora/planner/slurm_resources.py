"""The resources that each job requests through its Snakemake rule: minutes, memory of each node, GPUs.

`seconds` and `host_bytes` are predictions; `minutes` and `mem_mib` are the request, with a margin. `render` computes
training's with the choice; those of other stages are computed from their input files.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from zerolora.config.method_sections import Quantization
from zerolora.config.settings import (
    EvaluateSettings,
    ReferenceSettings,
    RenderSettings,
    SampleSettings,
    TeacherSettings,
)
from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_json
from zerolora.memory.decoder import evaluation
from zerolora.memory.estimate import training_spec, world_size
from zerolora.memory.host import PROCESS as PROCESS_BYTES
from zerolora.memory.inference import AUTO_ROWS, answering
from zerolora.memory.loaded_weights import loaded_bytes
from zerolora.memory.predict import predict
from zerolora.memory.reserve import CONTEXT, UNUSED, with_headroom
from zerolora.memory.states import BYTES
from zerolora.memory.training_spec import RowStatistics
from zerolora.methods.method import SHARED
from zerolora.methods.peft_format import ADAPTER
from zerolora.model import foreign
from zerolora.model.manifest import LOADED, is_weight
from zerolora.model.projections import NOTHING, ForwardSpec
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import EVALUATION_TOKENS, ModelSpec
from zerolora.planner.candidates import Candidate, Planning, step_work
from zerolora.planner.choice import steps_of
from zerolora.planner.cost import OPERATIONS, step_seconds
from zerolora.planner.run_hardware import hardware_of
from zerolora.schedules import every
from zerolora.strategies import STRATEGIES
from zerolora.tensor_file import read_header
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.distill import WINDOW
from zerolora.types import Precision

EMBEDDED = "lora_embedding_A"
SLACK = 4
"""Requested over predicted seconds. The worst configuration of benchmarks/choice.py took 3.3 times its prediction."""
START_SECONDS = 16.1
"""Seconds until a stage computes: Python and its libraries, from a disk that has not read them since the machine
started (benchmarks/results/train_start_up.json, first_seconds)."""
WARNING_MINUTES = 3
"""Of training: profiles/slurm asks for a warning 120 seconds before the limit, and Slurm may be a minute early."""
TRIAL_SECONDS = 47
"""Seconds of a trial on shapes with an export, on the tests' Slurm of two busy cores (2026-11-30)."""
REQUEST_SECONDS = 2.0
"""Seconds of a request to a served model, of several at a time: an assumption."""
DRAW_BYTES = 24
"""Bytes of drawing a token, for each row and token of the vocabulary: probabilities in fp32, two copies, and numbers of
32 and 64 bits (sample/draws.py)."""
SHARED_DISK = 2e8
"""Bytes/s of a file system that many nodes share: an assumption."""
# Measured by benchmarks/prepare_memory.py: bytes of a process, bytes per byte of input, bytes/s of a process.
PREPARE_PROCESS, PREPARE_GROWTH, PREPARE_RATE = 75_000_000, 0.4, 2.0e5
PREPARE_LIBRARIES = 150_000_000
"""Resident bytes of libraries, as Slurm counts them: including pages shared with other processes of the node.
tests/unit/test_slurm_resources.py compares it with a real run."""
LIBRARIES = 375 * 1024**2
"""Resident bytes of a process that writes a page; a rank has more (memory/host.py, PROCESS)."""
MERGE_PROCESS = 400 * 1024**2
"""Resident bytes of a process before it merges, with transformers, as fused experts need it; without it they are fewer
(benchmarks/merge/compare.py, "start"). tests/unit/test_slurm_resources.py compares merging with a real run."""
MERGE_BLOCKS = 8 * (4 * 2**20 + 3 * 4 * 2**17)
"""Bytes of a merge's threads (merge/stream.py): stored rows, and a block in fp32, its update and their sum."""
WINDOW_COPIES = 2
"""Copies of a window's values in memory: arrays, and their record batch."""
MERGE_WHOLE = 4 * 4
"""Bytes for each number of a weight that is merged whole: four fp32 copies, quantized, unpacked and updated. Experts
have more copies of fewer bytes."""


class Resources(TypedDict):
    """The predicted needs of a job, and its request."""

    seconds: float
    host_bytes: int
    minutes: int
    mem_mib: int
    gpus: int
    """On each node."""


class TrainingResources(Resources):
    """The predicted needs of training, and its request on each node."""

    nodes: int
    ranks: int
    gpu_bytes: int
    """Predicted peak of torch's allocator on a GPU; 0 on CPU."""


def training(candidate: Candidate, planning: Planning, canary: int = 0) -> TrainingResources:
    """Return the resources of training: steps, validations, weights read and checkpoints written; and of a canary, two
    trainings of `canary` steps that each read the weights."""
    settings, rows = planning.settings, planning.rows
    steps = steps_of(settings, rows)
    # An upper bound: validating a row takes less time than training on it.
    validations = 1 + (steps // every(settings.validation_steps, steps) if settings.validation_steps else 0)
    stepping = candidate.seconds * (steps + 2 * canary + validations * rows.validation_rows / settings.global_batch)
    prediction = predict(planning.model, candidate.spec)
    loads = settings.nodes * (3 if canary else 1)
    moved = prediction.disk["model"] * loads + prediction.disk["adapter"] + prediction.disk["checkpoints"]
    on_gpu = settings.device == "cuda"
    gpus = settings.ranks_per_node if on_gpu else 0
    resources = _resources(stepping + moved / SHARED_DISK, candidate.host, gpus)
    # Pages of the weights' files may make it more than a node has; the system drops them.
    resources["mem_mib"] = min(resources["mem_mib"], settings.host_memory // 1024**2)
    resources["minutes"] += WARNING_MINUTES
    return {
        **resources,
        "nodes": settings.nodes,
        "ranks": world_size(settings),
        "gpu_bytes": candidate.gpu - prediction.gpu["reserve"] if on_gpu else 0,
    }


def rendered(reasons: Path) -> TrainingResources:
    """Return the resources of training from render.json. Raises UserError if the file does not have them."""
    explained = read_json(reasons, "zerolora stage render")
    if "slurm_resources" not in explained:
        raise UserError(f"{reasons}: was written by another version; run `zerolora stage render` again")
    resources: TrainingResources = explained["slurm_resources"]
    return resources


def merging(model: Path, adapter: Path) -> Resources:
    """Return the resources of merging an adapter into the model in a directory: blocks of rows, and the largest matrix
    that is merged whole. An untied head is merged by rows, and so is an embedding without DoRA, whose norms go across
    its rows.

    Raises UserError if a manifest or config.json is missing.
    """
    files_of_adapter = foreign.manifest(adapter / MANIFEST, "zerolora stage train")["files"]
    added = sum(file["bytes"] for file in files_of_adapter.values())
    by_rows = ("head",) if _scales_embedding(adapter) else SHARED
    modules = [module for module in read_model_spec(model).modules if module.kind not in by_rows]
    largest = max(math.prod(shape) for module in modules for _, shape in module.weights)
    held = MERGE_BLOCKS + MERGE_WHOLE * largest + added
    return _resources(2 * _weight_bytes(model) / SHARED_DISK, MERGE_PROCESS + held)


def _scales_embedding(adapter: Path) -> bool:
    """Return whether an adapter has DoRA's magnitudes of an embedding."""
    path = adapter / ADAPTER
    names = read_header(path).tensors if path.is_file() else {}
    return any(
        name.endswith(EMBEDDED) and f"{name.removesuffix(EMBEDDED)}lora_magnitude_vector" in names for name in names
    )


def evaluating(
    settings: EvaluateSettings,
    model: Path,
    data: Path,
    run: RenderSettings,
    gpus_per_node: int | None = None,
    models: int = 1,
) -> Resources:
    """Return the resources of evaluating `models` models of one size in turn, on devices as for `answering_rows`.

    Raises UserError if a stage's file is missing.
    """
    statistics = read_json(data / "stats.json", "zerolora stage prepare")
    rows, longest = statistics[f"{settings.split}_rows"], max(1, statistics[f"{settings.split}_longest_row"])
    rows = min(rows, settings.rows or rows)
    spec, stored = read_model_spec(model), _weight_bytes(model)
    return answering_rows(settings, spec, stored, rows, longest, run, gpus_per_node, models)


def sampling(
    settings: SampleSettings,
    model: Path,
    prompts: int,
    longest: int,
    run: RenderSettings,
    gpus_per_node: int | None = None,
) -> Resources:
    """Return the resources of sampling answers to prompts of up to `longest` tokens, on devices as for
    `answering_rows`; of a served model, those of a process that asks.

    Raises UserError if a stage's file is missing.
    """
    if settings.of.served:
        return _resources(prompts * settings.n * REQUEST_SECONDS, LIBRARIES)
    spec, stored = read_model_spec(model), _weight_bytes(model)
    return answering_rows(settings, spec, stored, prompts * settings.n, max(1, longest), run, gpus_per_node)


def answering_rows(
    settings: EvaluateSettings | SampleSettings,
    spec: ModelSpec,
    stored: int,
    rows: int,
    longest: int,
    run: RenderSettings,
    gpus_per_node: int | None,
    models: int = 1,
) -> Resources:
    """Return the resources of answering `rows` prompts of up to `longest` tokens with `models` models of `stored` bytes
    in turn: on the fewest of a node's GPUs that hold one for each rank, or on all, with the rest in host memory; or on
    a CPU in fp32. `gpus_per_node` is by default training's number."""
    cache, working = _on_gpus(spec, settings, longest)
    half = cache + working
    on_gpu = run.device == "cuda"
    of_node = run.ranks_per_node if gpus_per_node is None else gpus_per_node
    most = of_node // settings.ranks
    gpus = _gpus(spec, stored, cache, working, run, most) if on_gpu else 0
    if settings.engine == "vllm":  # which divides heads evenly among GPUs
        numbers = range(gpus, most + 1) if gpus else range(most, 0, -1)
        gpus = next((number for number in numbers if spec.key_heads % number == 0), gpus)
    # A GPU's model is loaded into host memory first; a CPU's is in fp32.
    held = stored if on_gpu else spec.parameters * BYTES["fp32"] + _answering(spec, settings, longest, BYTES["fp32"])
    ranks = settings.ranks
    all_gpus = 0
    seconds = _answering_seconds(spec, settings, rows, longest, run)
    if on_gpu:
        all_gpus = ranks * gpus or of_node
        room = all_gpus * (run.gpu_memory or 0) / ranks
        seconds += _passes(settings, rows) * max(0.0, stored + half - room) / hardware_of(run)[0].host.bandwidth
    return _resources(models * (seconds / ranks + stored / SHARED_DISK), ranks * (PROCESS_BYTES + held), all_gpus)


def answering_gpu_bytes(
    settings: EvaluateSettings | SampleSettings,
    spec: ModelSpec,
    stored: int,
    longest: int,
    run: RenderSettings,
    gpus: int,
) -> float:
    """Return the bytes that each of the `gpus` GPUs of a rank needs for `answering_rows`, the reserve included."""
    return _of_gpu(spec, stored, *_on_gpus(spec, settings, longest), run, gpus)


def referring(
    settings: ReferenceSettings, model: Path, data: Path, run: RenderSettings, gpus_per_node: int | None = None
) -> Resources:
    """Return the resources of `reference`: forward passes over the training and validation rows, on the fewest of a
    node's GPUs that hold the model, or on all, with the rest in host memory; or on a CPU.

    Raises UserError if a stage's file is missing.
    """
    spec, statistics = read_model_spec(model), read_json(data / "stats.json", "zerolora stage prepare")
    tokens, longest = _tokens(statistics), statistics["longest_row"]
    tokens *= 1 + OBJECTIVES[run.objective].forwards_before  # of other sequences
    return _scoring(
        spec, _weight_bytes(model), settings.precision, settings.quantization, tokens, longest, run, gpus_per_node
    )


def teaching(
    settings: TeacherSettings, model: Path, data: Path, run: RenderSettings, gpus_per_node: int | None = None
) -> Resources:
    """Return the resources of `teacher`, as those of `reference` for the teacher's model.

    Raises UserError if a stage's file is missing.
    """
    statistics = read_json(data / "stats.json", "zerolora stage prepare")
    supervised = _tokens(statistics, "supervised_tokens")
    return of_teacher(
        read_model_spec(model),
        _weight_bytes(model),
        settings,
        _tokens(statistics),
        supervised,
        statistics["longest_row"],
        run,
        gpus_per_node,
    )


def of_teacher(
    spec: ModelSpec,
    stored: int,
    settings: TeacherSettings,
    tokens: int,
    supervised: int,
    longest: int,
    run: RenderSettings,
    gpus_per_node: int | None = None,
) -> Resources:
    """Return the resources of `teacher` for a model of `stored` bytes and rows of `tokens` tokens, of which some are
    `supervised`: a pass over all, and writing its values."""
    objective = OBJECTIVES[run.objective].configured({"top_k": settings.top_k})
    held = WINDOW_COPIES * objective.row_bytes(min(supervised, WINDOW))
    written = objective.row_bytes(supervised)
    return _scoring(spec, stored, settings.precision, None, tokens, longest, run, gpus_per_node, held, written)


def _tokens(statistics: dict[str, Any], name: str = "tokens") -> int:
    return sum(int(statistics[f"{split}_{name}"]) for split in ("train", "validation"))


def _scoring(
    spec: ModelSpec,
    stored: int,
    precision: Precision,
    quantization: Quantization | None,
    tokens: int,
    longest: int,
    run: RenderSettings,
    gpus_per_node: int | None,
    held_beside: int = 0,
    written: int = 0,
) -> Resources:
    """Return the resources of forward passes over `tokens` tokens, of which the host holds and the disk gets some
    bytes."""
    on_gpu, longest, width = run.device == "cuda", max(1, longest), BYTES[precision]
    weights = loaded_bytes(spec, width, quantization)
    together = max(1, EVALUATION_TOKENS // longest)
    working = evaluation(spec, ForwardSpec(together, longest, width, "sdpa", True, False, "full", longest), NOTHING)
    of_node = run.ranks_per_node if gpus_per_node is None else gpus_per_node
    gpus = _gpus(spec, weights, 0, working, run, of_node) or of_node if on_gpu else 0
    held = held_beside + (stored if on_gpu else weights + working)
    seconds = math.ceil(tokens / EVALUATION_TOKENS) * _forward_seconds(spec, EVALUATION_TOKENS, 1, run)
    return _resources(seconds + (stored + written) / SHARED_DISK, PROCESS_BYTES + held, gpus)


def _gpus(spec: ModelSpec, weights: float, cache: int, working: float, run: RenderSettings, most: int) -> int:
    """Return the least number of GPUs, up to `most`, for bytes of `weights` and a cache, both divided by layers,
    and `working` bytes on each; 0 if they do not fit.

    accelerate (get_balanced_memory) assigns whole layers, so one of several GPUs may have a layer, or an embedding,
    more than its share.
    """
    return next(
        (
            number
            for number in range(1, most + 1)
            if _of_gpu(spec, weights, cache, working, run, number) <= (run.gpu_memory or 0)
        ),
        0,
    )


def _of_gpu(spec: ModelSpec, weights: float, cache: float, working: float, run: RenderSettings, number: int) -> float:
    """Return the bytes of each of some GPUs, their reserve included."""
    width = weights / spec.parameters
    tables = [width * module.parameters for module in spec.modules if module.kind in ("embedding", "head")]
    largest = max([weights / spec.layers, *tables])
    held = (weights + cache) / number + (largest if number > 1 else 0) + working
    return held + (CONTEXT + int(UNUSED * held) if run.reserve is None else run.reserve)


def preparing(rows: Sequence[Path], processes: int) -> Resources:
    """Return the resources of tokenizing files, and those of directories, in `processes` processes."""
    size = sum(path.stat().st_size for each in rows for path in [each, *each.rglob("*")] if path.is_file())
    held = PREPARE_LIBRARIES + PREPARE_PROCESS * (processes + 1) + PREPARE_GROWTH * size
    return _resources(size / (PREPARE_RATE * processes), held)


def planning() -> Resources:
    """Return the resources of planning a run with torch, on shapes without bytes."""
    return _resources(TRIAL_SECONDS, PROCESS_BYTES)


def reporting() -> Resources:
    """Return the resources of writing the report."""
    return _resources(0, LIBRARIES)


def _resources(seconds: float, host: float, gpus: int = 0) -> Resources:
    return {
        "seconds": seconds,
        "host_bytes": int(host),
        "minutes": math.ceil(SLACK * (START_SECONDS + seconds) / 60),
        "mem_mib": math.ceil(with_headroom(host) / 1024**2),
        "gpus": gpus,
    }


def _weight_bytes(model: Path) -> int:
    """Return the bytes of a fetched model's weights as they are loaded."""
    manifest = foreign.manifest(model / MANIFEST, "zerolora stage fetch")
    files = manifest["files"]
    return int(manifest.get(LOADED) or sum(file["bytes"] for name, file in files.items() if is_weight(name)))


def _answering(
    model: ModelSpec, settings: EvaluateSettings | SampleSettings, longest: int, width: int, rows: int | None = None
) -> float:
    """Return the peak bytes, without weights, of generating answers, `rows` at a time, and of computing the loss."""
    answers = sum(answering(model, width, "sdpa", rows or _batch(settings), longest, settings.max_new_tokens))
    if isinstance(settings, SampleSettings):
        return answers + DRAW_BYTES * (rows or _batch(settings)) * model.vocabulary
    together = max(1, EVALUATION_TOKENS // longest)
    measuring = evaluation(
        model, ForwardSpec(together, longest, width, "sdpa", True, False, "supervised", longest), NOTHING
    )
    return max(answers, measuring)


def _on_gpus(spec: ModelSpec, settings: EvaluateSettings | SampleSettings, longest: int) -> tuple[int, float]:
    """Return the bytes of the cache and of the working memory of answering in bf16. With batch: auto one prompt must
    fit; a CPU's request is for the rows in use."""
    together = 1 if settings.batch == "auto" else settings.batch
    cache, _ = answering(spec, BYTES["bf16"], "sdpa", together, longest, settings.max_new_tokens)
    return cache, _answering(spec, settings, longest, BYTES["bf16"], together) - cache


def _batch(settings: EvaluateSettings | SampleSettings) -> int:
    return AUTO_ROWS if settings.batch == "auto" else settings.batch


def _answering_seconds(
    model: ModelSpec, settings: EvaluateSettings | SampleSettings, rows: int, longest: int, run: RenderSettings
) -> float:
    """Return the seconds of answering all prompts and computing the loss on one device."""
    run = run if run.device == "cuda" else run.model_copy(update={"precision": "fp32"})

    def forward(length: int) -> float:
        return _forward_seconds(model, length, _batch(settings), run)

    # For the loss, each row needs one more forward pass.
    batches = math.ceil(rows / _batch(settings))
    return batches * (2 * forward(longest) + settings.max_new_tokens * forward(1))


def _forward_seconds(model: ModelSpec, length: int, rows: int, run: RenderSettings) -> float:
    """Return the seconds of a forward pass over `rows` rows of `length` tokens on one device."""
    hardware = replace(hardware_of(run)[0], nodes=1, ranks_per_node=1)
    # A step of another objective may have further passes, and rows of two sequences.
    run = run.model_copy(update={"objective": "sft", "objective_settings": {}})
    row = RowStatistics(
        packing=False,
        longest_packed_row=length,
        most_supervised=length,
        packed_rows=1,
        tokens=length,
        supervised_tokens=length,
        mean_row_of_a_token=length,
        validation_rows=0,
    )
    spec = replace(training_spec(model, run, row), micro_batch=rows, accumulation=1)
    issuing = model.layers * OPERATIONS["full"][0] * hardware.kernel_seconds
    return step_seconds(step_work(model, spec, row), STRATEGIES["zero0"], hardware).forward + issuing


def _passes(settings: EvaluateSettings | SampleSettings, rows: int) -> int:
    """Return the forward passes of answering all prompts and computing the loss."""
    return math.ceil(rows / _batch(settings)) * (2 + settings.max_new_tokens)
