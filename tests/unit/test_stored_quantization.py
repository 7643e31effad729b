"""Checkpoints in bitsandbytes' 4 bits: taken as they are, or refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refusal, saved_in_4_bits
from safetensors.torch import load_file, save_file

from zerolora.config.method_sections import Quantization
from zerolora.errors import UserError
from zerolora.merge.merge import write_model
from zerolora.model.base_check import check_base
from zerolora.model.manifest import count_parameters
from zerolora.model.stored_quantization import (
    StoredQuantization,
    check_mergeable,
    check_trainable,
    stored_precision,
    stored_quantization,
)

FILE = "model.safetensors"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def stored(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model in 4 bits."""
    return saved_in_4_bits(tiny_model, tmp_path_factory.mktemp("stored") / "model")


@pytest.mark.parametrize("double", [True, False])
def test_4_bits_are_taken_as_they_are(tiny_model: Path, tmp_path: Path, double: bool) -> None:
    path = saved_in_4_bits(tiny_model, tmp_path / "model", bnb_4bit_use_double_quant=double)
    check_base(path)
    assert stored_quantization(path) == StoredQuantization("nf4", double)
    assert count_parameters(path) == count_parameters(tiny_model)
    assert stored_precision(path) == "fp32"
    assert stored_quantization(tiny_model) is None and stored_precision(tiny_model) is None


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


def shorten(tensors: dict[str, Any]) -> None:
    tensors[WEIGHT] = tensors[WEIGHT][:-1].clone()


def unpack(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith(WEIGHT)]:
        del tensors[name]
    tensors[WEIGHT] = torch.zeros(32, 32)


def restate(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(tensors: dict[str, Any]) -> None:
        name = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
        described = json.loads(bytes(tensors[name].tolist())) | {key: value}
        tensors[name] = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)

    return spoil


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no constants": (without(f"{WEIGHT}.nested_absmax"), f"{WEIGHT}.nested_absmax is in no file; fetch"),
    "codes too short": (shorten, "bytes of codes for [32, 32]; fetch the model again"),
    "not quantized": (unpack, f"'{WEIGHT}' are not stored in 4 bits, unlike what method: qlora quantizes; use"),
    "other blocks": (restate("blocksize", 128), "has blocks of 128 and weights of 'float32'; only blocks of 64"),
    "other shape": (restate("shape", [64, 16]), f"{WEIGHT} is [64, 16] in the files, and [32, 32] in a Llama"),
    "no type": (restate("dtype", 5), "dtype is 5; expected"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_codes_that_are_not_the_class_are_refused(stored: Path, tmp_path: Path, kind: str) -> None:
    spoil, said = SPOILED[kind]
    path = shutil.copytree(stored, tmp_path / "model")
    tensors = load_file(path / FILE)
    spoil(tensors)
    save_file(tensors, path / FILE, {"format": "pt"})
    line = refusal(check_base, path)
    assert said in line and str(path) in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("bnb_4bit_use_double_quant", False, "is stored in nf4, with constants that are quantized, which config.json"),
        (
            "bnb_4bit_quant_type",
            "fp4",
            "is stored in nf4, with constants that are quantized, which config.json",
        ),
        ("load_in_4bit", False, "the weights are stored quantized ('bitsandbytes'), so that nothing trained"),
        ("bnb_4bit_quant_type", 4, "the weights are stored quantized ('bitsandbytes'), so that nothing trained"),
    ],
)
def test_config_that_states_another_quantization_is_refused(
    stored: Path, tmp_path: Path, key: str, value: Any, said: str
) -> None:
    path = shutil.copytree(stored, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"][key] = value
    (path / "config.json").write_text(json.dumps(config))
    assert said in refusal(check_base, path)


def test_a_key_that_was_left_from_another_checkpoint_is_to_be_deleted(
    stored: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Decided by the tensors, before training and before a merge."""
    path = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    left = json.loads((stored / "config.json").read_text())["quantization_config"]
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": left}))
    for check in (check_base, check_mergeable):
        assert "states 'bitsandbytes', and every tensor of the files is F32: the key was left" in refusal(check, path)
    (path / "config.json").write_text(json.dumps(config))
    check_base(path)
    check_mergeable(path)


@pytest.mark.parametrize(
    ("method", "quantizes", "asked", "said"),
    [
        ("lora", False, {}, "train.method is lora, and the base model is stored in 4 bits (nf4); set method: qlora"),
        ("qlora", True, {"type": "fp4"}, "train.quantization.type is 'fp4', and the base model is stored with 'nf4'"),
        ("qlora", True, {"type": "int8"}, "train.quantization.type is 'int8', and the base model is stored with 'nf4'"),
        (
            "qdora",
            True,
            {"double": False},
            "train.quantization.double is False, and the base model is stored with",
        ),
    ],
)
def test_method_must_be_that_of_the_stored_weights(
    method: str, quantizes: bool, asked: dict[str, Any], said: str
) -> None:
    kind = StoredQuantization("nf4", True)
    assert said in refusal(check_trainable, kind, method, quantizes, Quantization(**asked))
    check_trainable(kind, "qlora", True, Quantization())
    check_trainable(None, method, quantizes, Quantization(**asked))


def test_nothing_is_merged_into_4_bits(stored: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stored in 4 bits \(nf4\), to which nothing can be added; merge into the"):
        write_model(stored, [(tmp_path, 1.0)], tmp_path, tmp_path)
