"""Which GPUs and heads have a fused kernel, and the memory of attention without one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.memory.trace import Live
from zerolora.memory.layer import Layer
from zerolora.memory.predict import predict
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.lora import LoraMethod
from zerolora.model.attention_kernels import computes_scores, has_flash
from zerolora.model.projections import NOTHING, ForwardSpec
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import ModelSpec
from zerolora.model.tracer import Parameter, Value
from zerolora.train import attention
from zerolora.types import Attention, Precision

MODELS = ROOT / "config/recipes/models"
LLAMA_2 = read_model_spec(MODELS / "llama-2-7b.json")  # as many heads of keys as of queries
LLAMA_3 = read_model_spec(MODELS / "llama-3-8b.json")  # a quarter
T4, A100 = 7.5, 8.0
LENGTH = 4096
SCORES = 4 * LLAMA_3.heads * LENGTH**2  # bytes of all scores of a row, in fp32


def total(model: ModelSpec, kind: Attention, capability: float, precision: Precision, masked: bool) -> int:
    spec = TrainingSpec(
        *("zero3", LoraMethod(), 1, 8, 1, 1, LENGTH, True, kind, precision, masked, "fused"), capability=capability
    )
    return int(predict(model, spec).gpu["total"])


@pytest.mark.parametrize(
    ("model", "kind", "capability", "precision", "masked", "scores"),
    [
        (LLAMA_3, "sdpa", A100, "fp16", False, False),
        (LLAMA_3, "sdpa", T4, "fp16", False, True),
        (LLAMA_3, "sdpa", A100, "fp32", False, True),
        (LLAMA_3, "sdpa", T4, "fp16", True, False),  # repeated for the mask
        (LLAMA_2, "sdpa", T4, "fp16", False, False),
        (LLAMA_3, "flash", T4, "fp16", False, False),
        (LLAMA_3, "flash", A100, "fp32", True, False),
        (LLAMA_3, "eager", A100, "fp16", True, True),
    ],
)
def test_scores_are_counted_where_no_kernel_takes_the_heads(
    model: ModelSpec, kind: Attention, capability: float, precision: Precision, masked: bool, scores: bool
) -> None:
    fused = total(model, kind if kind != "eager" else "flash", A100, "fp16" if precision == "fp16" else precision, True)
    more = total(model, kind, capability, precision, masked) - fused
    assert (more > SCORES) == scores
    assert computes_scores(model, kind, capability, precision != "fp32", masked and kind == "sdpa") == scores


def test_heads_beyond_those_of_flash_attention_have_no_flash() -> None:
    wide = replace(LLAMA_3, head_dim=320)
    assert has_flash(LLAMA_3, "flash", A100, True, False) and not has_flash(wide, "flash", A100, True, False)
    assert computes_scores(wide, "sdpa", A100, True, False)
    latent = replace(LLAMA_2, latent=(128, 64, 128))
    assert has_flash(latent, "flash", A100, True, False) and not has_flash(latent, "sdpa", A100, True, False)


def traced(heads: int, key_heads: int, length: int, width: int) -> tuple[int, int]:
    """Return the bytes that the estimate counts after the fallback's forward pass, and at the peak of its backward."""
    model = replace(LLAMA_2, heads=heads, key_heads=key_heads, head_dim=64)
    step = ForwardSpec(1, length, width, "sdpa", False, False, "full", length)
    layer = Layer(model, step, NOTHING)
    values = []
    for each in (heads, key_heads, key_heads):
        count = each * length * 64
        weight = Parameter(layer.tracer, count, width, 1.0)
        values.append(Value(layer.tracer.new(count, width).storage, count, width, weight))
    query, key, value = values
    result = layer.unfused(query, key, value, None, heads / key_heads)
    after = layer.tracer.live
    layer.tracer.restart()
    layer.tracer.backward(result, layer.tracer.new(result.count, width))
    return after, layer.tracer.peak


def actual(heads: int, key_heads: int, length: int, kind: torch.dtype) -> tuple[int, int]:
    """Return the same bytes of torch's fallback."""
    with Live() as live:
        query, key, value = (
            torch.zeros(1, each, length, 64, dtype=kind, requires_grad=True) for each in (heads, key_heads, key_heads)
        )
        with sdpa_kernel(SDPBackend.MATH):
            result = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=heads != key_heads
            )
        after = live.now
        live.restart()
        result.backward(torch.zeros_like(result))
        return after, live.peak


@pytest.mark.parametrize(("kind", "width"), [(torch.float16, 2), (torch.float32, 4)])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_fallback_takes_the_traced_memory(kind: torch.dtype, width: int, key_heads: int) -> None:
    """Within 3 % of torch's own fallback, which also has one mask for all heads."""
    counted, real = traced(8, key_heads, 512, width), actual(8, key_heads, 512, kind)
    for one, other in zip(counted, real, strict=True):
        assert one == pytest.approx(other, rel=0.03)


@pytest.mark.parametrize(("capability", "kind", "repeated"), [(T4, torch.float16, True), (A100, torch.float16, False)])
def test_flash_repeats_heads_where_no_kernel_takes_groups(
    capability: float, kind: torch.dtype, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pretended GPU of that capability, whose attention the CPU computes."""
    monkeypatch.setattr(attention, "on_gpu", lambda device: True)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda: False)
    monkeypatch.setattr(attention, "is_short", lambda *_: False)
    monkeypatch.setattr(attention, "lengths", attention.Lengths())  # another test may have left some
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(round(10 * capability), 10))
    heads: list[int] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def seen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        heads.append(key.shape[1])
        return own(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, each, 8, 16).to(kind) for each in (4, 2, 2))
    attended, _ = attention.each_row(torch.nn.Module(), query, key, value, None)
    assert heads == [4 if repeated else 2]
    expected = own(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(attended, expected, atol=1e-3)
