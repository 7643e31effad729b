"""The shape of a model, read from its config.json: parameters, linear modules, layers.

Llama, Mistral, Qwen2 and Qwen3 are counted from the file, without torch. Any other architecture that
transformers can build is built on the meta device (no memory, some seconds) and counted there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import read_json


@dataclass(frozen=True)
class Linear:
    """A linear module: its last name (q_proj), inputs, outputs, and how many of it the model has."""

    name: str
    inputs: int
    outputs: int
    count: int


@dataclass(frozen=True)
class Shape:
    """What the estimate needs to know of a model. Sizes in elements."""

    parameters: int
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    linears: tuple[Linear, ...]
    """Every linear module but the output head."""
    counted: str
    """"config.json" or "meta device": where the numbers come from."""


def read_shape(directory: Path) -> Shape:
    """Return the shape of the model whose config.json is in `directory`. Raises UserError if it says too little."""
    path = directory / "config.json"
    config = read_json(path, "zerolora fetch")
    family = config.get("model_type")
    if family not in _FAMILIES:
        return _on_meta_device(directory)
    try:
        return _llama_like(config, **_FAMILIES[family])
    except KeyError as error:
        raise UserError(
            f"{path}: has no {error.args[0]}, which a {family} model needs; fetch the model again"
        ) from None


def adapter_parameters(shape: Shape, r: int, targets: str | list[str]) -> int:
    """Return φ, the parameters of a LoRA adapter: r x (inputs + outputs) for each target (arXiv 2106.09685, 4.1).

    Raises UserError if a named target is in no layer.
    """
    names = {linear.name for linear in shape.linears}
    if isinstance(targets, list):
        unknown = [target for target in targets if target not in names]
        if unknown:
            raise UserError(
                f"train.lora.targets: {unknown[0]!r} is not in the model; "
                f"write all-linear or some of {', '.join(sorted(names))}"
            )
    chosen = names if targets == "all-linear" else set(targets)
    return sum(r * (each.inputs + each.outputs) * each.count for each in shape.linears if each.name in chosen)


# What differs between families that share Llama's layout: which projections have a bias whatever config.json
# says, and whether queries and keys are normalised. Source: transformers/models/<family>/modeling_<family>.py.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"qkv_bias": None, "o_bias": None, "qk_norm": False},
    "mistral": {"qkv_bias": False, "o_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "o_bias": False, "qk_norm": False},
    "qwen3": {"qkv_bias": None, "o_bias": None, "qk_norm": True},
}


def _llama_like(config: dict[str, Any], qkv_bias: bool | None, o_bias: bool | None, qk_norm: bool) -> Shape:
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    inner, vocabulary = config["intermediate_size"], config["vocab_size"]
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    qkv_bias = attention_bias if qkv_bias is None else qkv_bias
    o_bias = attention_bias if o_bias is None else o_bias
    linears = (
        Linear("q_proj", hidden, heads * head, layers),
        Linear("k_proj", hidden, key_heads * head, layers),
        Linear("v_proj", hidden, key_heads * head, layers),
        Linear("o_proj", heads * head, hidden, layers),
        Linear("gate_proj", hidden, inner, layers),
        Linear("up_proj", hidden, inner, layers),
        Linear("down_proj", inner, hidden, layers),
    )
    biases = qkv_bias * (heads + 2 * key_heads) * head + o_bias * hidden + mlp_bias * (2 * inner + hidden)
    norms = 2 * hidden + qk_norm * 2 * head
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    parameters = (
        sum(each.inputs * each.outputs * each.count for each in linears)
        + layers * (biases + norms)
        + embeddings
        + hidden
    )
    return Shape(parameters, layers, hidden, heads, vocabulary, linears, "config.json")


def _on_meta_device(directory: Path) -> Shape:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UserError(f"{directory / 'config.json'}: {str(error).splitlines()[0]:.160}") from None
    head = model.get_output_embeddings()
    linears = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head:
            # GPT-2 writes its linear modules as Conv1D, whose weight is [inputs, outputs].
            shape = module.weight.shape if isinstance(module, Conv1D) else module.weight.T.shape
            linears.append(Linear(name.rpartition(".")[2], shape[0], shape[1], 1))
    text = config.get_text_config()
    return Shape(
        sum(parameter.numel() for parameter in model.parameters()),
        text.num_hidden_layers,
        text.hidden_size,
        text.num_attention_heads,
        text.vocab_size,
        tuple(linears),
        "meta device",
    )
