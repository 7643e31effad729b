"""The resources that jobs request cover what was measured; and how sbatch is asked for GPUs of each node."""

import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import Bench
from conftest import BIN, ROOT
from process_memory import peak_bytes
from safetensors.torch import save_file
from test_render import settings_of

from zerolora.compat.slurm_executor_patches import gpus_of_each_node
from zerolora.config.method_sections import Quantization
from zerolora.config.sample_sections import Served
from zerolora.config.settings import EvaluateSettings, ReferenceSettings, SampleSettings
from zerolora.files import MANIFEST, canonical, describe, write_json
from zerolora.memory.reserve import SHARE, with_headroom
from zerolora.merge import stream
from zerolora.model.base_check import listed_shapes
from zerolora.model.read_spec import read_model_spec
from zerolora.planner.slurm_resources import (
    MERGE_BLOCKS,
    MERGE_PROCESS,
    PREPARE_GROWTH,
    PREPARE_PROCESS,
    PREPARE_RATE,
    SLACK,
    START_SECONDS,
    answering_gpu_bytes,
    evaluating,
    merging,
    preparing,
    referring,
    reporting,
    sampling,
)
from zerolora.tensor_file import write_shapes
from zerolora.types import Precision
from zerolora.units import GIB

MODELS = ROOT / "config/recipes/models"
EVALUATE = EvaluateSettings(split="test", rows=None, batch=50, max_new_tokens=32, check="exact")


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))


def fetched(folder: Path, name: str, width: int, files: int) -> Path:
    """Write config and manifest of a fetched model: `width` bytes a weight, in `files` files."""
    model = json.loads((MODELS / f"{name}.json").read_text())
    write_json(folder / "config.json", model)
    size = read_model_spec(folder).parameters * width // files
    weights = {f"model-{number}.safetensors": {"sha256": "", "bytes": size} for number in range(files)}
    write_json(folder / MANIFEST, {"files": weights | {"config.json": {"sha256": "", "bytes": 1}}})
    return folder


def prepared(folder: Path, rows: int, longest: int) -> Path:
    write_json(folder / "stats.json", {"test_rows": rows, "test_longest_row": longest})
    return folder


def test_measured_times_are_within_the_request() -> None:
    rows = [row for row in result("choice.json")["rows"] if row["seconds"]]
    worst = max(row["seconds"] / row["predicted_seconds"] for row in rows)
    assert len(rows) > 100
    assert 0.75 * SLACK < worst < SLACK
    assert result("train_start_up.json")["to_first_step"]["first_seconds"] <= START_SECONDS
    assert reporting()["minutes"] == 2  # a start, SLACK times


def test_measured_host_memory_is_within_the_request() -> None:
    actual = result("memory_cpu.json")
    assert 1 / (1 + actual["lowest_error"]) < SHARE


def test_prepare_requests_cover_its_benchmark(tmp_path: Path) -> None:
    for run in result("prepare_memory.json")["runs"]:
        processes = run["processes"] - 1
        assert run["peak_bytes"] <= PREPARE_PROCESS * run["processes"] + PREPARE_GROWTH * run["input_bytes"]
        assert run["seconds"] <= run["input_bytes"] / (PREPARE_RATE * processes)
    for name in ("a.json", "folder/b.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(10_000_000))
    alone, both = preparing([tmp_path / "a.json"], 2), preparing([tmp_path], 2)
    assert both["seconds"] == 2 * alone["seconds"] == 50
    assert preparing([tmp_path], 4)["seconds"] == 25
    assert preparing([tmp_path], 4)["host_bytes"] > both["host_bytes"] > alone["host_bytes"]


def test_evaluation_requests_cover_its_measurement(tmp_path: Path) -> None:
    """The prompts of the reference task share a prefix, computed once; the prediction assumes none."""
    measured = result("make_run.json")["evaluate_resources"]["peak_host_bytes_generating"]
    run = settings_of(device="cpu", gpu_memory=None, precision="fp32")
    model, data = fetched(tmp_path / "model", "smollm2-135m", 4, 1), prepared(tmp_path / "data", 200, 60)
    actual = evaluating(EVALUATE, model, data, run)
    assert actual["gpus"] == 0
    assert measured < actual["host_bytes"] < 1.5 * measured
    assert actual["mem_mib"] * 1024**2 >= with_headroom(actual["host_bytes"]) > measured


def test_evaluation_requests_a_gpu_that_holds_the_model(tmp_path: Path) -> None:
    model, data = fetched(tmp_path / "model", "qwen2.5-7b", 2, 4), prepared(tmp_path / "data", 200, 60)
    cpu = {"device": "cpu", "gpu_memory": None}
    on_gpu = evaluating(EVALUATE, model, data, settings_of(gpu_memory=80 * GIB))
    on_cpu = evaluating(EVALUATE, model, data, settings_of(**cpu))
    assert (on_gpu["gpus"], on_cpu["gpus"]) == (1, 0)
    assert on_cpu["host_bytes"] > 1.9 * on_gpu["host_bytes"]
    assert on_cpu["minutes"] > on_gpu["minutes"] >= reporting()["minutes"]
    both = evaluating(EVALUATE, model, data, settings_of(**cpu), models=2)
    assert both == {**on_cpu, "seconds": 2 * on_cpu["seconds"], "minutes": both["minutes"]}
    assert both["minutes"] > on_cpu["minutes"]
    few = evaluating(EVALUATE.model_copy(update={"rows": 50}), model, data, settings_of(**cpu))
    assert few["seconds"] < on_cpu["seconds"] / 2
    sampled = SampleSettings.model_validate({"of": {"base": True}, "dataset": "rows", "n": 2, "max_new_tokens": 32})
    twice = sampling(sampled, model, 100, 60, settings_of(gpu_memory=80 * GIB))
    assert (twice["gpus"], sampling(sampled, model, 100, 60, settings_of(**cpu))["gpus"]) == (1, 0)
    assert twice["seconds"] < sampling(sampled, model, 400, 60, settings_of(gpu_memory=80 * GIB))["seconds"]
    spec = read_model_spec(model)
    needed = math.ceil(answering_gpu_bytes(sampled, spec, 4 * (spec.parameters * 2 // 4), 60, settings_of(), 1))
    gpus = [sampling(sampled, model, 100, 60, settings_of(gpu_memory=each), 2)["gpus"] for each in (needed, needed - 1)]
    assert gpus == [1, 2]
    served = sampled.of.model_copy(update={"base": None, "served": Served(address="http://localhost:1", model="a")})
    asked = sampling(sampled.model_copy(update={"of": served}), model, 100, 60, settings_of(gpu_memory=80 * GIB))
    assert asked["gpus"] == 0 and asked["host_bytes"] < on_gpu["host_bytes"] / 10


def test_merging_requests_cover_blocks_and_process() -> None:
    assert stream.THREADS * (stream.SPAN + 3 * 4 * stream.BLOCK) == MERGE_BLOCKS
    for model in result("merge.json")["models"].values():
        assert MERGE_PROCESS / 2 < model["ways"]["start"]["rss_bytes"] < MERGE_PROCESS


def test_merging_requests_a_matrix_not_the_model(tmp_path: Path) -> None:
    write_json(
        tmp_path / "adapter" / MANIFEST, {"files": {"adapter_model.safetensors": {"sha256": "", "bytes": 10**7}}}
    )
    one, four = (
        merging(fetched(tmp_path / f"{files}", "qwen2.5-7b", 2, files), tmp_path / "adapter") for files in (1, 4)
    )
    assert one["seconds"] == pytest.approx(four["seconds"])
    assert one["host_bytes"] == four["host_bytes"] == MERGE_PROCESS + MERGE_BLOCKS + 16 * 3584 * 18944 + 10**7


def test_merging_requests_a_whole_dora_embedding(tmp_path: Path) -> None:
    """DoRA needs an embedding's norms across all rows; plain factors are added row by row."""
    model, adapter = fetched(tmp_path / "model", "qwen2.5-7b", 2, 1), tmp_path / "adapter"
    write_json(adapter / MANIFEST, {"files": {"adapter_model.safetensors": {"sha256": "", "bytes": 10**7}}})
    prefix = "base_model.model.model.embed_tokens"
    factors = {f"{prefix}.lora_embedding_A": (4, 152064), f"{prefix}.lora_embedding_B": (3584, 4)}
    write_shapes(factors, adapter / "adapter_model.safetensors")
    plain = merging(model, adapter)["host_bytes"]
    write_shapes(factors | {f"{prefix}.lora_magnitude_vector": (3584,)}, adapter / "adapter_model.safetensors")
    assert merging(model, adapter)["host_bytes"] - plain == 16 * 3584 * (152064 - 18944)


@pytest.mark.slow
def test_prepare_stays_within_its_request(tmp_path: Path, bench: Bench) -> None:
    rows = bench.folder / "rows.json"
    settings = canonical(bench.settings["prepare"]["rows"] | {"path": str(rows)})
    places = ["--model", str(bench.folder / "m/tiny/manifest.json"), "--output", str(tmp_path / "data")]
    peak = peak_bytes([str(BIN / "zerolora"), "stage", "prepare", "--settings", settings, *places, "--workers", "1"])
    wanted = preparing([rows], 1)
    assert 0.4 * wanted["host_bytes"] < peak < wanted["host_bytes"]


@pytest.mark.slow
def test_merge_stays_within_its_request(tmp_path: Path) -> None:
    """Two weight files of 256 MB, each with an adapted matrix."""
    config = json.loads((MODELS / "smollm2-135m.json").read_text())
    config |= {"num_hidden_layers": 2, "vocab_size": 110_000, "tie_word_embeddings": False}
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    shapes = listed_shapes(read_model_spec(base))
    names = [[name for name in shapes if ("layers.1" in name or "lm_head" in name) == last] for last in (False, True)]
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for shard, weights in zip(shards, names, strict=True):
        save_file({name: torch.ones(shapes[name]) for name in weights}, base / shard)
    index = {name: shard for shard, weights in zip(shards, names, strict=True) for name in weights}
    write_json(base / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    write_json(base / MANIFEST, {"files": describe(base)})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    prefix = "base_model.model.model.layers"
    factors = {"A": torch.ones(4, 1536), "B": torch.ones(576, 4)}
    tensors = {f"{prefix}.{n}.mlp.down_proj.lora_{f}.weight": value for n in range(2) for f, value in factors.items()}
    save_file({name: value.clone() for name, value in tensors.items()}, adapter / "adapter_model.safetensors")
    peft_config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(peft_config))
    write_json(adapter / MANIFEST, {"files": describe(adapter)})
    write_json(tmp_path / "base.json", {"path": str(base), "files": {}})
    places = ["--output", str(tmp_path / "merged")]
    weights = ["--settings", "{}", "--weights", str(tmp_path / "base.json")]
    peak = peak_bytes([str(BIN / "zerolora"), "stage", "merge", *weights, "--adapter", str(adapter), *places])
    wanted = merging(base, adapter)
    assert 0.4 * wanted["host_bytes"] < peak < wanted["mem_mib"] * 1024**2


def test_evaluation_requests_enough_gpus_for_the_model(tmp_path: Path) -> None:
    """70B parameters in bf16 are 141 GB; two GPUs of 80 GiB have 172 GB, as have four of 40 GiB."""
    model, data = fetched(tmp_path / "model", "llama-3-70b", 2, 4), prepared(tmp_path / "data", 200, 60)
    few = EVALUATE.model_copy(update={"batch": "auto"})

    def gpus(gib: int, node: int, **values: Any) -> int:
        settings = few.model_copy(update=values)
        return evaluating(settings, model, data, settings_of(gpu_memory=gib * GIB), node)["gpus"]

    assert [gpus(gib, 8) for gib in (192, 80, 40, 24)] == [1, 2, 4, 7]
    assert [gpus(80, node) for node in (1, 2)] == [1, 2]
    assert gpus(24, 8, engine="vllm") == gpus(16, 8, engine="vllm") == 8
    assert gpus(80, 8, ranks=4) == 8 and gpus(80, 6, ranks=4) == 6
    assert gpus(80, 8, batch=20, max_new_tokens=8000) == 3  # with 53 GB of keys and values
    offloaded, whole = (evaluating(few, model, data, settings_of(gpu_memory=80 * GIB), node) for node in (1, 2))
    assert offloaded["host_bytes"] == whole["host_bytes"]  # offloaded there, or loaded through it
    assert offloaded["seconds"] > 1.3 * whole["seconds"]  # offloaded weights are copied for each token


def test_a_reference_requests_gpus_for_its_weights_as_loaded(tmp_path: Path) -> None:
    """Quantized, or wider than they are stored in bf16."""
    write_json(tmp_path / "stats.json", {"train_tokens": 10**6, "validation_tokens": 0, "longest_row": 512})

    def gpus(name: str, gib: int, precision: Precision, quantization: Quantization | None = None) -> int:
        model = fetched(tmp_path / name, name, 2, 4)
        settings = ReferenceSettings(device="cuda", precision=precision, quantization=quantization)
        return referring(settings, model, tmp_path, settings_of(gpu_memory=gib * GIB), 8)["gpus"]

    four_bits = Quantization(type="nf4")
    assert gpus("llama-3-70b", 80, "bf16") == 2
    assert [gpus("llama-3-70b", gib, "bf16", four_bits) for gib in (80, 24)] == [1, 2]
    assert gpus("llama-3-8b", 24, "bf16") == 1 and gpus("llama-3-8b", 24, "fp32") == 2


class Resources(dict[str, Any]):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    ("resources", "line", "parsed"),
    [
        ({"gres": "gpu:4", "gpu": 8, "nodes": 2}, " --gres=gpu:4", (4, None)),
        ({"gres": "gpu:1", "gpu": 1}, " --gres=gpu:1", (1, None)),
        ({"gres": "gpu:a100:2", "gpu": 2}, " --gres=gpu:a100:2", (2, "a100")),
        ({"gres": "", "gpu": 0}, "", (0, None)),
        ({"gpu": 2}, " --gpus=2", (2, None)),
    ],
)
def test_gpus_are_requested_once(resources: dict[str, Any], line: str, parsed: tuple[int, str | None]) -> None:
    executor = importlib.import_module("snakemake_executor_plugin_slurm")
    gpus_of_each_node(executor)
    gpus_of_each_node(executor)  # again: no change
    job: Any = SimpleNamespace(resources=Resources(resources), name="train", threads=4)
    assert executor.set_gres_string(job) == line
    assert executor.partitions.parse_gpu_requirements(job) == parsed
