"""Packed rows: refused where they would see each other, and equal to the rows by themselves everywhere else."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerolora.data.rows import IGNORED
from zerolora.errors import UserError
from zerolora.train.batch import collate, loss_sum
from zerolora.train.isolation import check_isolation

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, **NO_DROPOUT}
SOUND: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4, "head_dim": 8},
    "mixtral": {},
    "phi3": {"pad_token_id": 0},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8},
    "gpt2": GPT,
    "gpt_neox": {},
}
LEAKING: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "mamba": {},
}


def build(kind: str, attention: str = "eager") -> Any:
    """Return a tiny model of a real architecture, with weights large enough that what leaks shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | {**SOUND, **LEAKING}[kind]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", SOUND)
def test_architectures_that_keep_packed_rows_apart_pass(kind: str, attention: str) -> None:
    model = build(kind, attention).train()
    before = torch.get_rng_state()
    check_isolation(model, model.config, CPU)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", LEAKING)
def test_architectures_whose_packed_rows_see_each_other_are_refused(kind: str) -> None:
    model = build(kind)
    with pytest.raises(UserError, match=rf"the {kind} model with eager attention.*write packing: off"):
        check_isolation(model, model.config, CPU)


def test_a_model_that_is_handed_no_positions_is_refused() -> None:
    """What transformers itself does when a trainer forgets them: the rows see each other, and nothing fails."""
    model = build("llama")

    class Forgetful(torch.nn.Module):
        def forward(self, position_ids: Any, **inputs: Any) -> Any:
            return model(**inputs)

    with pytest.raises(UserError, match="see each other"):
        check_isolation(Forgetful(), model.config, CPU)


def rows(*lengths: int) -> list[dict[str, Any]]:
    """Return rows of random tokens; the first third of each is not learned."""
    draw = torch.Generator().manual_seed(sum(lengths))
    result = []
    for length in lengths:
        tokens = torch.randint(64, (length,), generator=draw).tolist()
        labels = [IGNORED] * (length // 3 + 1) + tokens[length // 3 + 1 :]
        result.append({"input_ids": tokens, "labels": labels, "source": length % 2})
    return result


def with_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = "all-linear"
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    return adapted


def loss_and_gradients(model: Any, micro_batches: list[Any], packing: bool) -> tuple[Any, Any, dict[str, Any]]:
    model.zero_grad()
    total, by_source = 0.0, torch.zeros(2)
    for packed in micro_batches:
        loss, parts = loss_sum(model, collate(packed, packing, CPU), 2)
        loss.backward()
        total += loss.item()
        by_source += parts
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad}
    return total, by_source, gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "phi3", "gemma3_text", "gpt2"])
def test_a_packed_batch_has_loss_and_gradients_of_its_rows_alone(
    kind: str, attention: str, checkpointing: bool
) -> None:
    model = with_adapter(build(kind, attention)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    samples = rows(9, 14, 5, 21, 7, 3)
    packed = [samples[:2], samples[2:5], samples[5:]]  # of 23, 33 and 3 tokens: two of them are padded
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


def test_each_token_of_a_packed_row_has_the_loss_it_has_alone() -> None:
    model = build("llama", "sdpa")
    samples = rows(9, 14, 5)
    batch = collate([samples], True, CPU)
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0] for row in samples]
    assert torch.allclose(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_no_rows_first_token_is_a_target() -> None:
    """Even of rows whose every token is learned: the token before it belongs to another row."""
    samples = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "source": 0}] * 3
    assert collate([samples], True, CPU)["labels"].tolist() == [[IGNORED, 2, 3] * 3]
