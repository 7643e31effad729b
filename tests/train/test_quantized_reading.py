"""4-bit bases that ranks read shard by shard."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import Bench, metrics
from conftest import ROOT, project_environment, saved_in_4_bits
from quantized_checkpoints import saved_mxfp4, saved_quantized
from safetensors.torch import load_file
from test_models import assert_merged, base_of, bench_of, settings_of

from zerolora.config.settings import EvaluateRunSettings
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
from zerolora.merge.merge import merge
from zerolora.methods.quantized_base import BaseQuantization, quantized_weights, round_weights
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.manifest import located
from zerolora.train.launch.launcher import CPU_MALLOC
from zerolora.train.launch.topology import topology
from zerolora.types import Dequantize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

__all__ = ["bench_of"]  # a fixture

BYTES = {"precision": "bf16", "quantization": {"storage": "uint8"}}
MARKED = {"data": "marked", "packing": "marked-packing"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3_offload, bf16 in bytes": ("zero3_offload", BYTES),
    "zero3_hpz, single, fp4, added tokens, saved modules": (
        "zero3_hpz",
        MARKED | {"quantization": {"type": "fp4", "double": False}, "lora": {"r": 4, "modules_to_save": ["norm"]}},
    ),
    "fsdp_offload, bf16, added tokens": ("fsdp_offload", MARKED | {"precision": "bf16"}),
    "fsdp_hybrid, bf16 in bytes": ("fsdp_hybrid", BYTES),
}


@pytest.fixture(scope="module")
def ways(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, list[float]]]]:
    """Return each rank's losses of each case by reading, of two ranks that train all of them: 8 trainings."""
    folder = tmp_path_factory.mktemp("ways")
    bench.mark()
    request = {}
    for name, (strategy, settings) in CASES.items():
        command = bench.command(f"read-{name}", strategy, method="qlora", max_steps=4, **settings)
        options = dict(zip(command[3::2], command[4::2], strict=True))
        train = json.loads(options.pop("--settings"))
        request[name] = {"settings": train, "paths": {key[2:]: path for key, path in options.items()}}
    (folder / "request.json").write_text(json.dumps(request))
    where = topology({}, 1, 2)
    script = Path(__file__).with_name("two_ways.py")
    environment = project_environment(ROOT) | CPU_MALLOC | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder / "request.json"), str(folder)]
    with (folder / "log").open("wb") as log:
        processes = [where.start(rank, command, environment, log) for rank in where.ranks]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert codes == [0, 0], (folder / "log").read_text()[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in where.ranks]


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_those_of_a_model_read_whole(name: str, ways: list[dict[str, dict[str, list[float]]]]) -> None:
    for rank in ways:
        assert rank[name]["shards"] == rank[name]["whole"]
        assert len(set(rank[name]["whole"])) == 4


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_base_stored_in_4_bits_trains_as_one_quantized_while_read(strategy: str, bench: Bench, stored: Bench) -> None:
    settings = {"method": "qlora", "checkpoint_steps": None}
    run = stored.run(f"stored-{strategy}", strategy, **settings)
    expected = bench.run(f"read-{strategy}", strategy, **settings)
    assert metrics(run)["losses"] == metrics(expected)["losses"]
    (ours, theirs) = (load_file(each / "adapter/adapter_model.safetensors") for each in (run, expected))
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())
    kept, read = (json.loads((each / "adapter/manifest.json").read_text()) for each in (run, expected))
    assert kept["quantization"] == read["quantization"] == {"type": "nf4", "double": True, "precision": "fp32"}
    if strategy == "ddp":
        model = EvaluatedModel(located(stored.folder / "w/tiny.json"), run / "adapter")
        split = EvaluateRunSettings(split="validation", batch=2, max_new_tokens=4, check="sum")
        evaluate(split, stored.folder / "data", model, run / "evaluated", run / "answers.json")
        loss = json.loads((run / "evaluated/evaluate.json").read_text())["loss"]
        assert loss == pytest.approx(metrics(run)["loss_validation"], rel=1e-5)


ON_LOAD = {"fp8, blocks": ("zero3", 1), "compressed-tensors, int4": ("ddp", 1), "mxfp4": ("zero3", 2)}
"""Strategy and ranks by format. At stage 3 each rank keeps its part of a weight before it reads the next."""


@pytest.mark.parametrize("kind", ON_LOAD)
def test_base_dequantized_on_load_trains_as_its_copy_in_bf16(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """The adapter's files are equal, and so are the merged model's, with adapters of stacked experts in MXFP4."""
    source = tmp_path / "source"
    if kind == "mxfp4":
        saved_mxfp4(tiny_model, source)
    else:
        saved_quantized(tiny_model, source, kind)
    files: dict[Dequantize, dict[str, bytes]] = {"on_fetch": {}, "on_load": {}}
    for dequantize, own in files.items():
        (tmp_path / dequantize).mkdir()
        place = Bench(tmp_path / dequantize, source, dequantize)
        strategy, ranks = ON_LOAD[kind]
        train = {"method": "qlora", "precision": "bf16", "attention": "eager", "max_steps": 2, "checkpoint_steps": None}
        run = place.run("run", strategy, ranks_per_node=ranks, **train)
        merge(located(place.folder / "w/tiny.json"), run / "adapter", run / "merged", run / "merged")
        own |= {path.name: path.read_bytes() for path in (run / "adapter").glob("*.safetensors")}
        own |= {path.name: path.read_bytes() for path in (run / "merged").iterdir()}
        del own["manifest.json"]  # has the path
    assert files["on_load"] == files["on_fetch"]
    names = {*load_file(run / "adapter/adapter_model.safetensors")}
    assert any(".experts." in name for name in names) == (kind == "mxfp4")


def test_base_stored_in_4_bits_refuses_another_method(stored: Bench) -> None:
    result = stored.start("stored-lora", "zero3", method="lora")
    assert result.returncode == 2
    assert "train.method is lora, and the base model is stored in 4 bits (nf4); set method: qlora" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def stored(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Return a bench whose model is stored in 4 bits."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "bench").mkdir()
    return Bench(folder / "bench", saved_in_4_bits(tiny_model, folder / "model"))


def test_falcon_is_quantized_and_merged(bench_of: Callable[[str], Bench], tmp_path: Path) -> None:
    """All of its linear modules but the head: eight of nine, of a subclass of nn.Linear."""
    place = bench_of("falcon")
    run = place.run("qlora", "zero3", method="qlora", attention="sdpa", checkpoint_steps=None)
    assert len(quantized_weights(built_on_meta(config_of(place.folder / "m/tiny")), True)) == 8
    assert_merged(place, run, tmp_path / "merged", dequantized=True)


WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"ddp": {}, "zero3": {}, "fsdp": {"activation_checkpointing": True}},
    "gpt_oss": {"zero0": {}},
}
"""Strategies by family. gpt-oss stores transposed weights, and biases of experts."""


@pytest.mark.parametrize("family", WAYS)
def test_experts_are_trained_as_their_unpacked_weights(
    family: str, bench_of: Callable[[str], Bench], tmp_path: Path
) -> None:
    """By LoRA on the unpacked weights, stored as a model. The adapter is merged into them."""
    from transformers import AutoModelForCausalLM

    place = bench_of(family)
    settings = settings_of(family) | {"checkpoint_steps": None}
    base = base_of(place)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    round_weights(model, BaseQuantization("nf4", True, "fp32", experts=True))
    unpacked = shutil.copytree(base, tmp_path / "unpacked", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(unpacked)
    (tmp_path / "bench").mkdir()
    expected = Bench(tmp_path / "bench", unpacked).run("lora", "zero1", method="lora", **settings)
    for strategy, own in WAYS[family].items():
        run = place.run(f"experts-{strategy}", strategy, method="qlora", **settings | own)
        assert metrics(run)["losses"] == pytest.approx(metrics(expected)["losses"], rel=1e-5)
        manifest = json.loads((run / "adapter/manifest.json").read_text())
        assert manifest["quantization"] == {"type": "nf4", "double": True, "precision": "fp32", "experts": True}
    (ours, theirs) = (load_file(each / "adapter/adapter_model.safetensors") for each in (run, expected))
    assert ours.keys() == theirs.keys() and any(".experts." in name for name in ours)
    assert all(torch.allclose(ours[name], tensor, rtol=1e-3, atol=1e-5) for name, tensor in theirs.items())
    assert_merged(place, run, tmp_path / "merged", dequantized=True)
