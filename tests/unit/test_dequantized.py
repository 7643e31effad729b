"""Quantized checkpoints that are dequantized whenever they are loaded: every reader sees the model in bf16."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refusal
from quantized_checkpoints import saved_mxfp4, saved_quantized, sharded
from safetensors.torch import load_file, save_file
from test_merge import make_adapter

from zerolora.compat import bitsandbytes_patches
from zerolora.config.method_sections import Quantization
from zerolora.config.settings import FetchDirectory
from zerolora.evaluate import evaluated_models
from zerolora.fetch.models import fetch
from zerolora.fetch.restore import restore
from zerolora.files import sha256
from zerolora.merge import stream
from zerolora.merge.merge import write_model
from zerolora.model.dequantized import MARK, check_quantizes, weight_headers
from zerolora.model.manifest import LOADED, count_parameters, weight_directory
from zerolora.model.quantized import checkpoint
from zerolora.model.read_spec import read_model_spec
from zerolora.train.base_model import bitsandbytes_config, read

CPU = torch.device("cpu")
KINDS = ("mxfp4", "fp8, blocks, in two files", "fp8, rows", "compressed-tensors, int4")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make weights of several blocks, which are not those of a merge."""
    monkeypatch.setattr(checkpoint, "BLOCK", 300)
    monkeypatch.setattr(stream, "SPAN", 2 * 700)


def fetched(source: Path, folder: Path, dequantize: Any) -> Path:
    """Fetch a checkpoint and return the directory of its weights; its small files are in `folder`/models/it."""
    fetch(FetchDirectory(path=str(source), dequantize=dequantize), folder / "weights/it", folder / "models/it")
    return weight_directory(folder / "models/it", folder / "weights/it")


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def quantized(weights: Path) -> dict[str, torch.Tensor]:
    """Return what QLoRA holds of a base: codes, and the constants beside them."""
    bitsandbytes_patches.load()
    model = read(weights, torch.bfloat16, "eager", CPU, bitsandbytes_config(Quantization(), "bf16", sharded=False))
    result = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        if state := getattr(parameter, "quant_state", None):
            result |= {f"{name}.{key}": each for key, each in state.as_dict(packed=True).items()}
    assert model.name_or_path == str(weights)
    return result


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, each in theirs.items() if each.dtype != ours[name].dtype or not each.equal(ours[name])] == []


def test_weights_that_cannot_be_dequantized_on_load_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    """By `fetch`, which reads every number; a method that does not quantize them again by training."""
    line = refusal(fetched, tiny_model, tmp_path, "on_load")
    assert line.startswith(f"{tiny_model}/config.json: dequantize is on_load, and the weights are not quantized in a")
    saved_quantized(tiny_model, source := tmp_path / "source", "fp8, rows")
    kept = fetched(source, tmp_path, "on_load")
    assert "train.method is lora, and the base model was fetched with" in refusal(check_quantizes, kept, "lora", False)
    tensors = load_file(source / "model.safetensors")
    tensors[next(name for name in tensors if name.endswith("_scale"))].fill_(torch.inf)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert "has a number that is not finite" in refusal(fetched, source, tmp_path, "on_load")


@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_sees_the_model_in_bf16(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Its files' headers, the base of qlora, the base that is evaluated and the merged model are those of the model
    that `fetch` converts, byte by byte; the disk has the published files alone."""
    source = tmp_path / "source"
    if kind == "mxfp4":
        saved_mxfp4(tiny_model, source)
    else:
        saved_quantized(tiny_model, source, kind.removesuffix(", in two files"))
        if "two files" in kind:
            sharded(source)
    published = {path.name: sha256(path) for path in source.glob("*.safetensors")}
    once, kept = (fetched(source, tmp_path / each, each) for each in ("on_fetch", "on_load"))

    assert {path.name: sha256(path) for path in kept.glob("*.safetensors")} == published
    paths = [tmp_path / each / "models/it/manifest.json" for each in ("on_fetch", "on_load")]
    manifests = [json.loads(path.read_text()) for path in paths]
    assert manifests[0]["dequantized_from"] == manifests[1]["dequantized_from"]
    assert manifests[0]["parameters"] == manifests[1]["parameters"] == count_parameters(kept)
    assert manifests[1][LOADED] == bytes_of(once) > bytes_of(kept)
    assert read_model_spec(tmp_path / "on_load/models/it").stored_bytes == bytes_of(kept)
    restore(tmp_path / "on_load/models/it", kept)

    headers = [weight_headers(each) for each in (once, kept)]
    assert [each.header for each in headers[0]] == [each.header for each in headers[1]]
    assert_equal(*({name: each.read() for file in files for name, each in file.tensors.items()} for files in headers))
    assert_equal(quantized(kept), quantized(once))
    assert_equal(*(evaluated_models.load(each, CPU, [])[0].state_dict() for each in (kept, once)))

    adapter = make_adapter(once, tmp_path / "adapter")
    for each in (once, kept):
        merged = tmp_path / f"merged-{each.parents[1].name}"
        merged.mkdir()
        write_model(each, [(adapter, 1.0)], merged, merged)
    files = {path.name: path.read_bytes() for path in (tmp_path / "merged-on_fetch").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "merged-on_load").iterdir()} == files
    assert MARK not in files and "quantization_config" not in json.loads(files["config.json"])
