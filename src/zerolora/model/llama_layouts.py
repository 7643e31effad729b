"""Published models that are a Llama under other names: InternLM2, and Baichuan with rotary positions (7B).

transformers has no class for them, and the Python code of their repositories is never run. The stage `fetch`
renames and divides their tensors once (fetch/llama_conversion.py); everything after it reads a Llama.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError, shown
from zerolora.model.families.keys import Keys

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Cut = Callable[["torch.Tensor"], "torch.Tensor"]

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NEEDED = (*_SIZES, "max_position_embeddings", "rms_norm_eps", "hidden_act")
_COPIED = (*_NEEDED, "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "torch_dtype")
"""Keys with the same meaning in a Llama's config.json."""
_IDLE = (
    *("_attn_implementation", "_from_model_config", "_name_or_path", "architectures", "attn_implementation"),
    *("auto_map", "gradient_checkpointing", "model_max_length", "model_type", "pretraining_tp", "tokenizer_class"),
    *("transformers_version", "z_loss_weight"),
)
"""Keys that change no result: of the loader, of pretraining, and of how a matrix product is divided."""
_SCALINGS = ("linear", "dynamic")
ALIBI_LAYERS = 40
"""Layers of Baichuan-13B and Baichuan2-13B, whose attention has ALiBi instead of rotary positions."""
PLAIN_HEAD, NORMALIZED_HEAD = "BaiChuanForCausalLM", "BaichuanForCausalLM"
"""Classes of Baichuan-7B and of Baichuan2-7B, whose head's rows are divided by their norms (NormHead)."""


@dataclass(frozen=True)
class Part:
    """A tensor of the Llama."""

    name: str
    shape: Shape
    cut: Cut
    """Makes it of the stored tensor."""


@dataclass(frozen=True)
class Layout:
    """A model in a published layout."""

    config: dict[str, Any]
    """config.json of the Llama."""
    parts: Callable[[str, Shape], list[Part]]
    """The Llama's tensors that a stored tensor of this name and shape contains."""


def has_layout(config: dict[str, Any]) -> bool:
    """Return whether a config.json is of a model type that is read as a Llama."""
    return config.get("model_type") in _LAYOUTS


def layout_of(config: dict[str, Any], where: Path) -> Layout:
    """Return how a model is read as a Llama.

    Raises UserError, naming the file `where`, for a key or value that a Llama cannot have.
    """
    family = config["model_type"]
    classes, further = _LAYOUTS[family]
    architectures = config.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in classes:
        raise UserError(
            f"{where}: architectures is {shown(architectures)}; of {family}, only {' or '.join(classes)} is converted; "
            "choose another model"
        )
    for name in (*_NEEDED, *(key for key, needed in further.items() if needed)):
        if config.get(name) is None:
            raise UserError(f"{where}: has no {name}, which the conversion of {family} needs; fetch the model again")
    known = {*_COPIED, *_IDLE, *further, "tie_word_embeddings", "quantization_config", "dtype"}
    if unknown := sorted(config.keys() - known):
        raise UserError(
            f"{where}: {unknown[0]} is {shown(config[unknown[0]])}, a key that the published {family} does not have; "
            "remove it if it changes no result, or choose another model"
        )
    keys = Keys(config, where, family)
    sizes = {name: keys.size(name) for name in _SIZES}
    keys.divided(sizes["hidden_size"], sizes["num_attention_heads"])
    keys.text("hidden_act", "silu")
    if config.get("quantization_config") is not None:
        raise UserError(
            f"{where}: quantization_config: the weights are stored quantized, and are not converted; use the "
            "checkpoint in bf16, fp16 or fp32 that it was made of"
        )
    llama = {name: config[name] for name in (*_COPIED, "dtype") if name in config}
    llama |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}
    llama["tie_word_embeddings"] = keys.flag("tie_word_embeddings", False)
    return _internlm2(keys, llama) if family == "internlm2" else _baichuan(keys, llama)


_LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, bool]]] = {
    "internlm2": (
        ("InternLM2ForCausalLM",),
        {"bias": True, "num_key_value_heads": True, "rope_theta": True, "rope_scaling": False},
    ),
    "baichuan": ((PLAIN_HEAD, NORMALIZED_HEAD), {}),
}
"""By model type: classes, and its further keys in config.json, with whether one is needed."""


def _internlm2(keys: Keys, llama: dict[str, Any]) -> Layout:
    """`wqkv` has, for each key-value head, its queries, its key and its value: q₁ … qₙ k v."""
    config, where = keys.config, keys.where
    scaling = config.get("rope_scaling")
    if scaling is not None:
        kind, factor = (scaling.get("type"), scaling.get("factor")) if isinstance(scaling, dict) else (None, None)
        if kind not in _SCALINGS or not isinstance(factor, int | float) or scaling.keys() != {"type", "factor"}:
            raise UserError(
                f"{where}: rope_scaling is {shown(scaling)}; only a type of {' or '.join(_SCALINGS)} with a factor is "
                "converted; choose another model"
            )
        scaling = {"rope_type": kind, "factor": float(factor)}
    heads, key_heads = config["num_attention_heads"], keys.size("num_key_value_heads")
    if heads % key_heads:
        raise UserError(
            f"{where}: num_key_value_heads is {shown(key_heads)}; use a number that divides {heads}, the attention "
            "heads, or fetch the model again"
        )
    group, width = heads // key_heads, config["hidden_size"] // heads
    llama |= {
        "attention_bias": keys.flag("bias", True),
        "num_key_value_heads": key_heads,
        "rope_theta": config["rope_theta"],
        "rope_scaling": scaling,
    }
    names = {
        "model.tok_embeddings": "model.embed_tokens",
        "output": "lm_head",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }

    def parts(name: str, shape: Shape) -> list[Part]:
        before, path, kind = _divided(name)
        if path != "attention.wqkv":
            return [_same(f"{before}{names.get(path, path)}{kind}", shape)]
        if not shape or shape[0] != key_heads * (group + 2) * width:
            raise _other_shape(where, name, shape, f"{key_heads} × ({group} + 2) × {width} rows")

        def cut(first: int, stop: int) -> Cut:
            return lambda whole: whole.unflatten(0, (key_heads, group + 2, width))[:, first:stop].flatten(0, 2)

        spans = {"q_proj": (0, group), "k_proj": (group, group + 1), "v_proj": (group + 1, group + 2)}
        return [
            Part(
                f"{before}self_attn.{module}{kind}",
                (key_heads * (stop - first) * width, *shape[1:]),
                cut(first, stop),
            )
            for module, (first, stop) in spans.items()
        ]

    return Layout(llama, parts)


def _baichuan(keys: Keys, llama: dict[str, Any]) -> Layout:
    """`W_pack` has all queries, then all keys, then all values."""
    config, where = keys.config, keys.where
    if config["num_hidden_layers"] == ALIBI_LAYERS:
        raise UserError(
            f"{where}: num_hidden_layers is {ALIBI_LAYERS}, a Baichuan of 13B, whose attention has ALiBi, which a "
            "Llama cannot have; use a Baichuan of 7B"
        )
    hidden = config["hidden_size"]
    normalized = config["architectures"] == [NORMALIZED_HEAD]
    if normalized and llama["tie_word_embeddings"]:
        raise UserError(
            f"{where}: tie_word_embeddings is true, but the rows of a {NORMALIZED_HEAD}'s head are normalized and "
            "those of its embedding are not; set it to false, or take another model"
        )
    llama |= {"attention_bias": False, "num_key_value_heads": config["num_attention_heads"], "rope_theta": 10000.0}

    def normalize(whole: "torch.Tensor") -> "torch.Tensor":
        import torch

        return torch.nn.functional.normalize(whole.float()).to(whole.dtype)

    def parts(name: str, shape: Shape) -> list[Part]:
        before, path, kind = _divided(name)
        if path == "self_attn.rotary_emb":  # Baichuan-7B stores it; a Llama computes it
            return []
        if name == "lm_head.weight" and normalized:
            return [Part(name, shape, normalize)]
        if path != "self_attn.W_pack":
            return [_same(name, shape)]
        if not shape or shape[0] != 3 * hidden:
            raise _other_shape(where, name, shape, f"3 × {hidden} rows")

        def cut(index: int) -> Cut:
            return lambda whole: whole[index * hidden : (index + 1) * hidden]

        modules = ("q_proj", "k_proj", "v_proj")
        return [
            Part(f"{before}self_attn.{module}{kind}", (hidden, *shape[1:]), cut(index))
            for index, module in enumerate(modules)
        ]

    return Layout(llama, parts)


def _divided(name: str) -> tuple[str, str, str]:
    """Return a tensor's layer, module and kind: `model.layers.0.`, `attention.wo`, `.weight`."""
    module, dot, kind = name.rpartition(".")
    steps = module.split(".")
    if steps[:2] == ["model", "layers"] and len(steps) > 3:
        return ".".join(steps[:3]) + ".", ".".join(steps[3:]), dot + kind
    return "", module, dot + kind


def _same(name: str, shape: Shape) -> Part:
    return Part(name, shape, lambda whole: whole)


def _other_shape(where: Path, name: str, shape: Shape, expected: str) -> UserError:
    return UserError(f"{where}: {name} is {list(shape)} in the files; expected {expected}; fetch the whole model")
