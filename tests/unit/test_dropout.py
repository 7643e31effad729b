"""Dropout by gaps has the distribution and gradients of torch's."""

from typing import Any

import pytest
import torch
import transformers

from zerolora.train.module_forwards import (
    SparseDropout,
    dropped_positions,
    make_sparse,
    switch_off_dropout,
)


@pytest.mark.parametrize("probability", [0.003, 0.01, 0.3, 0.97])
def test_drops_are_equally_likely_and_independent(probability: float) -> None:
    torch.manual_seed(0)
    count = 400_000
    dropped = torch.zeros(count)
    actual = dropped_positions(count, probability)
    dropped[actual] = 1
    assert torch.equal(actual, actual.unique())
    spread = (probability * (1 - probability) / count) ** 0.5
    assert abs(dropped.mean().item() - probability) < 5 * spread
    both = (dropped[1:] * dropped[:-1]).mean().item()
    assert abs(both - probability**2) < 8 * spread * probability + 5 / count**0.5 * probability
    first, second = dropped.chunk(2)
    assert abs(first.mean() - second.mean()) < 8 * spread


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_values(count: int) -> None:
    torch.manual_seed(0)
    actual = [dropped_positions(count, 0.5).tolist() for _ in range(200)]
    assert all(index in range(count) for each in actual for index in each)
    assert {tuple(each) for each in actual} == {
        tuple(index for index in range(count) if chosen >> index & 1) for chosen in range(2**count)
    }


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_values_and_gradients_share_mask_and_scale(precision: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.rand(50, 40, dtype=torch.float32).add(1).to(precision).t().requires_grad_()
    module = SparseDropout(0.25)
    result = module(values)
    assert result.dtype == precision
    passed = result != 0
    assert 0.6 < passed.float().mean() < 0.9
    assert torch.allclose(result[passed], (values / 0.75)[passed], rtol=1e-2)
    result.backward(torch.ones_like(result))
    assert values.grad is not None
    assert torch.allclose(values.grad, passed.to(precision) / 0.75, rtol=1e-2)


def test_passes_differ_and_evaluation_drops_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    make_sparse(model)
    assert isinstance(model[1], SparseDropout)
    values = torch.rand(100, 4)
    assert not torch.equal(model(values), model(values))
    model.eval()
    assert torch.equal(model(values), model[0](values))


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30}
DROPPING: dict[str, Any] = {
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5, "n_embd": 16, "n_layer": 2, "n_head": 2,
             "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {**SMALL, "intermediate_size": 16, "attention_dropout": 0.5},
    "opt": {**SMALL, "ffn_dim": 16, "word_embed_proj_dim": 16, "dropout": 0.5, "attention_dropout": 0.5,
            "layerdrop": 0.5},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 30, "hidden_dropout": 0.5,
              "attention_dropout": 0.5},
    "gpt_neox": {**SMALL, "intermediate_size": 16, "attention_dropout": 0.5, "hidden_dropout": 0.5},
    "phi3": {**SMALL, "intermediate_size": 16, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5,
             "pad_token_id": 0},
}  # fmt: skip


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", DROPPING)
def test_nothing_of_a_model_is_dropped_where_it_is_switched_off(family: str, attention: str) -> None:
    config = transformers.AutoConfig.for_model(family, **DROPPING[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager" if family == "bloom"
                                                          else attention).train()  # fmt: skip
    ids = torch.arange(20).view(2, 10)

    def logits() -> torch.Tensor:
        return torch.as_tensor(model(input_ids=ids).logits)

    assert not torch.equal(logits(), logits())
    switch_off_dropout(model)
    expected = logits()
    assert all(torch.equal(logits(), expected) for _ in range(3))
    assert torch.allclose(model.eval()(input_ids=ids).logits, expected, atol=1e-6)
