"""The shape of a model, read from its config.json: every module that owns parameters, and how a layer computes.

The families in zerolora.memory.families are counted from the file, without torch. Any other architecture that
transformers can build is built on the meta device (no memory, some seconds) and counted there.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.files import read_json

Weights = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each parameter that a module owns itself."""


@dataclass(frozen=True)
class Module:
    """A module that owns parameters, once or once in each layer."""

    path: str
    """As in named_modules(), with {} for the layer's number: model.layers.{}.self_attn.q_proj."""
    kind: str
    """linear, conv1d, embedding, head, norm, experts, router or other."""
    weights: Weights
    """None for a head that shares the embedding's weight."""
    count: int = 1
    """1, or the number of layers that have it."""
    inputs: int = 0
    """Of a linear, conv1d or head."""
    outputs: int = 0

    @property
    def name(self) -> str:
        """The last part of the path: q_proj."""
        return self.path.rpartition(".")[2]

    @property
    def parameters(self) -> int:
        """Elements of one copy."""
        return sum(math.prod(shape) for _, shape in self.weights)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the estimate needs to know of a model. Sizes in elements."""

    family: str
    """model_type."""
    modules: tuple[Module, ...]
    """In the order of named_modules(). Beside a tied head, modules without a weight of their own are left out."""
    layers: int
    """Of the decoder, in an encoder-decoder."""
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int
    """Width of the MLP, of one expert's in a mixture of experts."""
    vocabulary: int
    positions: int
    """max_position_embeddings; 0 without."""
    tied: bool
    """The head shares the embedding's weight."""
    norm: str
    """rms, rms_gemma (x * (1 + w) in fp32) or layer."""
    norms_per_layer: int
    """Norms over the hidden width in a (decoder) layer."""
    activation: str
    """As hidden_act says."""
    qk_norm: bool = False
    gated: bool = False
    """Gate and up projections."""
    fused_qkv: bool = False
    fused_gate: bool = False
    parallel: bool = False
    """Attention and MLP are added to the same residual."""
    rotary: float = 0.0
    """Share of head_dim that is rotated."""
    alibi: bool = False
    softcap_attention: bool = False
    softcap_logits: bool = False
    sliding_window: int = 0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    scaled_embedding: bool = False
    """Embeddings are multiplied by a constant."""
    experts: int = 0
    experts_per_token: int = 0
    encoder_layers: int = 0
    counted: str = "config.json"
    """"config.json" or "meta device": where the numbers come from."""

    @property
    def parameters(self) -> int:
        """Every parameter once: a tied head adds none."""
        return sum(module.parameters * module.count for module in self.modules)

    @property
    def linears(self) -> tuple[Module, ...]:
        """What peft's all-linear targets: every nn.Linear and Conv1D but the output head.

        Of a Mixtral it adapts more than these: expert_adapter_parameters.
        """
        return tuple(module for module in self.modules if module.kind in ("linear", "conv1d"))


def read_model_spec(path: Path) -> ModelSpec:
    """Return the shape of the model in directory `path`, or of a config.json under any name that ends in .json.

    Raises UserError if the file is missing or broken, or says too little.
    """
    where = path if path.suffix == ".json" and not path.is_dir() else path / "config.json"
    return from_config(read_json(where, "zerolora fetch"), where)


def from_config(config: Any, where: Path) -> ModelSpec:
    """Return the shape that a config.json's content describes; `where` names its file in messages."""
    # families makes Shapes, so it imports this module.
    from zerolora.memory.families import FAMILIES, Keys

    if not isinstance(config, dict):
        raise UserError(f"{where}: holds {shown(config)}; write a JSON object, as a model's config.json is")
    family = config.get("model_type")
    if not isinstance(family, str):
        seen = f"model_type is {shown(family)}" if "model_type" in config else "has no model_type"
        raise UserError(f"{where}: {seen}; write the architecture's name, such as llama, or fetch the model again")
    # Layers that also attend to an encoder are in no published GPT-2 and in no table of families.
    if family not in FAMILIES or config.get("add_cross_attention"):
        return _on_meta_device(config, where)
    return FAMILIES[family](Keys(config, where, family))


def to_json(shape: ModelSpec) -> dict[str, Any]:
    """Return a shape as JSON values."""
    return asdict(shape)


def from_json(value: dict[str, Any]) -> ModelSpec:
    """Return the shape that to_json wrote."""
    modules = tuple(
        Module(**{**module, "weights": tuple((name, tuple(sizes)) for name, sizes in module["weights"])})
        for module in value["modules"]
    )
    return ModelSpec(**{**value, "modules": modules})


def expert_adapter_parameters(shape: ModelSpec, r: int) -> int:
    """Return what peft's all-linear adds to a Mixtral beside its linears: adapters on the router and on each expert.

    They are no nn.Linear in transformers 5, but were before, so peft keeps adapting them: gate and up, now one
    parameter, with twice the rank (peft/utils/transformers_weight_conversion.py, _convert_peft_config_moe).
    """
    if shape.family != "mixtral":
        return 0
    total = 0
    for module in shape.modules:
        if module.kind in ("router", "experts"):
            for name, (*experts, outputs, inputs) in module.weights:
                rank = 2 * r if name == "gate_up_proj" else r
                total += rank * math.prod(experts) * (inputs + outputs) * module.count
    return total


def _on_meta_device(config: dict[str, Any], where: Path) -> ModelSpec:
    model = _built(config, where)
    modules = _gathered(list(_owners(model)))
    text = model.config.get_text_config(decoder=True)

    def of(*names: str, default: Any = 0) -> Any:
        """Return the first of the text config's attributes that says something."""
        return next((value for name in names if (value := getattr(text, name, None)) is not None), default)

    heads, hidden = of("num_attention_heads", "n_head", default=1), of("hidden_size", "d_model", "n_embd")
    # Experts in one parameter of three dimensions have its name in place of a module's.
    names = {module.name for module in modules} | {name for module in modules for name, _ in module.weights}
    heads_own = [name for module in modules if module.kind == "head" for name, _ in module.weights]
    rotary = any("rotary" in name for name, _ in model.named_modules()) or hasattr(text, "rope_parameters")
    norms = _layer_norms(modules, hidden)
    both = model.config.is_encoder_decoder
    return ModelSpec(
        family=config["model_type"],
        modules=modules,
        layers=of("decoder_layers", "num_decoder_layers", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        key_heads=of("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=of("head_dim", default=hidden // heads),
        inner=of("moe_intermediate_size", "intermediate_size", "ffn_dim", "d_ff", default=4 * hidden),
        vocabulary=of("vocab_size"),
        positions=of("max_position_embeddings"),
        tied=any(module.kind == "head" for module in modules) and "weight" not in heads_own,
        norm=_norm_of(model),
        norms_per_layer=norms,
        activation=of("hidden_activation", "hidden_act", "activation_function", default="gelu"),
        qk_norm=bool(names & {"q_norm", "k_norm", "q_layernorm", "query_layernorm"}),
        gated=bool(names & {"gate_proj", "gate_up_proj", "w3", "wi_1"}),
        fused_qkv=bool(names & {"qkv_proj", "query_key_value", "c_attn", "Wqkv"}),
        fused_gate="gate_up_proj" in names,
        parallel=bool(of("use_parallel_residual", "parallel_attn", default=norms == 1)),
        rotary=float(_partial_rotary(text)) if rotary else 0.0,
        alibi=bool(of("alibi")),
        softcap_attention=bool(of("attn_logit_softcapping")),
        softcap_logits=bool(of("final_logit_softcapping")),
        sliding_window=of("sliding_window"),
        attention_dropout=of("attention_dropout", "attn_pdrop"),
        hidden_dropout=of("hidden_dropout", "residual_dropout", "resid_pdrop", "dropout"),
        scaled_embedding=bool(of("scale_embedding", default="gemma" in config["model_type"])),
        experts=of("num_local_experts", "num_experts", "n_routed_experts"),
        experts_per_token=of("num_experts_per_tok", "num_experts_per_token"),
        encoder_layers=of("encoder_layers", "num_layers", "num_hidden_layers") if both else 0,
        counted="meta device",
    )


def _built(config: dict[str, Any], where: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = config["model_type"]
    if family not in CONFIG_MAPPING:
        raise UserError(
            f"{where}: model_type is {shown(family)}, which this transformers has no class for; "
            "write the name of an architecture that it has (code from a model's repository is never run)"
        )
    try:
        settings = CONFIG_MAPPING[family].from_dict(config)
        factory: Any = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForCausalLM
        with torch.device("meta"):
            return factory.from_config(settings, trust_remote_code=False)
    # Each config and model class refuses in its own way what it cannot build: KeyError, TypeError, RuntimeError, ...
    except Exception as error:
        # huggingface_hub's StrictDataclassFieldValidationError says what it is about in several lines.
        why = " ".join(str(error).split())
        raise UserError(
            f"{where}: a {family} cannot be built from it ({why:.240}); mend the value or fetch it again"
        ) from None


@dataclass(frozen=True)
class _Owner:
    """A module as it was found: the number in its path, if it is in a layer, and the module without it."""

    stack: str
    index: int
    module: Module


def _owners(model: Any) -> Iterator[_Owner]:
    seen: set[int] = set()
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        own = [(name, each) for name, each in module.named_parameters(recurse=False) if id(each) not in seen]
        seen.update(id(each) for _, each in own)
        if not own and module is not head:
            continue
        parts = path.split(".")
        at = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
        template = ".".join("{}" if place == at else part for place, part in enumerate(parts))
        weights = tuple((name, tuple(each.shape)) for name, each in own)
        kind, inputs, outputs = _kind(module, head)
        index = int(parts[at]) if at < len(parts) else -1
        yield _Owner(".".join(parts[:at]), index, Module(template, kind, weights, 1, inputs, outputs))


def _kind(module: Any, head: Any) -> tuple[str, int, int]:
    """Return the kind, and the inputs and outputs of a linear one."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    name = type(module).__name__.lower()
    if isinstance(module, nn.Linear):
        return "head" if module is head else "linear", module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return "conv1d", module.nx, module.nf
    if isinstance(module, nn.Embedding):
        return "embedding", 0, 0
    return next((kind for kind in ("norm", "experts", "router") if kind in name), "other"), 0, 0


def _gathered(owners: list[_Owner]) -> tuple[Module, ...]:
    """Write a module that is the same in every layer of its stack once, any other one with its layer's number."""
    sizes: dict[str, set[int]] = defaultdict(set)
    found: dict[Module, list[int]] = defaultdict(list)
    for owner in owners:
        sizes[owner.stack].add(owner.index)
        found[owner.module].append(owner.index)
    modules: dict[Module, None] = {}
    for owner in owners:
        each, layers = owner.module, len(sizes[owner.stack])
        if found[each] == list(range(layers)):
            each = Module(each.path, each.kind, each.weights, layers, each.inputs, each.outputs)
        elif owner.index >= 0:
            path = each.path.replace("{}", str(owner.index))
            each = Module(path, each.kind, each.weights, 1, each.inputs, each.outputs)
        modules[each] = None
    return tuple(modules)


def _layer_norms(modules: tuple[Module, ...], hidden: int) -> int:
    """Return how many norms over the hidden width a decoder layer has; those of queries and keys are not."""
    stacks: dict[str, int] = defaultdict(int)
    for module in modules:
        if module.kind == "norm" and "{}" in module.path and module.weights[0][1] == (hidden,):
            stacks[module.path.partition("{}")[0]] += not module.name.startswith(("q_", "k_"))
    return max(stacks.values(), default=0)


def _norm_of(model: Any) -> str:
    names = {type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__}
    # T5LayerNorm takes no mean off: it is an RMS norm by another name.
    if not all("RMS" in name or name.endswith("T5LayerNorm") for name in names):
        return "layer"
    return "rms_gemma" if any(name.startswith("Gemma") for name in names) else "rms"


def _partial_rotary(text: Any) -> float:
    parameters = getattr(text, "rope_parameters", None) or {}
    return parameters.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0
