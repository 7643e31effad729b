"""PiSSA and OLoRA: factors, residual weights and the published adapter."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ROOT, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolora.config.method_sections import MethodSections
from zerolora.methods.lora_init import doubled, first_factors, is_start, published, residual
from zerolora.methods.registry import TRAINABLE
from zerolora.model.read_spec import read_model_spec

GPT2 = ROOT / "config/recipes/models/gpt2.json"
INITS = ("pissa", "pissa_niter_8", "olora")


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("transposed", [False, True])
def test_factors_and_residual_sum_to_the_weight(init: str, transposed: bool) -> None:
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    first, second = first_factors(weight, 4, 2.0, init)
    assert (first.shape, second.shape) == ((4, 16), (24, 4))
    left = residual(weight.T if transposed else weight, first, second, 2.0, transposed)
    torch.testing.assert_close((left.T if transposed else left) + 2.0 * second @ first, weight)


def test_pissa_takes_the_largest_singular_values() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 4, generator=generator) @ torch.randn(4, 16, generator=generator)
    weight += 0.01 * torch.randn(24, 16, generator=generator)
    values = torch.linalg.svdvals(weight)
    for init in ("pissa", "pissa_niter_8"):
        left = residual(weight, *first_factors(weight, 4, 0.5, init), 0.5, transposed=False)
        torch.testing.assert_close(torch.linalg.svdvals(left)[:12], values[4:], rtol=1e-3, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(r=st.integers(1, 6), alpha=st.floats(0.5, 64), stabilized=st.booleans(), seed=st.integers(0, 99))
def test_published_adapter_is_the_change_in_training(r: int, alpha: float, stabilized: bool, seed: int) -> None:
    """With the scale of peft's config. Unchanged factors count as untrained."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"m.lora_A.weight": (r, 8), "m.lora_B.weight": (12, r)}
    start = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    trained = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    trained["saved.weight"] = torch.ones(3)
    before = {"r": r, "lora_alpha": alpha, "use_rslora": stabilized, "rank_pattern": {}, "alpha_pattern": {}}
    after = doubled(before)
    actual = published(trained, start)

    def scale(config: dict[str, Any]) -> float:
        return float(config["lora_alpha"] / (math.sqrt(config["r"]) if stabilized else config["r"]))

    def product(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["m.lora_B.weight"] @ tensors["m.lora_A.weight"]

    expected = scale(before) * (product(trained) - product(start))
    torch.testing.assert_close(scale(after) * product(actual), expected, rtol=1e-4, atol=1e-4)
    assert actual["saved.weight"] is trained["saved.weight"]
    assert not is_start(actual["m.lora_B.weight"])
    assert is_start(published(start, start)["m.lora_B.weight"])


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"targets": ["wte"]}, "wte is an embedding, whose factors have no other start; leave it out"),
        ({"r": 1000}, "has 768 singular values, fewer than r 1000; use an r of at most 768, or init: default"),
    ],
)
def test_unsupported_targets_and_ranks_are_refused(lora: dict[str, Any], said: str) -> None:
    sections = MethodSections.model_validate({"lora": {"init": "pissa"} | lora})
    line = refusal(TRAINABLE["lora"].of(sections).parameters, replace(read_model_spec(GPT2), tied=False), 4)
    assert said in line and line.startswith("train.lora.init is pissa, and ")
