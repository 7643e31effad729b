"""Router telemetry is what transformers' auxiliary loss is computed from."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from zerolora.model.architecture import auto_class
from zerolora.train.telemetry.routers import Routers

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": 64, "moe_intermediate_size": 16, "pad_token_id": 0}
SIZES |= {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
SIZES |= {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
LENGTHS = (7, 12, 3, 9)
LONGEST = max(LENGTHS)

DBRX: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "pad_token_id": 0}
DBRX |= {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 1e4}}
DBRX |= {"ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}}
LATENT = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | (LATENT if family == "deepseek_v3" else {})
    sizes = (DBRX if family == "dbrx" else sizes) | {"attn_implementation": "eager"}
    config = CONFIG_MAPPING[family](**sizes)
    return auto_class(config).from_config(config)


def batch_of(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 64, (len(LENGTHS), LONGEST), generator=torch.Generator().manual_seed(1))
    first = LENGTHS.index(lengths[0])
    real = torch.arange(LONGEST) < torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": tokens[first : first + len(lengths)], "attention_mask": real.long()}


def watch(routers: Routers, model: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    """Run a forward pass as in training and return its logits."""
    packed = [[{"input_ids": [1] * length}] for length in lengths]
    batch = batch_of(lengths)
    with routers.watched(packed, batch, True):
        logits: torch.Tensor = model(**batch, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "dbrx"])
def test_auxiliary_loss_matches_transformers(family: str) -> None:
    """Over all tokens, however divided among ranks, without padding."""
    model = model_of(family)
    before = model(**batch_of(LENGTHS), use_cache=False).logits
    expected = model(**batch_of(LENGTHS), output_router_logits=True, use_cache=False).aux_loss.item()
    whole, parts = Routers(model), torch.zeros(0)
    assert torch.equal(watch(whole, model, LENGTHS), before)
    whole.take(whole.sums())
    assert whole.figures()["router_aux_loss"] == pytest.approx(expected, rel=1e-6)
    ranks = Routers(model)
    for lengths in (LENGTHS[:1], LENGTHS[1:]):
        watch(ranks, model, lengths)
        sums = ranks.sums()
        parts = parts + sums if len(parts) else sums
    ranks.take(parts)
    assert ranks.figures() == pytest.approx(whole.figures(), rel=1e-6)


def test_load_counts_chosen_experts() -> None:
    """DeepSeek-V3 adds a bias to the scores, not to the logits; here all tokens choose the same experts."""
    model = model_of("deepseek_v3")
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    routers = Routers(model)
    watch(routers, model, LENGTHS)
    routers.take(routers.sums())
    assert routers.figures() == {"router_imbalance": 2.0, "router_idle_share": 0.5}


def test_recomputation_is_not_counted() -> None:
    model = model_of("mixtral")
    plain, again = Routers(model), Routers(model)
    watch(plain, model, LENGTHS)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    watch(again, model, LENGTHS).sum().backward()
    model(**batch_of(LENGTHS), use_cache=False)  # as validation does
    assert torch.equal(again.sums(), plain.sums())


def test_model_without_experts_has_no_columns() -> None:
    routers = Routers(model_of("llama"))
    assert routers.columns == ()
    assert len(routers.sums()) == 0
    routers.take(routers.sums())
    assert routers.figures() == {}
