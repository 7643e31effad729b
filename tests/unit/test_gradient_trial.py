"""The trial on shapes that finds trained parameters without a gradient, and leaving them out."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from zerolora.config.method_sections import Lora, MethodSections
from zerolora.methods.peft_format import read_alike
from zerolora.methods.registry import TRAINABLE
from zerolora.methods.without_gradient import expressions, leave_out, modules_with, of_any_expert
from zerolora.model.architecture import built_on_meta
from zerolora.probe.gradient_trial import without_gradient

TEXT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
INDEXED = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
INDEXED |= {"n_routed_experts": 4, "head_dim": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
INDEXED |= {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
FOUND = {
    "llama": (TEXT, set()),
    "qwen3_moe": (TEXT | EXPERTS | {"head_dim": 8}, set()),
    "gpt_oss": (TEXT | EXPERTS | {"head_dim": 8}, set()),
    "deepseek_v32": (TEXT | EXPERTS | INDEXED, {"indexer.wq_b", "indexer.wk", "indexer.weights_proj"}),
    "glm_moe_dsa": (TEXT | EXPERTS | INDEXED, {"indexer.wq_b", "indexer.wk", "indexer.weights_proj"}),
    "laguna": (TEXT | EXPERTS | {"head_dim": 8}, set()),
    "llama4_text": (TEXT | EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 48}, set()),
    "phimoe": (TEXT | EXPERTS, set()),
    "jamba": (
        TEXT
        | {"num_experts": 8, "num_experts_per_tok": 1, "num_hidden_layers": 8, "mamba_d_state": 4, "mamba_dt_rank": 4},
        set(),
    ),
}


def adapted(family: str, device: str = "meta", **lora: Any) -> Any:
    """Return the tiny model of a family with an adapter."""
    config = CONFIG_MAPPING[family](**FOUND[family][0])
    if device == "meta":
        model = built_on_meta(config, "eager")
    else:
        torch.manual_seed(0)
        from zerolora.model.architecture import auto_class

        model = auto_class(config).from_config(config, attn_implementation="eager")
    with torch.device(device):
        return TRAINABLE["lora"].build(model, MethodSections(lora=Lora(**lora)))


@pytest.mark.parametrize("family", FOUND)
def test_what_shapes_show_is_what_values_show(family: str) -> None:
    """The real backward pass of a real model of the same config is the judge."""
    on_shapes, real = adapted(family), adapted(family, "cpu")
    real(input_ids=torch.arange(3, 60)[None], use_cache=False).logits.float().sum().backward()
    expected = [name for name, each in real.named_parameters() if each.requires_grad and each.grad is None]
    names = without_gradient(on_shapes)
    assert names == expected
    parameters = dict(on_shapes.named_parameters())
    unreached, every = modules_with(on_shapes, (parameters[name] for name in names))
    ends = {re.sub(r".*layers\.\d+\.(self_attn|mamba)\.", "", path) for path in unreached}
    assert ends == FOUND[family][1]
    assert len(every) > len(unreached)


def test_without_their_adapters_every_parameter_gets_a_gradient() -> None:
    model = adapted("deepseek_v32")
    parameters = dict(model.named_parameters())
    unreached, every = modules_with(model, (parameters[name] for name in without_gradient(model)))
    left_out = expressions(unreached, every)
    assert left_out == [rf"model\.layers\.\d+\.self_attn\.indexer\.{name}" for name in ("wq_b", "wk", "weights_proj")]
    real = adapted("deepseek_v32", "cpu")
    leave_out(real, left_out)
    assert modules_with(real, ())[1] == [path for path in every if path not in unreached]
    real(input_ids=torch.arange(3, 60)[None], use_cache=False).logits.float().sum().backward()
    assert all(each.grad is not None for each in real.parameters() if each.requires_grad)
    # peft builds the same from its config.
    again = adapted("deepseek_v32", "cpu")
    config = read_alike(real)
    from peft import get_peft_model

    rebuilt = get_peft_model(again.unload(), config)
    assert modules_with(rebuilt, ())[1] == modules_with(real, ())[1]


PATHS = st.builds("model.layers.{}.{}.{}".format, st.integers(0, 12), st.sampled_from("ab"), st.sampled_from("xyz"))


@given(st.sets(PATHS, min_size=1), st.data())
def test_expressions_match_exactly_these_paths(every: set[str], data: st.DataObject) -> None:
    ordered = sorted(every)
    paths = data.draw(st.lists(st.sampled_from(ordered), unique=True))
    pattern = "|".join(expressions(paths, ordered))
    assert [path for path in ordered if pattern and re.fullmatch(pattern, path)] == sorted(paths)


def test_experts_of_a_layer_are_told_from_layers() -> None:
    names = [f"layers.{layer}.experts.{expert}.up.weight" for layer in (0, 1) for expert in (0, 1)]
    assert {of_any_expert(name) for name in names} == {f"layers.{layer}.experts.{{}}.up.weight" for layer in (0, 1)}
    assert of_any_expert("layers.3.mlp.up.weight") == "layers.3.mlp.up.weight"
