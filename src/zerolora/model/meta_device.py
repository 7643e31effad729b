"""Counts a model's parameters on torch's meta device, for architectures that families/ lacks, within bounds."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from zerolora.compat.transformers_patches import computes_otherwise, former_names, quantizable_paths
from zerolora.errors import UserError, shown
from zerolora.log import LOGGER
from zerolora.model.architecture import auto_class, left_out, other_parts, role
from zerolora.model.families.keys import LAYERS, most_of
from zerolora.model.foreign import reason
from zerolora.model.spec import ModelSpec, Module, supported_attentions
from zerolora.types import Attention

NARROW_SOFTMAX = ("falcon", "gpt2", "gpt_oss")
"""Families whose eager attention computes its softmax in the scores' type: modeling_<family>.py."""
DESCRIBED = ("deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe", "qwen2_moe", "qwen3_moe")
"""Families outside families/ whose layers the memory tracer has operation by operation (memory/layer.py), each compared
with recorded traces (benchmarks/memory/compare.py). The layers of all others are traced from their class."""


def count_on_meta_device(config: dict[str, Any], where: Path) -> ModelSpec:
    """Return the spec of the architecture in a config.json, the file `where` in messages.

    Raises UserError if transformers cannot build it.
    """
    check_sizes(config, where)
    import torch

    model = build_on_meta(config, where, torch.bfloat16)
    modules = _merge_layers(list(_owners(model)))
    text = model.config.get_text_config(decoder=True)
    check_countable(text, where)

    def of(*names: str, default: Any = 0) -> Any:
        """Return the first attribute of the text config that is set; of a list with a number by layer, the largest."""
        value = next((value for name in names if (value := attribute(text, name)) is not None), default)
        return max(value, default=default) if isinstance(value, list | tuple) else value

    heads, hidden = of("num_attention_heads", "n_head", default=1), of("hidden_size", "d_model", "n_embd")
    # Experts stacked in one parameter have its name instead of a module's.
    names = {module.name for module in modules} | {name for module in modules for name, _ in module.weights}
    heads_own = [name for module in modules if module.kind == "head" for name, _ in module.weights]
    rotary = any("rotary" in name for name, _ in model.named_modules()) or hasattr(text, "rope_parameters")
    scaled, share = getattr(text, "rope_parameters", None) or {}, "partial_rotary_factor"
    norms = _layer_norms(modules, hidden)
    capped = bool(of("attn_logit_softcapping"))
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
        tied=any(module.kind == "head" for module in modules) and "weight" not in heads_own,
        norm=_norm_of(model),
        norms_per_layer=norms,
        activation=of("hidden_activation", "hidden_act", "activation_function", default="gelu"),
        qk_norm=bool(names & {"q_norm", "k_norm", "q_layernorm", "query_layernorm"}),
        gated=bool(names & {"gate_proj", "gate_up_proj", "w3", "wi_1"}),
        parallel=bool(of("use_parallel_residual", "parallel_attn", default=norms == 1)),
        rotary=float(scaled.get(share) or of(share, default=1.0)) if rotary else 0.0,
        softcap_attention=capped,
        softcap_logits=bool(of("final_logit_softcapping")),
        attention_dropout=of("attention_dropout", "attn_pdrop"),
        hidden_dropout=of("hidden_dropout", "residual_dropout", "resid_pdrop", "dropout"),
        scaled_embedding=bool(of("scale_embedding", default="gemma" in config["model_type"])),
        experts=of("num_local_experts", "num_experts", "n_routed_experts"),
        experts_per_token=of("num_experts_per_tok", "num_experts_per_token"),
        former=former_names(text.model_type),
        softmax_in_fp32=config["model_type"] not in NARROW_SOFTMAX,
        latent=_latent(text) if config["model_type"] in DESCRIBED else None,
        sinks="sinks" in names,
        attentions=_attentions(model, capped),
        buffers=_buffers(model),
        counted="meta device",
        config="" if config["model_type"] in DESCRIBED else _text_of(config),
    )


def _buffers(model: Any) -> tuple[int, int]:
    """Return the elements of buffers in the precision in which the model is built, and the bytes of others."""
    own, others = 0, 0
    for each in model.buffers():
        if each.dtype == model.dtype:
            own += each.numel()
        else:
            others += each.numel() * each.element_size()
    return own, others


def _attentions(model: Any, softcap: bool) -> tuple[Attention, ...]:
    """Return the implementations of attention, the fastest first; last a flash that only the class's word is for."""
    from zerolora.model.attention_trial import tried, why_not

    certain = tried(model.config) is None
    names = supported_attentions(certain, model._supports_sdpa, softcap)
    return names if certain or softcap or why_not(model.config) else (*names, "flash")


def _text_of(config: dict[str, Any]) -> str:
    """Return the content of a config.json without what changes no layer."""
    return json.dumps({key: value for key, value in config.items() if key not in IGNORED}, sort_keys=True)


def build_on_meta(config: dict[str, Any], where: Path, dtype: Any = None) -> Any:
    """Return the model of a config.json on the meta device, without a classifier's keys, in `dtype` or torch's default.

    Raises UserError, naming the file `where`, if transformers cannot build it.
    """
    import torch

    with _explained(config, where):
        settings = _settings_of(config, where)
        auto = auto_class(settings, where)
        with torch.device("meta"), limited_modules(where):
            return auto.from_config(settings, trust_remote_code=False, **({"dtype": dtype} if dtype else {}))


def settings_of(text: str, where: Path) -> Any:
    """Return transformers' config of a ModelSpec's `config`. Raises UserError, naming the file `where`."""
    config = json.loads(text)
    with _explained(config, where):
        return _settings_of(config, where)


def _settings_of(config: dict[str, Any], where: Path) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = config["model_type"]
    if family not in CONFIG_MAPPING:
        raise UserError(
            f"{where}: model_type is {shown(family)}, which this transformers has no class for; "
            "give the name of an architecture that it has (code from a model's repository is never run)"
        )
    config = {key: value for key, value in config.items() if key not in IGNORED}
    factory = CONFIG_MAPPING[family]
    # As from_pretrained: in a file, infinity is {"__float__": "Infinity"}.
    settings = factory.from_dict(factory._decode_special_floats(config))
    check_complete(settings, config, where)
    return settings


@contextmanager
def _explained(config: dict[str, Any], where: Path) -> Iterator[None]:
    """Raise UserError for any error in the block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # config and model classes raise errors of many types, some of several lines
        raise UserError(
            f"{where}: a {config['model_type']} cannot be built from it ({reason(error)}); correct the value or fetch "
            "it again"
        ) from None


@dataclass(frozen=True)
class _Owner:
    """A module of the built model."""

    stack: str
    index: int
    """Number of its layer; -1 outside the layers."""
    module: Module
    """Its path has {} for the layer's number."""


def _owners(model: Any) -> Iterator[_Owner]:
    seen: set[int] = set()
    head = model.get_output_embeddings()
    outside = tuple(other_parts(model))
    quantizable, never = frozenset(quantizable_paths(model)), frozenset(left_out(model))
    for path, module in model.named_modules():
        own = [(name, each) for name, each in module.named_parameters(recurse=False) if id(each) not in seen]
        seen.update(id(each) for _, each in own)
        if not own and module is not head:
            continue
        parts = path.split(".")
        at = next((position for position, part in enumerate(parts) if part.isdigit()), len(parts))
        template = ".".join("{}" if position == at else part for position, part in enumerate(parts))
        weights = tuple((name, tuple(each.shape)) for name, each in own)
        kind, inputs, outputs = _kind(module, head)
        if f"{path}.".startswith(tuple(f"{part}." for part in outside)):
            kind = "outside"
        index = int(parts[at]) if at < len(parts) else -1
        narrow = not inputs or path in quantizable
        own_ = Module(template, kind, weights, 1, inputs, outputs, quantizable=narrow, left_out=path in never)
        yield _Owner(".".join(parts[:at]), index, own_)


def _kind(module: Any, head: Any) -> tuple[str, int, int]:
    """Return the kind of a module, and a linear module's inputs and outputs."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear) and (module is head or not computes_otherwise(module)):
        return "head" if module is head else "linear", module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return "conv1d", module.nx, module.nf
    if isinstance(module, nn.Embedding):
        return "embedding", 0, 0
    return role(module), 0, 0


def _merge_layers(owners: list[_Owner]) -> tuple[Module, ...]:
    """Return each module once, with the numbers of its layers unless all have it."""
    sizes: dict[str, set[int]] = defaultdict(set)
    result: dict[Module, list[int]] = defaultdict(list)
    for owner in owners:
        sizes[owner.stack].add(owner.index)
        result[owner.module].append(owner.index)
    modules: dict[Module, None] = {}
    for owner in owners:
        each, layers = owner.module, len(sizes[owner.stack])
        if owner.index >= 0:
            numbers = () if result[each] == list(range(layers)) else tuple(result[each])
            each = replace(each, count=len(result[each]), layers=numbers)
        modules[each] = None
    return tuple(modules)


def _layer_norms(modules: tuple[Module, ...], hidden: int) -> int:
    """Return how many norms over the hidden width a decoder layer has, without those of queries and keys."""
    stacks: dict[str, int] = defaultdict(int)
    for module in modules:
        if module.kind == "norm" and "{}" in module.path and module.weights[0][1] == (hidden,):
            stacks[module.path.partition("{}")[0]] += not module.name.startswith(("q_", "k_"))
    return max(stacks.values(), default=0)


def _norm_of(model: Any) -> str:
    names = {type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__}
    # T5LayerNorm does not subtract the mean, so it is an RMS norm.
    if not all("RMS" in name or name.endswith("T5LayerNorm") for name in names):
        return "layer"
    return "rms_gemma" if any(name.startswith("Gemma") for name in names) else "rms"


def _latent(text: Any) -> tuple[int, int, int] | None:
    """Return the widths of a head in multi-head latent attention, None for other attention."""
    plain, rotary, value = (attribute(text, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return (plain, rotary, value) if plain and rotary and value else None


MOST_MODULES = 40_000
"""Most modules that are built. The largest published models have some thousands; more take over ten seconds."""
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("ffn_dim", "d_ff", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts"),
)
"""Keys that size a model, by transformers' names (attribute_map has each architecture's own). save_pretrained always
writes them, except for parts of a composite model."""
NEVER_ZERO = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
IGNORED = ("num_labels", "id2label", "label2id")
"""A classifier's keys, which may create a table of any length."""


def check_sizes(config: dict[str, Any], where: Path) -> None:
    """Raise UserError for a size of 0, or, at any depth of the file, one with which building would take minutes."""
    for key in NEVER_ZERO:
        if isinstance(config.get(key, 1), int) and config.get(key, 1) < 1:
            raise UserError(f"{where}: {key} is {shown(config[key])}; use a whole number of at least 1")
    waiting: list[Any] = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            for key, size in value.items():
                if key in (*SIZES, *LAYERS) and isinstance(size, int) and size > (most := most_of(key)):
                    raise UserError(f"{where}: {key} is {shown(size)}; use a whole number of at most {most:,}")


def check_complete(settings: Any, config: dict[str, Any], where: Path) -> None:
    """Raise UserError if the file lacks a size, for which the architecture's class would use a default.

    A part of a composite model may lack sizes, since save_pretrained writes only differences from the defaults; those
    are logged.
    """
    text = settings.get_text_config(decoder=True)
    part = next((name for name in settings.sub_configs if getattr(settings, name, None) is text), None)
    own = config.get(part) if part else None
    missing = _default_sizes(text, own if isinstance(own, dict) else config)
    if missing and isinstance(own, dict):
        taken = ", ".join(f"{name} {value}" for name, value in missing.items())
        LOGGER.info("%s: %s lacks sizes, for which transformers' defaults are taken: %s", where, part, taken)
    elif missing:
        raise UserError(
            f"{where}: has no {next(iter(missing))}, which the architecture {config['model_type']} needs; "
            "fetch the model again"
        )


def attribute(text: Any, name: str) -> Any:
    """Return an attribute of a config, the largest value if layers differ, None if there is none."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers/integrations/heterogeneity: AmbiguousGlobalPerLayerAttributeError
        values = (getattr(layer, name, None) for layer in text.per_layer_config)
        return max((value for value in values if value is not None), default=None)


def _aliases(text: Any, name: str) -> set[str]:
    """Return the names that a config class accepts for one of its fields."""
    pairs = text.attribute_map.items()
    return {name} | {usual for usual, own in pairs if own == name} | {own for usual, own in pairs if usual == name}


def _default_sizes(text: Any, own: dict[str, Any]) -> dict[str, int]:
    """Return the sizes that a file lacks, each with the default of its config class."""
    return {
        field.name: field.default
        for field in (fields(text) if is_dataclass(text) else ())
        if isinstance(field.default, int)
        and not isinstance(field.default, bool)
        and (names := _aliases(text, field.name)) & set(SIZES)
        and not names & own.keys()
        # Some classes read older names of a key.
        and attribute(text, field.name) == field.default
    }


@contextmanager
def limited_modules(where: Path) -> Iterator[None]:
    """Raise UserError if more than MOST_MODULES are built."""
    from torch.nn.modules.module import register_module_module_registration_hook

    built = 0

    def count(*_: Any) -> None:
        nonlocal built
        built += 1
        if built > MOST_MODULES:
            raise UserError(f"{where}: describes a model of more than {MOST_MODULES:,} modules; correct its sizes")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def check_countable(text: Any, where: Path) -> None:
    """Raise UserError for a size that is not a positive integer."""
    for name in NEVER_ZERO:
        value = attribute(text, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{where}: {name} is {shown(value)}; use a whole number of at least 1")
