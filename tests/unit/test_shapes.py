"""Model specifications: every parameter as in the real class, every adapter as in peft, mistakes in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zerolora.config.method_sections import MethodSections
from zerolora.errors import UserError
from zerolora.methods.lora import LoraMethod
from zerolora.model.families import FAMILIES
from zerolora.model.llama_layouts import has_layout, layout_of
from zerolora.model.read_spec import from_config, read_model_spec
from zerolora.model.spec import ModelSpec, Module

MODELS = sorted(
    path
    for path in (Path(__file__).parents[2] / "config/recipes/models").glob("*.json")
    if (config := json.loads(path.read_text()))["model_type"] in FAMILIES or has_layout(config)
)

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "vocab_size": 99,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "vocab_size": 99,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": 48,
    "num_layers": 3,
    "num_heads": 6,
    "d_ff": 80,
    "vocab_size": 99,
    "is_encoder_decoder": True,
}
CASES: list[dict[str, Any]] = [
    SMALL | {"model_type": "llama"},
    SMALL | {"model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 64},
    SMALL | {"model_type": "llama", "num_key_value_heads": None, "head_dim": None},
    SMALL | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    SMALL | {"model_type": "llama", "head_dim": 16, "num_key_value_heads": 3, "num_hidden_layers": 1},
    SMALL | {"model_type": "qwen2"},
    SMALL | {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    SMALL | {"model_type": "qwen2", "num_key_value_heads": None, "head_dim": 10, "hidden_size": 50},
    SMALL | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8},
    SMALL | {"model_type": "qwen3"},
    SMALL | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
    SMALL | {"model_type": "qwen3", "num_key_value_heads": None, "tie_word_embeddings": True},
    SMALL | {"model_type": "mistral"},
    SMALL | {"model_type": "mistral", "num_key_value_heads": 3, "head_dim": 16, "sliding_window": None},
    SMALL | {"model_type": "mistral", "tie_word_embeddings": True, "head_dim": None, "hidden_size": 50},
    SMALL | {"model_type": "mixtral", "num_local_experts": 8},
    SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2},
    SMALL | {"model_type": "mixtral", "num_experts": 3, "head_dim": 16, "tie_word_embeddings": True},
    SMALL | {"model_type": "gemma"},
    SMALL | {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1, "hidden_act": "gelu"},
    SMALL | {"model_type": "gemma", "attention_bias": True, "tie_word_embeddings": False},
    SMALL | {"model_type": "gemma2"},
    SMALL | {"model_type": "gemma2", "head_dim": 16, "num_key_value_heads": 2, "attention_bias": True},
    SMALL | {"model_type": "gemma2", "tie_word_embeddings": False, "attn_logit_softcapping": None},
    SMALL | {"model_type": "gemma3_text"},
    SMALL | {"model_type": "gemma3_text", "head_dim": 16, "num_key_value_heads": 1, "attention_bias": True},
    SMALL | {"model_type": "gemma3_text", "tie_word_embeddings": False, "sliding_window": 16},
    SMALL | {"model_type": "phi3"},
    SMALL | {"model_type": "phi3", "num_key_value_heads": 2, "tie_word_embeddings": True},
    SMALL | {"model_type": "phi3", "head_dim": 16, "partial_rotary_factor": 0.5, "sliding_window": 7},
    GPT2,
    GPT2 | {"n_inner": 100, "n_positions": 64, "tie_word_embeddings": False},
    # attribute_map: the common name overrides GPT-2's.
    GPT2 | {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32},
    SMALL | {"model_type": "gpt_neox"},
    SMALL | {"model_type": "gpt_neox", "attention_bias": False, "tie_word_embeddings": True},
    SMALL | {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0},
    SMALL | {"model_type": "falcon"},
    SMALL | {"model_type": "falcon", "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    SMALL | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    SMALL | {"model_type": "falcon", "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    SMALL | {"model_type": "falcon", "num_ln_in_parallel_attn": 2, "ffn_hidden_size": 70},
    SMALL | {"model_type": "falcon", "n_embed": 24, "tie_word_embeddings": False, "num_kv_heads": None},
    SMALL | {"model_type": "opt", "ffn_dim": 80},
    SMALL | {"model_type": "opt", "ffn_dim": 80, "word_embed_proj_dim": 20, "do_layer_norm_before": False},
    SMALL | {"model_type": "opt", "ffn_dim": 80, "enable_bias": False, "layer_norm_elementwise_affine": False},
    SMALL | {"model_type": "opt", "ffn_dim": 80, "_remove_final_layer_norm": True, "tie_word_embeddings": False},
    SMALL | {"model_type": "bloom"},
    {"model_type": "bloom", "n_embed": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "tie_word_embeddings": False},
]
OTHERS: list[dict[str, Any]] = [
    SMALL | {"model_type": "stablelm", "num_key_value_heads": 2, "use_qkv_bias": True},
    SMALL | {"model_type": "starcoder2", "num_key_value_heads": 2},
    SMALL | {"model_type": "olmo2"},
    SMALL | {"model_type": "cohere", "num_key_value_heads": 2},
    SMALL
    | {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
    | {"moe_intermediate_size": 40},
    GPT2 | {"add_cross_attention": True},
    {
        "model_type": "gemma3",
        "text_config": SMALL | {"model_type": "gemma3_text", "head_dim": 16},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    },
]


def named(config: dict[str, Any]) -> str:
    return "-".join(str(value) for key, value in config.items() if key not in SMALL or value != SMALL[key])[:100]


def built(config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings)


def copies(module: Module) -> list[str]:
    return [module.path.replace("{}", str(number)) for number in module.numbers]


def parameters_of(shape: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {
        f"{path}.{name}": size for module in shape.modules for path in copies(module) for name, size in module.weights
    }


def compared(shape: ModelSpec, model: Any) -> None:
    assert parameters_of(shape) == {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    places = {path: index for index, (path, _) in enumerate(model.named_modules())}
    order = [
        places[module.path.replace("{}", "0")]
        for module in shape.modules
        if module.count > 1 or "{}" not in module.path
    ]
    assert order == sorted(order)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert shape.tied == (embedding.weight is head.weight)
    assert [module.path for module in shape.modules if module.kind == "head"] == ["lm_head"]


def compared_with_peft(shape: ModelSpec, model: Any) -> None:
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    with torch.device("meta"):
        # Without routers, which peft would adapt.
        wrapped = LoraMethod.build(model, MethodSections.model_validate({"lora": {"r": 4}}))
    adapted = {
        name.removeprefix("base_model.model."): (module.in_features, module.out_features)
        for name, module in wrapped.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    }
    assert adapted == {path: (each.inputs, each.outputs) for each in shape.linears for path in copies(each)}
    trained = sum(each.numel() for each in wrapped.parameters() if each.requires_grad)
    assert trained == LoraMethod(r=4).parameters(shape, 2).trained


@pytest.mark.parametrize("config", CASES, ids=named)
def test_parameters_match_the_real_class(config: dict[str, Any]) -> None:
    shape, model = from_config(config, Path("config.json")), built(config)
    assert shape.counted == "config.json"
    compared(shape, model)
    compared_with_peft(shape, model)


def test_every_family_has_cases() -> None:
    assert {config["model_type"] for config in CASES} == set(FAMILIES)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_parameters_of_published_models_match(path: Path) -> None:
    shape, config = read_model_spec(path), json.loads(path.read_text())
    assert shape.counted == "config.json"
    compared(shape, built(layout_of(config, path).config if has_layout(config) else config))


PUBLISHED = {
    "bloom-176b": 176_247_271_424,
    "bloom-560m": 559_214_592,
    "falcon-180b": 179_522_565_120,
    "falcon-40b": 41_303_293_952,
    "falcon-7b": 6_921_720_704,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gpt2": 124_439_808,
    "internlm2-chat-7b": 7_737_708_544,
    "llama-2-7b": 6_738_415_616,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "opt-1.3b": 1_315_758_080,
    "phi-3-mini-4k": 3_821_079_552,
    "pythia-1.4b": 1_414_647_808,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}


def test_published_totals() -> None:
    assert {path.stem: read_model_spec(path).parameters for path in MODELS} == PUBLISHED


@pytest.mark.parametrize("config", OTHERS, ids=named)
def test_other_architectures_are_counted_on_the_meta_device(config: dict[str, Any]) -> None:
    shape, model = from_config(config, Path("config.json")), built(config)
    assert shape.counted == "meta device"
    assert shape.layers == 3
    assert (shape.hidden, shape.heads) == (48, 6)
    compared(shape, model)
    compared_with_peft(shape, model)


SHOWN_BY_MODULES = (
    *("parameters", "layers", "hidden", "heads", "head_dim", "vocabulary", "tied", "norm"),
    *("qk_norm", "gated", "experts", "experts_per_token"),
)


@pytest.mark.parametrize("config", CASES, ids=named)
def test_meta_device_agrees_with_config(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On all traits that modules show."""
    read = from_config(config, Path("config.json"))
    monkeypatch.delitem(FAMILIES, config["model_type"])
    counted = from_config(config, Path("config.json"))
    for trait in SHOWN_BY_MODULES:
        assert getattr(counted, trait) == getattr(read, trait), trait
    assert {(each.kind, each.path.rpartition(".")[2]) for each in counted.modules} == {
        (each.kind, each.path.rpartition(".")[2]) for each in read.modules
    }


def traits(name: str, **config: Any) -> ModelSpec:
    path = next(path for path in MODELS if path.stem == name)
    return from_config(json.loads(path.read_text()) | config, path)


def test_traits_of_published_models() -> None:
    llama = traits("llama-3-8b")
    assert (llama.key_heads, llama.head_dim, llama.inner, llama.rotary) == (8, 128, 14336, 1.0)
    assert (llama.norm, llama.norms_per_layer, llama.activation, llama.gated) == ("rms", 2, "silu", True)
    assert traits("qwen3-8b").qk_norm
    mixtral = traits("mixtral-8x7b")
    assert (mixtral.experts, mixtral.experts_per_token) == (8, 2)
    gemma = traits("gemma-2-9b")
    assert (gemma.norm, gemma.norms_per_layer, gemma.scaled_embedding, gemma.tied) == ("rms_gemma", 4, True, True)
    assert (gemma.softcap_attention, gemma.softcap_logits, gemma.activation) == (True, True, "gelu_pytorch_tanh")
    assert not traits("gemma-3-1b").softcap_logits
    phi = traits("phi-3-mini-4k")
    assert (phi.rotary, phi.hidden_dropout) == (1.0, 0.0)
    gpt2 = traits("gpt2")
    assert (gpt2.norm, gpt2.attention_dropout, gpt2.hidden_dropout) == ("layer", 0.1, 0.1)
    pythia = traits("pythia-1.4b")
    assert (pythia.parallel, pythia.norms_per_layer, pythia.rotary) == (True, 2, 0.25)
    falcon = traits("falcon-7b")
    assert (falcon.parallel, falcon.norms_per_layer, falcon.key_heads, falcon.rotary) == (True, 1, 1, 1.0)
    assert (traits("opt-1.3b").activation, traits("opt-1.3b").hidden_dropout) == ("relu", 0.1)


LLAMA = SMALL | {"model_type": "llama"}
MISTAKES: list[tuple[Any, str]] = [
    ([1], "holds [1]; expected a JSON object"),
    ({"hidden_size": 48}, "has no model_type; give the architecture's name"),
    ({"model_type": 3}, "model_type is 3; expected a text"),
    ({"model_type": "llama"}, "has no hidden_size, which a llama model needs; fetch the model again"),
    ({"model_type": "gpt2"}, "has no n_embd, which a gpt2 model needs"),
    (LLAMA | {"hidden_size": "4096"}, "hidden_size is '4096'; expected a finite number"),
    (LLAMA | {"vocab_size": -1}, "vocab_size is -1; use a whole number of at least 1"),
    (LLAMA | {"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0; use a whole number"),
    (LLAMA | {"num_attention_heads": True}, "num_attention_heads is True; expected a finite number"),
    (LLAMA | {"intermediate_size": None}, "intermediate_size is None; use a whole number"),
    (LLAMA | {"num_attention_heads": 7}, "the hidden size 48 is not a multiple of the 7 attention heads"),
    (LLAMA | {"attention_bias": "no"}, "attention_bias is 'no'; use true or false"),
    (LLAMA | {"attention_dropout": 3}, "attention_dropout is 3; use a number from 0 to 1"),
    (LLAMA | {"hidden_act": None}, "hidden_act is None; use a name such as silu"),
    (SMALL | {"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads is None; use a whole"),
    (SMALL | {"model_type": "gemma2", "attn_logit_softcapping": -1}, "attn_logit_softcapping is -1; use a number"),
    (T5, "model_type is 't5', which transformers has no decoder for"),
    (SMALL | {"model_type": "nothing"}, "model_type is 'nothing', which this transformers has no class for"),
    (SMALL | {"model_type": "stablelm", "hidden_size": "48"}, "hidden_size is '48'; expected a finite number"),
    (SMALL | {"model_type": "vit"}, "model_type is 'vit', which transformers has no decoder for"),
]


@pytest.mark.parametrize(("config", "message"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_mistake_in_config_is_one_line(tmp_path: Path, config: Any, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_model_spec(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_directory_and_file_read_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    assert read_model_spec(tmp_path) == read_model_spec(tmp_path / "other.json")
    with pytest.raises(UserError, match=r"nowhere/config\.json: there is no such file"):
        read_model_spec(tmp_path / "nowhere")
