"""Added tokens: their rows in any model, the forward pass with them, and their estimate."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
)

from zerolora.config.method_sections import MethodSections
from zerolora.errors import UserError
from zerolora.methods.lora import LoraMethod
from zerolora.model.added_tokens import AddedToken, add_rows, extend, extend_again
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import with_rows
from zerolora.train.loss import make_chunked, token_losses
from zerolora.train.module_forwards import train_rows

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
MODELS = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "own head": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "scaled embedding": Gemma3TextConfig(**SIZES),
    "softcap": Gemma2Config(**SIZES, final_logit_softcapping=3.0),
    "gpt2": GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2),
}
TOKENS = [AddedToken("<a>", 58, True), AddedToken("<b>", 61, True), AddedToken("<c>", 62, False)]
"""58 has a spare row; 60 is a token of the tokenizer without a row in the model."""
ROWS = [58, 60, 61, 62]


def model_of(name: str) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).eval()


def built(name: str, ours: bool) -> Any:
    model = model_of(name)
    rows = add_rows(model, TOKENS)
    assert rows == ROWS
    if ours:
        make_chunked(model)
    torch.manual_seed(2)
    model = LoraMethod.build(model, MethodSections.model_validate({"lora": {"r": 2}}), rows)
    if ours:
        train_rows(model)
    with torch.no_grad():  # away from the base
        for key, parameter in model.named_parameters():
            if "trainable_tokens" in key or "lora_B" in key:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_equal_pefts(name: str) -> None:
    ids = torch.tensor([[5, 58, 7, 62, 60, 61, 9, 58]])
    batch = {"input_ids": ids, "lengths": [ids.shape[1]], "supervised": torch.arange(7), "targets": ids[0, 1:]}
    weights = torch.arange(1.0, 8.0)  # distinct gradients
    theirs, ours = built(name, False), built(name, True)
    logits = theirs(input_ids=ids).logits
    torch.testing.assert_close(ours(input_ids=ids).logits, logits)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    actual = token_losses(ours, batch)
    torch.testing.assert_close(actual, expected)
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    trained = {key: each for key, each in theirs.named_parameters() if each.requires_grad}
    assert sum("trainable_tokens" in key for key in trained) == (2 if name == "own head" else 1)
    for key, each in ours.named_parameters():
        assert each.requires_grad == (key in trained)
        if key in trained:
            torch.testing.assert_close(each.grad, trained[key].grad, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_new_rows_start_as_the_mean_of_the_others(name: str) -> None:
    before, model = model_of(name).get_input_embeddings().weight.detach(), model_of(name)
    assert add_rows(model, TOKENS) == ROWS
    mean = before[:58].mean(0)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert len(module.weight) == 63 == model.config.vocab_size
        if name != "own head":
            torch.testing.assert_close(module.weight[ROWS], mean.expand(4, -1))
    others = [number for number in range(60) if number != 58]
    assert torch.equal(model.get_input_embeddings().weight[others], before[others])
    assert add_rows(model_of(name), []) == []


def test_a_head_with_a_bias_is_refused() -> None:
    config = GPTJConfig(vocab_size=60, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="this model's head has a bias"):
        LoraMethod.build(model, MethodSections(), add_rows(model, TOKENS))


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({"targets": ["q_proj", "embed_tokens"]}, "train.lora.targets: model.embed_tokens"),
        ({"targets": ["q_proj", "lm_head"]}, "train.lora.targets: lm_head"),
        ({"modules_to_save": ["embed_tokens"]}, "train.lora.modules_to_save: model.embed_tokens"),
    ],
)
def test_build_and_estimate_refuse_to_train_a_row_twice(lora: dict[str, Any], key: str, tmp_path: Path) -> None:
    sections = MethodSections.model_validate({"lora": lora})
    model = model_of("own head")
    rows = add_rows(model, TOKENS)
    with pytest.raises(UserError, match=f"{key} would be trained twice"):
        LoraMethod.build(model, sections, rows)
    model.config.save_pretrained(tmp_path)
    method = LoraMethod(**{**vars(LoraMethod.of(sections)), "added_tokens": 4})
    with pytest.raises(UserError, match=f"{key} would be trained twice"):
        method.parameters(read_model_spec(tmp_path), 4)


@pytest.mark.parametrize("name", ["tied", "own head", "gpt2"])
def test_estimate_counts_the_trained_parameters(name: str, tmp_path: Path) -> None:
    MODELS[name].save_pretrained(tmp_path)
    model = model_of(name)
    tokens = [AddedToken(f"<{number}>", number, True) for number in range(60, 63)]
    rows = add_rows(model, tokens)
    total = sum(each.numel() for each in model.parameters())
    wrapped = LoraMethod.build(model, MethodSections.model_validate({"lora": {"r": 2}}), rows)
    trained = [each for each in wrapped.parameters() if each.requires_grad]
    counted = LoraMethod(r=2, added_tokens=3).parameters(with_rows(read_model_spec(tmp_path), 3), 4)
    assert (counted.frozen, counted.trained) == (total, sum(each.numel() for each in trained))
    assert counted.factored == sum(sum(each.shape) for each in trained)


def test_extending_a_tokenizer_is_reproducible(tiny_model: Path) -> None:
    one, other = (AutoTokenizer.from_pretrained(tiny_model) for _ in range(2))
    tokens = extend(one, ["<x>", "<y>"], ["<z>"])
    assert [(each.token, each.id, each.special) for each in tokens] == [
        ("<x>", 259, True),
        ("<y>", 260, True),
        ("<z>", 261, False),
    ]
    extend_again(other, tokens)
    extend_again(other, tokens)  # no change, as for a merged model
    for tokenizer in (one, other):
        assert tokenizer("a<x><z>")["input_ids"][-2:] == [259, 261]
        assert tokenizer.decode([259, 261], skip_special_tokens=True) == "<z>"
    with pytest.raises(UserError, match="'<x>' is token 9 of the prepared data, and 259 of this model's"):
        extend_again(other, [AddedToken("<x>", 9, True)])


@pytest.mark.parametrize(("token", "number"), [("<|im_end|>", 2), ("a", 67)])
def test_existing_token_is_refused(token: str, number: int, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(UserError, match=r"add_tokens: '.*' is token \d+ of the model's own tokenizer; leave it out"):
        extend(tokenizer, [], [token])
    with pytest.raises(UserError, match="add_special_tokens: "):
        extend(tokenizer, [token], [])
