"""transformers: a replaceable forward pass, chat templates, models from GGUF, and names of stored weights.

Nothing here imports torch, which data/ does not need to render a template.
"""

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zerolora.compat.bitsandbytes_patches import packed
from zerolora.compat.versions import patch


@patch(
    "transformers",
    upstream="none known; transformers takes a loss_function, but makes all logits before it",
    features=("transformers:PreTrainedModel.get_decoder", "transformers:PreTrainedModel.get_output_embeddings"),
)
def replace_forward(model: Any, of_model: Callable[..., Any], of_head: Callable[..., Any]) -> None:
    """Replace the forward methods of a causal language model and its output head by `of_model` and `of_head`, in place.

    Both fall back to type(self).forward. A wrapper module would change the names of all parameters, on which peft and
    checkpoints depend.
    """
    head = model.get_output_embeddings()
    head.forward = types.MethodType(of_head, head)
    model.forward = types.MethodType(of_model, model)


@patch(
    "transformers",
    upstream="none known; apply_chat_template takes twice as long and tells templates today's date",
    features=("transformers.utils.chat_template_utils:_compile_jinja_template",),
)
def compile_template(source: str) -> Any:
    """Compile a chat template in transformers' sandbox to a jinja2.Template, which accepts a date as a variable and
    renders many conversations in half the time of apply_chat_template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source)


@patch(
    "transformers",
    upstream="none known; the error says that GGUF models are not serializable",
    features=("transformers:PreTrainedModel.save_pretrained",),
)
def forget_gguf(model: Any) -> None:
    """Make a model that was read from GGUF savable: its weights are dequantized, but it is marked as quantized, which
    save_pretrained refuses."""
    for owner, names in (
        (model, ("hf_quantizer", "is_quantized", "quantization_method")),
        (model.config, ("quantization_config",)),
    ):
        for name in names:
            if name in vars(owner):
                delattr(owner, name)


@patch(
    "transformers",
    upstream="none known; config, tokenizer and model each parse the file, and each module makes the table of names",
    features=("transformers.modeling_gguf_pytorch_utils:get_gguf_hf_weights_map",),
)
@contextlib.contextmanager
def gguf_parsed_once() -> Iterator[None]:
    """Parse a GGUF file only once within the context: a vocabulary of 50,000 tokens takes 3 CPU-seconds."""
    library: Any = importlib.import_module("gguf")
    parse, table = library.GGUFReader, library.get_tensor_name_map
    parsed = functools.cache(parse)
    library.GGUFReader = lambda file: parsed(str(file))
    library.get_tensor_name_map = functools.cache(table)
    try:
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map = parse, table


@patch(
    "transformers",
    upstream="none known; from_pretrained silently drops tensors of a GGUF file that it has no name for",
    features=(
        "transformers.modeling_gguf_pytorch_utils:TENSOR_PROCESSORS",
        "transformers.modeling_gguf_pytorch_utils:get_gguf_hf_weights_map",
    ),
)
def gguf_names(model: Any) -> set[str]:
    """Return the names of a model's weights in a GGUF file; transformers reads no other tensors."""
    from transformers import modeling_gguf_pytorch_utils as reader

    processor = reader.TENSOR_PROCESSORS.get(model.config.model_type, reader.TensorProcessor)
    options = processor(config=model.config.to_dict())  # type: ignore[no-untyped-call]  # transformers'
    return set(reader.get_gguf_hf_weights_map(model, options))


@patch(
    "transformers",
    upstream="none known; from_pretrained and save_pretrained do it to whole models only",
    features=(
        "transformers.conversion_mapping:get_model_conversion_mapping",
        "transformers.core_model_loading:rename_source_key",
        "transformers.core_model_loading:revert_weight_conversion",
    ),
)
def stored_names(model: Any) -> "StoredNames":
    """Return the names of a model's weights in its checkpoints, which may be older than the class, and the conversions
    of weights that it stores in another shape."""
    return StoredNames(model)


@patch(
    "transformers",
    upstream="none known; only loading with a quantization config decides it",
    features=(
        "transformers.quantizers.base:HfQuantizer.get_modules_to_not_convert",
        "transformers.quantizers.quantizers_utils:should_convert_module",
    ),
)
def quantizable_paths(model: Any) -> list[str]:
    """Return the paths of a model's modules that transformers quantizes, or has quantized, with bitsandbytes.

    Subclasses of Linear are quantized if `quantize_all` makes them plain; routers never are. Source:
    transformers/integrations/bitsandbytes.py, replace_with_bnb_linear.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    return [
        path
        for path, module in model.named_modules()
        if (isinstance(module, Conv1D) or computes_linearly(module) or _is_quantized(module))
        and should_convert_module(path, skipped)
    ]


@patch(
    "transformers",
    upstream="none known; peft has a list of families that it converts targets for",
    features=("transformers.conversion_mapping:get_checkpoint_conversion_mapping",),
)
def former_names(model_type: str) -> tuple[tuple[str, str], ...]:
    """Return what files call the modules of an expert, each with the name of the parameter in which the class stacks
    those of all experts: ("gate_proj", "gate_up_proj")."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import MergeModulelist

    stacked = [
        each
        for each in get_checkpoint_conversion_mapping(model_type) or ()
        if any(isinstance(step, MergeModulelist) for step in getattr(each, "operations", ()))
    ]
    return tuple(
        (source.removesuffix(".weight").rpartition(".")[2], target.rpartition(".")[2])
        for each in stacked
        for target in each.target_patterns
        for source in each.source_patterns
        if source.endswith(".weight")
    )


def _is_quantized(module: Any) -> bool:
    return type(module).__name__ in ("Linear4bit", "Linear8bitLt")


def keeps_rows_apart(modules: Iterable[Any]) -> bool:
    """Return whether the functions of modules that mix rows are those of fla, mamba_ssm and causal_conv1d, which keep
    rows
    apart by their boundaries. transformers' own refuse boundaries (integrations/hub_kernels.py,
    use_kernel_func_from_hub_with_fallback)."""
    kinds = {kind for module in modules for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")}
    places = {kind.__module__ for kind in kinds}
    functions = [each for place in places for each in vars(sys.modules[place]).values() if callable(each)]
    found = [flag for function in functions if (flag := _is_of_package(function)) is not None]
    return bool(found) and all(found)


def _is_of_package(function: Any) -> bool | None:
    """Return whether a function with a fallback is its package's; None for other functions."""
    while isinstance(function, types.FunctionType):
        named = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
        if "is_new_implementation" in named:
            return bool(named["is_new_implementation"])
        function = getattr(function, "__wrapped__", None)
    return None


def computes_otherwise(module: Any) -> bool:
    """Return whether a module is of a subclass of nn.Linear that computes something else, as some routers do."""
    import torch

    if not isinstance(module, torch.nn.Linear) or type(module).forward is torch.nn.Linear.forward:
        return False
    return not (computes_linearly(module) or _is_quantized(module))


def computes_linearly(module: Any) -> bool:
    """Return whether a module's class is nn.Linear, or a subclass with a forward pass of its own that returns what
    nn.Linear's would. A subclass that inherits the forward pass has another purpose."""
    kind: Any = type(module)
    return _computes_linearly(kind)


@functools.cache
def _computes_linearly(kind: Any) -> bool:
    """Compare a class's forward pass with nn.Linear's on small random numbers."""
    import torch

    if kind is torch.nn.Linear:
        return True
    if not issubclass(kind, torch.nn.Linear) or "forward" not in vars(kind):
        return False
    module: Any = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    with torch.device("cpu"):  # models are built within the meta device
        drawn = torch.Generator().manual_seed(0)
        values = torch.rand(2, 4, 5, generator=drawn)
        module.in_features, module.out_features = 5, 3
        module.weight = torch.nn.Parameter(torch.rand(3, 5, generator=drawn))
        for bias in (None, torch.nn.Parameter(torch.rand(3, generator=drawn))):
            module.bias = bias
            expected = torch.nn.functional.linear(values, module.weight, bias)
            try:
                result = kind.forward(module, values)
            except Exception:  # its own attributes are missing
                return False
            if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
                return False
            if not torch.allclose(result, expected, rtol=1e-5, atol=1e-6):
                return False
    return True


@patch(
    "transformers",
    upstream="none known; replace_with_bnb_linear takes modules of type nn.Linear only",
    features=(
        "transformers.integrations.bitsandbytes:Bnb4bitQuantize",
        "transformers.quantizers.auto:AUTO_QUANTIZER_MAPPING",
        "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer._process_model_before_weight_loading",
        "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer.param_needs_quantization",
        "transformers.quantizers.quantizer_bnb_8bit:Bnb8BitHfQuantizer._process_model_before_weight_loading",
    ),
)
@contextlib.contextmanager
def quantize_all(is_stacked: Callable[[Any, str], bool]) -> Iterator[None]:
    """Within the context, make from_pretrained quantize modules of subclasses that compute as nn.Linear too, such as
    Falcon's: they become nn.Linear before it replaces those. In 4 bits, also make it quantize a module's own parameter
    of which `is_stacked` tells that it has the weights of experts."""
    from torch import nn
    from transformers.integrations import bitsandbytes as integration
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name

    mapping: dict[str, Any] = vars(auto)["AUTO_QUANTIZER_MAPPING"]
    operation = vars(integration)["Bnb4bitQuantize"]

    def convert(step: Any, input_dict: dict[str, Any], model: Any = None, **others: Any) -> dict[str, Any]:
        ((name, read),) = input_dict.items()
        if not is_stacked(*get_module_from_name(model, name)):
            converted: dict[str, Any] = operation.convert(step, input_dict, model=model, **others)
            return converted
        tensor = read[0] if isinstance(read, list) else read
        return {name: packed(tensor, step.hf_quantizer.quantization_config)}

    def needs(quantizer: Any, model: Any, param_name: str, **others: Any) -> bool:
        own = Bnb4BitHfQuantizer.param_needs_quantization(quantizer, model, param_name, **others)
        return own or is_stacked(*get_module_from_name(model, param_name))

    def made(quantizer: Any) -> Any:
        return of_experts(quantizer)

    of_experts = type("OfExperts", (operation,), {"convert": convert})
    experts = {"param_needs_quantization": needs, "get_quantize_ops": made}

    def of_plain_modules(kind: Any) -> Any:
        def before_loading(quantizer: Any, model: Any, *arguments: Any, **named: Any) -> Any:
            for module in model.modules():
                if computes_linearly(module):
                    module.__class__ = nn.Linear
            return kind._process_model_before_weight_loading(quantizer, model, *arguments, **named)

        # `kept_as_read` quantizes experts itself.
        own = experts if kind is Bnb4BitHfQuantizer else {}
        return type("OfPlainModules", (kind,), {"_process_model_before_weight_loading": before_loading, **own})

    replaced = {kind: mapping[kind] for kind in ("bitsandbytes_4bit", "bitsandbytes_8bit")}
    mapping.update({kind: of_plain_modules(each) for kind, each in replaced.items()})
    try:
        yield
    finally:
        mapping.update(replaced)


@patch(
    "transformers",
    upstream="none known; from_pretrained shards no quantized model",
    features=(
        "transformers.integrations.bitsandbytes:Bnb4bitDeserialize",
        "transformers.integrations.bitsandbytes:Bnb4bitQuantize",
        "transformers.quantizers.auto:AUTO_QUANTIZER_MAPPING",
        "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer.get_quantize_ops",
        "transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer.param_needs_quantization",
        "transformers.quantizers.quantizers_utils:get_module_from_name",
    ),
)
@contextlib.contextmanager
def kept_as_read(keep: Callable[[Any], Any], device: Any, is_stacked: Callable[[Any, str], bool]) -> Iterator[None]:
    """Within the context, make from_pretrained pass each parameter of a 4-bit model through `keep` once it has been
    read, and quantized on `device` if it is to be, before it reads the next; biases of a model that is stored in 4 bits
    excepted.

    `keep` returns the parameter to use, which may have another shape. `is_stacked` as in `quantize_all`.
    """
    import torch
    from transformers.integrations import bitsandbytes as integration
    from transformers.quantizers import auto
    from transformers.quantizers.quantizers_utils import get_module_from_name

    mapping, operation = vars(auto)["AUTO_QUANTIZER_MAPPING"], vars(integration)["Bnb4bitQuantize"]
    unpacking = vars(integration)["Bnb4bitDeserialize"]
    kind = "bitsandbytes_4bit"
    replaced = mapping[kind]

    def convert(step: Any, input_dict: dict[str, Any], model: Any = None, **others: Any) -> dict[str, Any]:
        result = {}
        for name, read in input_dict.items():
            tensor = read[0] if isinstance(read, list) else read
            if replaced.param_needs_quantization(step.hf_quantizer, model, name):
                (parameter,) = operation.convert(step, {name: tensor.to(device)}, model=model, **others).values()
            elif is_stacked(*get_module_from_name(model, name)):
                parameter = packed(tensor.to(device), step.hf_quantizer.quantization_config)
            else:
                expected = model.get_parameter(name).shape
                assert tensor.shape == expected, f"{name} is {list(tensor.shape)}, not {list(expected)}"
                parameter = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            result[name] = keep(parameter)
        return result

    def read_packed(step: Any, input_dict: dict[str, Any], model: Any = None, **others: Any) -> dict[str, Any]:
        if len(input_dict) == 1:  # a weight that is not quantized
            ((name, read),) = input_dict.items()
            tensor = read[0] if isinstance(read, list) else read
            return {name: keep(torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))}
        moved = {name: (read[0] if isinstance(read, list) else read).to(device) for name, read in input_dict.items()}
        ((name, parameter),) = unpacking.convert(step, moved, model=model, **others).items()
        return {name: keep(parameter)}

    def is_parameter(_: Any, model: Any, param_name: str, **__: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return name in module._parameters

    def made(quantizer: Any) -> Any:
        return kept(quantizer)

    kept = type("KeptAsRead", (operation,), {"convert": convert})
    operations = {"deserialize": type("KeptAsStored", (unpacking,), {"convert": read_packed})}
    own = {
        "param_needs_quantization": is_parameter,
        "get_quantize_ops": made,
        "get_load_operations": lambda _: operations,
    }
    mapping[kind] = type("Keeping", (replaced,), own)
    try:
        yield
    finally:
        mapping[kind] = replaced


@patch(
    "transformers",
    upstream="none known; resize_token_embeddings gathers no weights of a quantized model at stage 3",
    features=("transformers:PreTrainedModel.resize_token_embeddings",),
)
@contextlib.contextmanager
def resizable(model: Any) -> Iterator[None]:
    """Within the context, let resize_token_embeddings gather the sharded embedding of a quantized model, which it takes
    for whole."""
    quantizer = vars(model).pop("hf_quantizer", None)
    try:
        yield
    finally:
        if quantizer is not None:
            model.hf_quantizer = quantizer


@dataclass(frozen=True)
class LoadReport:
    """transformers' report on loading stored tensors into a model."""

    missing: list[str]
    """Parameters without a stored tensor: transformers would initialize them at random."""
    surplus: list[str]
    """Unexpected stored tensors, by the names that they would have in the model."""
    wrong: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Shapes in the files and in the model, by the model's name."""
    unreadable: dict[str, str]
    """Reason, by parameter, why the stored tensors cannot be converted."""


@patch(
    "transformers",
    upstream="none known; from_pretrained reports after it has read all weights and drawn the missing ones",
    features=(
        "transformers.conversion_mapping:get_model_conversion_mapping",
        "transformers.core_model_loading:convert_and_load_state_dict_in_model",
        "transformers.modeling_utils:LoadStateDictConfig",
        "transformers:PreTrainedModel._adjust_missing_and_unexpected_keys",
    ),
)
def load_report(model: Any, stored: dict[str, Any]) -> LoadReport:
    """Return transformers' report on loading `stored` into a model, both on the meta device.

    The model's parameters are replaced; nothing is computed.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    mapping: Any = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(device_map={"": "meta"}, weight_mapping=mapping)
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        result, _ = convert_and_load_state_dict_in_model(model, stored, options, disk_offload_index=None)
        persistent = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        lacking = result.missing_keys & persistent
        model.tie_weights(missing_keys=result.missing_keys, recompute_mapping=False)
        lacking &= result.missing_keys
        model._adjust_missing_and_unexpected_keys(result)
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    return LoadReport(
        sorted(lacking - result.conversion_errors.keys(), key=_dotted),
        sorted(result.unexpected_keys, key=_dotted),
        {name: (tuple(shape), tuple(expected)) for name, shape, expected in sorted(result.mismatched_keys)},
        {name: " ".join(str(why).split()) for name, why in result.conversion_errors.items()},
    )


class StoredNames:
    """The names of a model's weights in its checkpoints, which may be older than the class.

    transformers renames tensors when it loads them, and joins or splits some: the weights of all experts of a layer are
    one parameter, but several tensors on disk (conversion_mapping.py).
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model = model
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]

    def of_model(self, stored: str) -> tuple[str, bool]:
        """Return the weight that a stored tensor is, or is a part of, and whether it needs conversion.

        For a tensor that is converted to several weights, the name is that of one of them.
        """
        name, pattern = self._renamed(stored)
        return name, pattern is not None

    def converted(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Convert the stored tensors of one weight, which may be converted to several.

        They are stacked in the order in which they are added, so that expert 10 must not come before expert 2, as it
        does in a file's header.
        """
        from copy import deepcopy

        stored = {name: stored[name] for name in sorted(stored, key=_dotted)}
        renamed = {name: self._renamed(name) for name in stored}
        target, first = next(iter(renamed.values()))
        converter = deepcopy(next(each for each in self._converters if first in each.source_patterns))
        for name, tensor in stored.items():
            _, pattern = renamed[name]
            assert pattern is not None
            converter.add_tensor(target, name, pattern, tensor)
        result = converter.convert(target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}

    def stored(self, weights: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Convert weights back to the stored tensors of these names."""
        from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

        result = revert_weight_conversion(self.model, weights)
        if result.keys() != set(names):  # an older checkpoint: the same tensors under other names
            assert len(result) == len(names), f"{sorted(result)[:3]} are not {sorted(names)[:3]}"
            result = dict(zip(sorted(names, key=dot_natural_key), sorted(result.items(), key=_natural), strict=True))
            result = {name: tensor for name, (_, tensor) in result.items()}
        return dict(result)

    def _renamed(self, stored: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        result: tuple[str, str | None] = rename_source_key(
            stored, self._renamings, self._converters, prefix, self.shapes
        )
        if result[0] not in self.shapes and stored in self.shapes:  # as convert_and_load_state_dict_in_model
            result = rename_source_key(stored, [], [], prefix, self.shapes)
        return result


def _natural(item: tuple[str, Any]) -> Any:
    return _dotted(item[0])


def _dotted(name: str) -> Any:
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(name)
