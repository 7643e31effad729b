"""Packed rows: refused where they see each other, otherwise equal to single rows."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_plan import training_plan, zero_json
from transformers import AutoConfig, AutoModelForCausalLM

from zerolora.data.prepared_rows import IGNORED
from zerolora.errors import UserError
from zerolora.train.adapter import adapt
from zerolora.train.attention import IMPLEMENTATIONS
from zerolora.train.feed import collate
from zerolora.train.isolation import LENGTHS, check_isolation, check_length, check_loss
from zerolora.train.loop import Totals
from zerolora.train.loss import logits_of, make_chunked, make_whole, token_losses
from zerolora.train.objectives import OBJECTIVES

CPU = torch.device("cpu")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, **NO_DROPOUT}
SOUND: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4, "head_dim": 8},
    "mixtral": {},
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 8}
    | {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "gemma2": {"sliding_window": 4, "head_dim": 8},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8},
    "gpt2": GPT,
    "gpt_neox": {},
}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8, "mamba_n_groups": 1}
LEAKING: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "falcon": {"alibi": True, "new_decoder_architecture": False},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mamba": {},
    "rwkv": {"attention_hidden_size": 32},
    # These leak only through a convolution over four tokens or a state beside the attention.
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_experts": 2}
    | {"use_mamba_kernels": False},
    "falcon_h1": {**SSM, "mamba_d_ssm": 64, "head_dim": 8},
}
EAGER_ONLY = {"gemma2", "bloom", "mpt", "gpt_oss", "mamba", "rwkv"}
# Models that call the registered attention. Rows of lfm2 still meet in its convolution.
EACH_ROW = {*SOUND, "lfm2"} - EAGER_ONLY


def test_states_in_fp32_have_losses_of_a_head_in_bf16() -> None:
    """As those of Mamba, which adds up its layers in fp32."""
    config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    make_chunked(model.requires_grad_(False))
    weight = model.get_submodule("backbone.layers.0.mixer.in_proj").weight.requires_grad_(True)
    assert check_loss(model, model, CPU, "bf16")
    ids = torch.arange(12).view(1, -1)
    model(input_ids=ids, supervised=torch.arange(11), targets=ids[0, 1:]).sum().backward()
    assert weight.grad.any()


def both(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Return each architecture with each attention implementation that it supports."""
    return [(kind, attention) for kind in kinds for attention in ("flash", "sdpa", "eager") if _has(kind, attention)]


def _has(kind: str, attention: str) -> bool:
    if attention == "flash":
        return kind in EACH_ROW
    return attention == "eager" or kind not in EAGER_ONLY


def precise(cases: Iterable[tuple[str, str]]) -> list[tuple[str, str, torch.dtype]]:
    """Return the cases in each precision; fp16, finer than bf16, only for two architectures."""
    precisions = (torch.float32, torch.bfloat16)
    halves = [(*case, torch.float16) for case in cases if case[0] in ("llama", "bloom")]
    return [(*case, precision) for case in cases for precision in precisions] + halves


def build(kind: str, attention: str = "eager", precision: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | {**SOUND, **LEAKING}[kind]))
    attention = IMPLEMENTATIONS.get(attention, attention)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=precision)
    make_chunked(model)
    return model


def build_loud(kind: str, attention: str) -> Any:
    """Return a tiny model with large weights, so that every part affects the loss."""
    model = build(kind, attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


@pytest.mark.parametrize(("kind", "attention", "precision"), precise([*both(SOUND), ("opt", "flash")]))
def test_architectures_with_isolated_rows_pass(kind: str, attention: str, precision: torch.dtype) -> None:
    check_isolation(*_model_and_config(kind, attention, precision), CPU)


@pytest.mark.parametrize(("kind", "attention", "precision"), precise([*both(SOUND), ("opt", "flash")]))
def test_rows_of_any_length_have_the_losses_that_they_have_alone(
    kind: str, attention: str, precision: torch.dtype
) -> None:
    model, config = _model_and_config(kind, attention, precision)
    for packing in (False, True):
        check_length(model, config, CPU, 50, packing)


def test_chunks_that_are_counted_from_the_beginning_of_a_packed_row_are_found() -> None:
    """Rows shorter than a chunk never show them."""
    model, config = _model_and_config("llama", "flash", torch.float32)

    def chunked(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = inputs[0].clone()
        hidden[:, 16::16] = 0
        return (hidden, *inputs[1:])

    model.model.layers[1].register_forward_pre_hook(chunked)
    check_isolation(model, config, CPU)
    check_length(model, config, CPU, 50, packing=False)
    with pytest.raises(UserError, match=r"a row of 50 tokens has another loss beside one of 7 tokens than alone"):
        check_length(model, config, CPU, 50, packing=True)


@pytest.mark.parametrize(("kind", "attention", "precision"), precise(both(LEAKING)))
def test_architectures_with_leaking_rows_are_refused(kind: str, attention: str, precision: torch.dtype) -> None:
    """Random weights leak little: in bf16 less than rounding."""
    said = rf"the {kind} model with {attention} attention the (first|second) row .* sees the .*set pack.packing: off"
    with pytest.raises(UserError, match=said):
        check_isolation(*_model_and_config(kind, attention, precision), CPU)


def _model_and_config(kind: str, attention: str, precision: torch.dtype) -> tuple[Any, Any]:
    model = build(kind, attention, precision)
    return model, model.config


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_check_leaves_no_trace(kind: str) -> None:
    """Of modules' modes, random numbers and gradients, whether it passes or not."""
    model = with_adapter(build(kind)).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    next(iter(model.modules())).training = False
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    with contextlib.suppress(UserError):
        check_isolation(model, model.config, CPU)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


class Wrapped(torch.nn.Module):
    """A wrapper that passes wrong inputs for packed rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


def test_model_with_continuing_positions_is_refused() -> None:
    """Rows are isolated, but the second has other positions than alone."""

    class Shifted(Wrapped):
        def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **rest: Any) -> Any:
            length = input_ids.shape[1]
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
            if position_ids is not None:
                mask[..., LENGTHS[0] :, : LENGTHS[0]] = False
            return self.model(input_ids=input_ids, attention_mask=mask.expand(len(input_ids), -1, -1, -1), **rest)

    model = build("gpt2", "sdpa")
    with pytest.raises(UserError, match=r"has other logits in a packed row than alone.*set pack.packing: off"):
        check_isolation(Shifted(model), model.config, CPU)


def test_model_that_attends_ahead_is_refused() -> None:
    class Reversed(Wrapped):
        def forward(self, input_ids: Any, attention_mask: Any = None, **rest: Any) -> Any:
            length = input_ids.shape[1]
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu().expand(len(input_ids), -1, -1, -1)
            return self.model(input_ids=input_ids, attention_mask=mask, **rest)

    model = build("llama", "sdpa")
    with pytest.raises(UserError, match="the first row of a packed row sees the second"):
        check_isolation(Reversed(model), model.config, CPU)


def test_nondeterministic_rounding_is_no_leak() -> None:
    class Trembling(Wrapped):
        def forward(self, **inputs: Any) -> Any:
            output = self.model(**inputs)
            output.logits += 1e-6 * torch.randn(output.logits.shape)
            return output

    model = build("llama", "sdpa")
    check_isolation(Trembling(model), model.config, CPU)


def test_model_without_position_ids_is_refused() -> None:
    """As transformers does silently if a trainer passes none."""

    class Forgetful(Wrapped):
        def forward(self, position_ids: Any = None, **inputs: Any) -> Any:
            return self.model(**inputs)

    model = build("llama")
    with pytest.raises(UserError, match="the second row of a packed row sees the first"):
        check_isolation(Forgetful(model), model.config, CPU)


def rows(*lengths: int) -> list[dict[str, Any]]:
    """Return rows of random tokens; the first third of each is not supervised."""
    draw = torch.Generator().manual_seed(sum(lengths))
    result = []
    for length in lengths:
        tokens = torch.randint(64, (length,), generator=draw).tolist()
        labels = [IGNORED] * (length // 3 + 1) + tokens[length // 3 + 1 :]
        result.append({"input_ids": tokens, "labels": labels, "source": length % 2})
    return result


def with_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    return adapted


def loss_and_gradients(model: Any, micro_batches: list[Any], packing: bool) -> tuple[Any, Any, dict[str, Any]]:
    model.zero_grad()
    totals = Totals(OBJECTIVES["sft"], {"supervised token": 1}, 2, CPU)
    for packed in micro_batches:
        batch = collate(packed, packing, CPU)
        totals.add(OBJECTIVES["sft"].values(token_losses(model, batch), batch, {}))["loss"].backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad}
    return totals.loss, totals.by_source, gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "attention"),
    [*both(["llama", "qwen2", "mistral", "phi3", "gemma2", "gemma3_text", "gpt2", "gpt_neox"]), ("opt", "flash")],
)
def test_packed_batch_has_loss_and_gradients_of_single_rows(kind: str, attention: str, checkpointing: bool) -> None:
    model = with_adapter(build_loud(kind, attention)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    samples = rows(9, 14, 5, 21, 7, 3)
    packed = [samples[:2], samples[2:5], samples[5:]]  # 23, 33 and 3 tokens: two are padded
    alone = loss_and_gradients(model, [[[row]] for row in samples], packing=False)
    together = loss_and_gradients(model, [packed], packing=True)
    one_by_one = loss_and_gradients(model, [[row] for row in packed], packing=True)
    padded = loss_and_gradients(model, [[[row] for row in samples]], packing=False)
    for other in (together, one_by_one, padded):
        assert other[0] == pytest.approx(alone[0], rel=1e-5)
        assert torch.allclose(other[1], alone[1], rtol=1e-5)
        assert other[1].sum().item() == pytest.approx(alone[0], rel=1e-5)
        for name, expected in alone[2].items():
            assert torch.allclose(other[2][name], expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()), name
    assert all(gradient.any() for gradient in alone[2].values())


@pytest.mark.parametrize("kind", SOUND)
@pytest.mark.parametrize("full", [False, True])
def test_chunked_loss_equals_that_of_the_models_logits(kind: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with Gemma's capped logits, several chunks, a frozen head and full training."""
    monkeypatch.setattr("zerolora.model.spec.LEAST_CHUNK", 4)
    base = build_loud(kind, "eager").requires_grad_(full)
    assert check_loss(base, base, CPU, "fp32")
    model = base.train() if full else with_adapter(base).train()
    micro_batches = [[rows(9, 14, 5), rows(11)], [rows(3)]]
    ours = loss_and_gradients(model, micro_batches, packing=False)
    make_whole(base)
    theirs = loss_and_gradients(model, micro_batches, packing=False)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert torch.allclose(ours[1], theirs[1], rtol=1e-5)
    for name, expected in theirs[2].items():
        assert torch.allclose(ours[2][name], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()), name


@pytest.mark.parametrize("kind", ["cohere", "granite"])
def test_model_that_scales_its_logits_uses_the_unchunked_loss(kind: str) -> None:
    scale = {"cohere": {"logit_scale": 0.3}, "granite": {"logits_scaling": 3.0}}[kind]
    config = AutoConfig.for_model(kind, **(SIZES | scale | {"pad_token_id": 0}))
    model: Any = AutoModelForCausalLM.from_config(config)
    make_chunked(model.requires_grad_(False))
    assert not check_loss(model, model, CPU, "fp32")
    assert check_loss(model, model, CPU, "fp32")


@pytest.mark.parametrize(("kind", "attention"), both(SOUND))
def test_packed_tokens_have_the_loss_of_single_rows(kind: str, attention: str) -> None:
    model = build_loud(kind, attention).eval()
    samples = rows(9, 14, 5, 11)
    with torch.no_grad():
        packed = own_losses(model, [samples[:3], samples[3:]], packing=True)
        alone = torch.cat([own_losses(model, [[row]], packing=False) for row in samples])
    assert len(alone) == sum(label != IGNORED for row in samples for label in row["labels"])
    assert torch.allclose(packed, alone, rtol=1e-4, atol=1e-6)


def own_losses(model: Any, packed_rows: list[Any], packing: bool) -> torch.Tensor:
    batch = collate(packed_rows, packing, CPU)
    logits = logits_of(model, batch).flatten(0, 1)[batch["supervised"]]
    return torch.nn.functional.cross_entropy(logits, batch["targets"], reduction="none")


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_unsupported_attention_is_one_line(kind: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path)
    plan = training_plan(attention="sdpa", engine="deepspeed")
    with pytest.raises(UserError, match="train.attention is sdpa, which this model does not have.*attention: eager"):
        adapt(tmp_path, plan, zero_json(plan, stage=0), CPU)


def test_first_token_of_a_row_is_never_a_target() -> None:
    """The token before it belongs to another row."""
    samples = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "source": 0}] * 3
    batch = collate([samples], True, CPU)
    assert batch["targets"].tolist() == [2, 3] * 3
    assert batch["supervised"].tolist() == [0, 1, 3, 4, 6, 7]
