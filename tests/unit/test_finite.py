"""Finite weights in, finite weights out: a merge names the tensor that is not, and writes nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refusal
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from zerolora.float_bits import is_finite, is_infinite
from zerolora.merge import finite
from zerolora.merge.merge import merge
from zerolora.tensor_file import read_header

KINDS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
UNTOUCHED = "model.layers.1.mlp.up_proj.weight"


@given(st.sampled_from([*KINDS]), st.binary(min_size=8, max_size=160))
def test_any_bits_are_judged_as_by_torch(kind: str, bits: bytes) -> None:
    whole = bits[: len(bits) // 8 * 8]
    tensor = torch.frombuffer(bytearray(whole), dtype=KINDS[kind])
    assert is_finite(memoryview(whole), kind) == bool(torch.isfinite(tensor).all())
    assert is_infinite(memoryview(whole), kind) == bool(torch.isinf(tensor).all())


def adapter_of_q_proj(model: Path, folder: Path, size: float) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.fill_(size)
    wrapped.save_pretrained(str(folder))
    return folder


def base_of(model: Path, folder: Path, dtype: torch.dtype, **changes: torch.Tensor) -> Path:
    shutil.copytree(model, folder)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | changes, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("place", [0, 1500, -1])
def test_a_weight_of_the_base_that_is_not_finite_is_named(
    kind: str, value: str, place: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the adapter does not touch, wherever blocks end."""
    monkeypatch.setattr(finite, "READ", 1000)
    weight = load_file(tiny_model / "model.safetensors")[UNTOUCHED].to(KINDS[kind])
    weight.view(-1)[place] = float(value)
    base = base_of(tiny_model, tmp_path / "base", KINDS[kind], **{UNTOUCHED: weight})
    adapter = adapter_of_q_proj(tiny_model, tmp_path / "adapter", 0.1)
    line = refusal(merge, base, adapter, tmp_path / "merged", tmp_path / "merged")
    assert f"model.safetensors: {UNTOUCHED} has NaN or infinity" in line
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_limit_may_be_infinite(kind: str, value: str, tmp_path: Path) -> None:
    save_file({"input_max": torch.tensor(float(value), dtype=KINDS[kind])}, tmp_path / "model.safetensors")
    (limit,) = read_header(tmp_path / "model.safetensors").tensors.values()
    if value == "nan":
        assert "input_max has NaN" in refusal(finite.check_stored, [limit], limit.start, limit.stop)
    else:
        finite.check_stored([limit], limit.start, limit.stop)


def test_a_sum_that_overflows_is_named(tiny_model: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = load_file(tiny_model / "model.safetensors")[name].half()
    weight[-1, -1] = 65000
    base = base_of(tiny_model, tmp_path / "base", torch.float16, **{name: weight})
    adapter = adapter_of_q_proj(tiny_model, tmp_path / "adapter", 30.0)
    line = refusal(merge, base, adapter, tmp_path / "merged", tmp_path / "merged")
    assert f"{name} with the adapter added has numbers that are not finite in F16" in line
    assert not (tmp_path / "merged").exists()


def test_a_tensor_that_the_model_does_not_read_may_be_infinite(tiny_model: Path, tmp_path: Path) -> None:
    """As the mask that older checkpoints have, which is minus infinity in 16 bits."""
    mask = {"model.layers.0.self_attn.masked_bias": torch.tensor(-1e9).half()}
    base = base_of(tiny_model, tmp_path / "base", torch.float16, **mask)
    adapter = adapter_of_q_proj(tiny_model, tmp_path / "adapter", 0.1)
    merge(base, adapter, tmp_path / "merged", tmp_path / "merged")
    merged: dict[str, Any] = load_file(tmp_path / "merged/model.safetensors")
    assert all(tensor.isfinite().all() for name, tensor in merged.items() if name not in mask)
    assert merged.keys() >= mask.keys()
