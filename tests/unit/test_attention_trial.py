"""Whether a class's attention can be replaced: beyond the length of other rows, by its numbers, and beside towers."""

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma4Config, LlamaConfig, MistralConfig, PhimoeConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.llama.modeling_llama import LlamaAttention

from zerolora.model.architecture import built_on_meta
from zerolora.model.attention_trial import UNTOLD, tried, unknown, why_not

SMALL: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 80}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 99, "pad_token_id": 0, "head_dim": 8}


def test_a_mask_that_is_used_beyond_a_number_of_the_config_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an indexer that chooses some of more tokens, which a row of 256 tokens never shows."""
    own = LlamaAttention.forward

    def forward(self: Any, hidden_states: Any, *_: Any, attention_mask: Any = None, **named: Any) -> Any:
        if attention_mask is not None and hidden_states.shape[1] > 2048:
            attention_mask = attention_mask.clone()
        return own(self, hidden_states, attention_mask=attention_mask, **named)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    config = LlamaConfig(**SMALL, max_position_embeddings=8192)
    assert tried(config) is None
    config.index_topk = 2048
    assert tried(config) == "computes with the mask of its attention"


def test_a_window_that_a_class_has_in_its_mask_alone_shows() -> None:
    """Phi-3.5-MoE's class says that it takes flash attention, but does not pass its window on."""
    window = SMALL | {"sliding_window": 16, "max_position_embeddings": 512}
    assert why_not(PhimoeConfig(**window)) == UNTOLD
    assert why_not(PhimoeConfig(**window | {"sliding_window": None})) is None
    assert why_not(MistralConfig(**window)) is None


def test_numbers_that_the_own_attention_of_a_class_takes_change_scores() -> None:
    module = Gemma2Attention(Gemma2Config(**SMALL), 0)
    assert unknown(module, {"max_length_q": 7, "softcap": None, "use_cache": False, "position_ids": 0}) is None
    assert unknown(module, {"max_length_q": 7, "softcap": 50.0}) == "softcap"
    assert unknown(torch.nn.Linear(1, 1), {"use_cache": False, "power": 2}) == "power"  # a class without one


def test_a_tower_without_the_named_attention_keeps_its_own() -> None:
    built = built_on_meta(Gemma4Config(audio_config={"model_type": "gemma4_audio"}), "sdpa")
    assert built.config.get_text_config()._attn_implementation == "sdpa"
    assert built.config.audio_config._attn_implementation == "eager"
