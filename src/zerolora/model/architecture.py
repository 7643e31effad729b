"""The class of a base model, and its language model. transformers is imported lazily."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from zerolora.bounded import within_bounds
from zerolora.compat.bitsandbytes_patches import PACKED
from zerolora.errors import UserError, shown
from zerolora.model import foreign
from zerolora.model.bounded_tokenizer import BoundedTokenizer


def config_of(directory: Path) -> Any:
    """Return the config of the model in a directory, without running code from there.

    Raises UserError if transformers cannot read config.json or generation_config.json.
    """
    from transformers import AutoConfig, GenerationConfig

    foreign.model_config(directory)
    path, generation = directory / foreign.CONFIG, foreign.generation_config(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        path = directory / foreign.GENERATION
        GenerationConfig.from_dict(generation)
        return config
    except Exception as error:  # config classes raise errors of many types
        raise UserError(
            f"{path}: transformers cannot read it ({foreign.reason(error)}); {foreign.FETCH_AGAIN}"
        ) from None


def tokenizer_of(directory: Path) -> Any:
    """Return the tokenizer of a model's or an adapter's directory, without running code from there.

    Raises UserError if transformers cannot read its files.
    """
    from transformers import AutoTokenizer

    foreign.check_tokenizer(directory)
    if (directory / foreign.CONFIG).exists():
        foreign.model_config(directory)
    with foreign.tokenizer_errors(directory):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if tokenizer.is_fast:
        tokenizer._tokenizer = BoundedTokenizer(tokenizer._tokenizer, str(directory / foreign.TOKENIZER))
    # Other libraries call this method as well.
    tokenizer.apply_chat_template = partial(  # type: ignore[method-assign]
        _rendered, type(tokenizer).apply_chat_template, tokenizer
    )
    return tokenizer


def _rendered(render: Callable[..., Any], tokenizer: Any, *arguments: Any, **options: Any) -> Any:
    """Render a conversation within the bounds for templates. Raises UserError for any error of the template."""
    try:
        return within_bounds("the chat template", lambda: render(tokenizer, *arguments, **options))
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _refused()(f"the chat template refuses it: {reason}") from None


@cache
def _refused() -> type[UserError]:
    """Return the error class for a refused conversation: also a jinja2.TemplateError, on which lm-evaluation-harness
    retries without the system prompt."""
    from jinja2 import TemplateError

    class RefusedError(UserError, TemplateError):
        """A conversation that a chat template refuses."""

    return RefusedError


def auto_class(config: Any, where: Path = Path("config.json")) -> Any:
    """Return transformers' auto class for a language model or a vision-language model: of those that have the config's
    class, the one that makes what `architectures` names, which is also what other tools load.

    Raises UserError, naming the file `where`, if the architecture has neither.
    """
    fitting = _fitting(config)
    if not fitting:
        raise UserError(
            f"{where}: model_type is {shown(config.model_type)}, which transformers has no decoder for; use a language "
            "model or a vision-language model"
        )
    published = config.architectures or ()
    return next((auto for auto in fitting if _class_of(auto, config).__name__ in published), fitting[0])


def _fitting(config: Any) -> list[Any]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    autos = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return [auto for auto in autos if type(config) in auto._model_mapping]


def model_class(config: Any) -> Any:
    """Return the model class that auto_class builds."""
    return _class_of(auto_class(config), config)


def larger_class(config: Any) -> str | None:
    """Return the name of the model class if it is not that of the language model alone, of which there is one too."""
    fitting = _fitting(config)
    return model_class(config).__name__ if auto_class(config) is not fitting[0] else None


def _class_of(auto: Any, config: Any) -> Any:
    result = auto._model_mapping[type(config)]
    return result[0] if isinstance(result, tuple) else result


PROPERTIES = ("device", "dtype", "shape")
"""Of a weight, that say nothing of its values."""


def built_on_meta(config: Any, attention: str | None = None) -> Any:
    """Return a model of this config on the meta device.

    Raises transformers' ValueError if the architecture lacks the named implementation of attention.
    """
    import torch

    options = {} if attention is None else {"attn_implementation": of_language_model(config, attention)}
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=False, **options)


def of_language_model(config: Any, attention: str) -> str | dict[str, str]:
    """Return an implementation of attention as transformers takes it for a model's language model alone: towers of
    images and sounds, which no row here has, may lack it, and keep their own."""
    text = config.get_text_config()
    part = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    return attention if part is None else {"": attention, part: attention}


def role(module: Any) -> str:
    """Return what the name of a module's class says that it is: norm, experts, router or other."""
    name = type(module).__name__.lower()
    return next((role for role in ("norm", "experts", "router") if role in name), "other")


def stacked_experts(model: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the parameters in which a model stacks the weights of all experts of a layer, by the path of
    their module, and by their name there."""
    return {
        path: shapes
        for path, module in model.named_modules()
        if role(module) == "experts" and (shapes := _three_dimensional(module))
    }


def stacked_names(model: Any) -> list[str]:
    """Return the names of the parameters in which a model stacks the weights of experts."""
    return [f"{path}.{name}" for path, shapes in stacked_experts(model).items() for name in shapes]


def is_stacked(module: Any, name: str) -> bool:
    """Return whether a module's own parameter has the weights of all experts of a layer."""
    return role(module) == "experts" and name in _three_dimensional(module)


def _three_dimensional(module: Any) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in own_shapes(module).items() if len(shape) == 3}


def own_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's own parameters, also where ZeRO-3 has sharded them, or that are in 4 bits."""
    packed = getattr(module, PACKED, {})
    own = dict(module.named_parameters(recurse=False))
    return {
        name: tuple(packed[name].shape if name in packed else getattr(each, "ds_shape", each.shape))
        for name, each in own.items()
    }


def left_out(model: Any) -> list[str]:
    """Return the paths of a model's linear modules that all-linear leaves out: routers, and those whose weight another
    module reads, as Mamba's fused kernels do, past any adapter."""
    import torch

    modules = dict(model.named_modules())
    linears = [path for path, module in modules.items() if isinstance(module, torch.nn.Linear)]
    routers = _routers(model, modules, linears)
    kinds: dict[str, Any] = {path: type(modules[path.rpartition(".")[0]]) for path in linears}
    return [path for path in linears if path in routers or path.rpartition(".")[2] in _weights_read(kinds[path])]


@cache
def _weights_read(kind: Any) -> frozenset[str]:
    """Return the submodules whose whole weight a class of modules reads, and not only its properties, by their names.
    BLOOM reads slices, where it imitates the rounding of ranks that share a layer."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # a class without source
        return frozenset()
    weights = {
        node: node.value.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "weight"
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in PROPERTIES):
            weights.pop(node.value, None)  # type: ignore[call-overload]  # of any expression
    return frozenset(weights.values())


def _routers(model: Any, modules: dict[str, Any], linears: list[str]) -> list[str]:
    """Return the paths of the linear modules that choose a token's experts: in the block of experts, with an output for
    each, and not among the projections of an MLP; or in a router's class."""
    parents = [path.rpartition(".")[0] for path in linears]
    blocks = {
        (path.rpartition(".")[0], path, shape[0])
        for path, shapes in stacked_experts(model).items()
        for shape in shapes.values()
    }
    return [
        path
        for path, parent in zip(linears, parents, strict=True)
        if role(modules[parent]) == "router"
        or any(
            modules[path].out_features == count
            and path.startswith(f"{block}.")
            and not path.startswith(f"{experts}.")
            and (parent == block or parents.count(parent) == 1)
            for block, experts, count in blocks
        )
    ]


def other_parts(model: Any) -> list[str]:
    """Return the paths of a vision-language model's parts beside the language model: towers, projectors."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is head:  # ModernBERT names its head "decoder", which get_decoder returns
        decoder = model.base_model
    inside = {id(parameter) for part in (decoder, head) if part is not None for parameter in part.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    depth = path.count(".") + 1
    return sorted({".".join(name.split(".")[:depth]) for name in outside})
