"""Modules that mix the rows of a packed row: found on the model, and computed row by row.

Each family takes a second.
"""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import ROOT
from test_expert_targets import LORA, config_of, settings
from test_isolation import CPU, build, loss_and_gradients, rows
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from zerolora.errors import UserError
from zerolora.train.attention import IMPLEMENTATIONS, lengths
from zerolora.train.feed import padding
from zerolora.train.isolation import check_isolation, check_length, check_loss, isolate
from zerolora.train.loss import make_chunked
from zerolora.train.mixing_modules import PackedTrial
from zerolora.train.module_forwards import switch_off_dropout

SIZES = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 80, "pad_token_id": 0}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
BOTH_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
HYBRIDS: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": (MAMBA | {"attn_layer_indices": [1]}, "model.layers.0.mamba"),
    "falcon_h1": (MAMBA | {"mamba_d_ssm": 96}, "model.layers.0.mamba"),
    "granitemoehybrid": (
        MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
        "model.layers.0.mamba",
    ),
    "jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2},
        "model.layers.0.mamba",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "model.layers.0.conv"),
    "minimax": (
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
        "model.layers.0.self_attn",
    ),
    "nemotron_h": ({}, "model.layers.0.mixer"),
    "olmo_hybrid": (LINEAR | BOTH_KINDS, "model.layers.0.linear_attn"),
    "qwen3_5_text": (LINEAR | BOTH_KINDS, "model.layers.0.linear_attn"),
    "qwen3_next": (
        LINEAR | BOTH_KINDS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "model.layers.0.linear_attn",
    ),
    "recurrent_gemma": (
        {"lru_width": 48, "block_types": ["recurrent", "attention"], "attention_window_size": 16},
        "model.layers.0.temporal_block",
    ),
}
"""Keys of a tiny config of models with layers of two kinds, and the first module that mixes rows."""
OWN_ATTENTION = {
    "bloom": ("eager", "transformer.h.0.self_attention"),
    "mpt": ("eager", "transformer.blocks.0.attn"),
    "opt": ("sdpa", "model.decoder.layers.0.self_attn"),
    "falcon": ("sdpa", "transformer.h.0.self_attention"),
    "gpt_oss": ("eager", "model.layers.0.self_attn"),
    "rwkv": ("eager", "rwkv.blocks.0.attention"),
}
"""Attention whose mask knows nothing of rows, and the first module with it."""


class Engine:
    """What isolate asks of an engine, beside its module."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gathered: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def gather_for_rows(self, paths: list[str]) -> None:
        self.gathered = paths


def of(kind: str, attention: str) -> Any:
    """Return peft's model around a tiny hybrid, all of whose parts affect the loss."""
    keys, _ = HYBRIDS[kind]
    config = CONFIG_MAPPING[kind].from_dict(SIZES | keys if keys else config_of(kind) | {"vocab_size": 64})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=IMPLEMENTATIONS.get(attention, attention), dtype=torch.float32
    )
    make_chunked(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    adapted = LORA.build(model, settings())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    switch_off_dropout(adapted)
    check_loss(adapted, model, CPU, "fp32")
    return adapted


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_packed_hybrids_have_the_gradients_of_single_rows(kind: str, checkpointing: bool) -> None:
    model = of(kind, "flash")
    base = model.get_base_model()
    with pytest.raises(UserError, match=r"the second row of a packed row sees the first"):
        check_isolation(model, base.config, CPU)
    assert isolate(Engine(model), base, CPU)[0] == HYBRIDS[kind][1]
    check_length(model, base.config, CPU, 50, packing=True)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    samples = rows(9, 14, 5, 21, 7, 3)
    alone = loss_and_gradients(model, [[[row]] for row in samples], packing=False)
    together = loss_and_gradients(model, [[samples[:2], samples[2:5], samples[5:]]], packing=True)
    assert together[0] == pytest.approx(alone[0], rel=1e-5)
    difference = sum((together[2][name] - each).square().sum() for name, each in alone[2].items()) ** 0.5
    assert difference / sum(each.square().sum() for each in alone[2].values()) ** 0.5 <= 1e-6


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_attention_without_a_mask_of_rows_is_computed_row_by_row(kind: str) -> None:
    attention, path = OWN_ATTENTION[kind]
    model = build(kind, attention)
    engine = Engine(model)
    found = isolate(engine, model, CPU)
    assert path in found
    assert engine.gathered == found
    check_length(model, model.config, CPU, 50, packing=True)


def test_isolated_rows_need_nothing() -> None:
    model = build("llama", "sdpa")
    engine = Engine(model)
    assert isolate(engine, model, CPU) == []
    assert engine.gathered == []


def test_a_pass_that_has_set_no_rows_is_as_ever() -> None:
    """As in generation."""
    model = build("lfm2", "eager").eval()
    tokens = torch.arange(12)[None]
    before = model(input_ids=tokens).logits
    isolate(Engine(model), model, CPU)
    lengths.set(None)
    assert torch.equal(model(input_ids=tokens).logits, before)


def test_an_input_that_the_trial_has_not_seen_is_refused() -> None:
    """Which of its dimensions are tokens is not known."""
    model = build("lfm2", "eager").eval()
    isolate(Engine(model), model, CPU)
    lengths.set([[5, 7]])
    hidden = torch.randn(1, 12, model.config.hidden_size)
    with pytest.raises(UserError, match=r"model.layers.0.conv mixes the rows .* cannot be divided into rows"):
        model.model.layers[0].conv(hidden, torch.ones(1, 12))


def test_a_row_with_padding_of_its_own_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the row alone, under train.compile."""
    monkeypatch.setattr(padding, "step", 64)
    model = build("lfm2", "flash")
    assert isolate(Engine(model), model, CPU) == ["model.layers.0.conv"]


@pytest.mark.parametrize("step", [1, 64])
def test_the_trial_has_a_size_that_no_dimension_has(step: int) -> None:
    model = build("llama", "eager")
    model.config.max_position_embeddings = 17
    trial = PackedTrial.of(model, step)
    assert trial.tokens not in (17, 32, 48, 64)
    assert trial.tokens % step == 0
    assert trial.places(torch.empty(trial.packed_rows, 4, trial.tokens)).tokens == (2,)  # type: ignore[union-attr]
    assert trial.places(torch.empty(trial.packed_rows, 4, 8)) is None


def test_kernels_that_keep_rows_apart_get_their_boundaries() -> None:
    """With packages that transformers looks for when it is imported, so in a process of its own: six seconds."""
    paths = os.pathsep.join([str(ROOT / "tests/row_kernels"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, ROOT / "tests/row_kernels/compared.py"],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["[] [] True True True"], done.stderr[-3000:]
