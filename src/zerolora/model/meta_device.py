"""Builds a model on torch's meta device to count its parameters, for architectures without a file in families/."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerolora.compat.transformers_patches import quantizable_paths
from zerolora.errors import UserError, shown
from zerolora.model.architecture import auto_class, other_parts, takes_own_attention
from zerolora.model.meta_guards import IGNORED, attribute, check_complete, check_countable, check_sizes, limited_modules
from zerolora.model.spec import ModelSpec, Module, supported_attentions

NARROW_SOFTMAX = ("falcon", "gpt2", "gpt_oss", "mt5", "t5")
"""Families whose eager attention computes its softmax in the width of the scores: modeling_<family>.py."""


def count_on_meta_device(config: dict[str, Any], where: Path) -> ModelSpec:
    """Return the spec of the architecture that a config.json describes; `where` names its file in messages.

    Raises UserError if transformers cannot build it.
    """
    check_sizes(config, where)
    model = build_on_meta(config, where)
    # In a hybrid, a layer may have one name whatever it holds, such as mixer.
    if not any(
        "attn" in f"{name} {type(each).__name__}".replace("ttention", "attn") for name, each in model.named_modules()
    ):
        raise UserError(
            f"{where}: a {config['model_type']} has no attention, and only layers with attention can be estimated; "
            "write a model that has"
        )
    modules = _merge_layers(list(_owners(model)))
    text = model.config.get_text_config(decoder=True)
    check_countable(text, where)

    def of(*names: str, default: Any = 0) -> Any:
        """Return the first of these attributes of the text config that is set."""
        return next((value for name in names if (value := attribute(text, name)) is not None), default)

    heads, hidden = of("num_attention_heads", "n_head", default=1), of("hidden_size", "d_model", "n_embd")
    # Experts in one three-dimensional parameter are named after the parameter instead of a module.
    names = {module.name for module in modules} | {name for module in modules for name, _ in module.weights}
    heads_own = [name for module in modules if module.kind == "head" for name, _ in module.weights]
    rotary = any("rotary" in name for name, _ in model.named_modules()) or hasattr(text, "rope_parameters")
    norms = _layer_norms(modules, hidden)
    both, capped = model.config.is_encoder_decoder, bool(of("attn_logit_softcapping"))
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
        rotary=float(_partial_rotary(text)) if rotary else 0.0,
        softcap_attention=capped,
        softcap_logits=bool(of("final_logit_softcapping")),
        attention_dropout=of("attention_dropout", "attn_pdrop"),
        hidden_dropout=of("hidden_dropout", "residual_dropout", "resid_pdrop", "dropout"),
        scaled_embedding=bool(of("scale_embedding", default="gemma" in config["model_type"])),
        experts=of("num_local_experts", "num_experts", "n_routed_experts"),
        experts_per_token=of("num_experts_per_tok", "num_experts_per_token"),
        softmax_in_fp32=config["model_type"] not in NARROW_SOFTMAX,
        latent=_latent(text, names, where),
        sinks="sinks" in names,
        attentions=supported_attentions(
            takes_own_attention(model), model._supports_sdpa, softcap=capped, sinks="sinks" in names
        ),
        encoder_layers=of("encoder_layers", "num_layers", "num_hidden_layers") if both else 0,
        counted="meta device",
    )


def build_on_meta(config: dict[str, Any], where: Path) -> Any:
    """Return the model that a config.json describes on the meta device, without what a classifier adds.

    Raises UserError, which names the file `where`, if transformers cannot build it.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family, config = config["model_type"], {key: value for key, value in config.items() if key not in IGNORED}
    if family not in CONFIG_MAPPING:
        raise UserError(
            f"{where}: model_type is {shown(family)}, which this transformers has no class for; "
            "write the name of an architecture that it has (code from a model's repository is never run)"
        )
    try:
        factory = CONFIG_MAPPING[family]
        # As from_pretrained reads a file, in which an infinite number is {"__float__": "Infinity"}.
        settings = factory.from_dict(factory._decode_special_floats(config))
        check_complete(settings, config, where)
        auto: Any = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else auto_class(settings, where)
        with torch.device("meta"), limited_modules(where):
            return auto.from_config(settings, trust_remote_code=False)
    except UserError:
        raise
    # Config and model classes raise different errors for what they cannot build: KeyError, TypeError, RuntimeError, ...
    except Exception as error:
        # huggingface_hub's StrictDataclassFieldValidationError has a message of several lines.
        why = " ".join(str(error).split())
        raise UserError(
            f"{where}: a {family} cannot be built from it ({why:.240}); correct the value or fetch it again"
        ) from None


@dataclass(frozen=True)
class _Owner:
    """A module of the built model: the layer number in its path, -1 without, and the module with {} in its place."""

    stack: str
    index: int
    module: Module


def _owners(model: Any) -> Iterator[_Owner]:
    seen: set[int] = set()
    head = model.get_output_embeddings()
    outside = () if model.config.is_encoder_decoder else tuple(other_parts(model))
    quantizable = frozenset(quantizable_paths(model))
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
        if f"{path}.".startswith(tuple(f"{part}." for part in outside)):
            kind = "outside"
        index = int(parts[at]) if at < len(parts) else -1
        owner = Module(template, kind, weights, 1, inputs, outputs, quantizable=not inputs or path in quantizable)
        yield _Owner(".".join(parts[:at]), index, owner)


def _kind(module: Any, head: Any) -> tuple[str, int, int]:
    """Return the kind of a module and, for a linear module, its inputs and outputs."""
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


def _merge_layers(owners: list[_Owner]) -> tuple[Module, ...]:
    """Return the modules, each once, with the numbers of the layers that have it if not all have it."""
    sizes: dict[str, set[int]] = defaultdict(set)
    found: dict[Module, list[int]] = defaultdict(list)
    for owner in owners:
        sizes[owner.stack].add(owner.index)
        found[owner.module].append(owner.index)
    modules: dict[Module, None] = {}
    for owner in owners:
        each, layers = owner.module, len(sizes[owner.stack])
        if owner.index >= 0:
            numbers = () if found[each] == list(range(layers)) else tuple(found[each])
            each = replace(each, count=len(found[each]), layers=numbers)
        modules[each] = None
    return tuple(modules)


def _layer_norms(modules: tuple[Module, ...], hidden: int) -> int:
    """Return the number of norms over the hidden width in a decoder layer, without those of queries and keys."""
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


def _latent(text: Any, names: set[str], where: Path) -> tuple[int, int, int] | None:
    """Return the widths of a head in multi-head latent attention, None if a model of modules with these names has
    another. Raises UserError if it is none that can be traced (layer.py)."""
    plain, rotary, value = (attribute(text, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if not (plain and rotary and value):
        return None
    needed = {"kv_a_proj_with_mqa", "kv_b_proj"} | ({"q_b_proj"} if "q_a_proj" in names else set())
    if missing := sorted(needed - names):
        raise UserError(
            f"{where}: the latent attention of a {text.model_type} has no {missing[0]}, so that its memory "
            "cannot be traced; estimate a model of another architecture"
        )
    return plain, rotary, value


def _partial_rotary(text: Any) -> float:
    parameters = getattr(text, "rope_parameters", None) or {}
    return parameters.get("partial_rotary_factor") or attribute(text, "partial_rotary_factor") or 1.0
