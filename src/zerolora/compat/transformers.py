"""transformers: a forward pass that returns losses, chat templates without today's date, a model read from GGUF.

torch is imported by nothing here, as data/ needs no torch to render a template.
"""

import types
from collections.abc import Callable
from typing import Any

from zerolora.compat.versions import patch

VERSION = "5.23.0"
OLDER = ("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23")


@patch(
    "transformers",
    VERSION,
    upstream="none found; transformers takes a loss_function, but makes all logits before it",
    untested=OLDER,
    features=("transformers:PreTrainedModel.get_decoder", "transformers:PreTrainedModel.get_output_embeddings"),
)
def replace_forward(model: Any, of_model: Callable[..., Any], of_head: Callable[..., Any]) -> None:
    """Let a causal language model and its output head be called through `of_model` and `of_head`, in place; both are
    methods that fall back on type(self).forward. A wrapping module would change the names of all parameters, which peft
    and checkpoints go by."""
    head = model.get_output_embeddings()
    head.forward = types.MethodType(of_head, head)
    model.forward = types.MethodType(of_model, model)


@patch(
    "transformers",
    VERSION,
    upstream="none found; apply_chat_template takes twice as long and tells templates today's date",
    untested=OLDER,
    features=("transformers.utils.chat_template_utils:_compile_jinja_template",),
)
def compile_template(source: str) -> Any:
    """Return a chat template compiled in transformers' sandbox: a jinja2.Template, which takes the date that it is told
    and writes many conversations at half the time of apply_chat_template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source)


@patch(
    "transformers",
    VERSION,
    upstream="none found; transformers compiles them when it reads the first model of a process",
    untested=OLDER,
    features=("transformers.conversion_mapping:get_checkpoint_conversion_mapping",),
)
def compile_conversions() -> None:
    """Compile the patterns, some 900, by which transformers renames the weights of all its models.

    Ranks forked after this have them; a process that reads a model without them takes 0.3 CPU-seconds to compile them.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")  # of no model: the first call compiles those of all


@patch(
    "transformers",
    VERSION,
    upstream="none found; the error says that GGUF models are not serializable",
    untested=OLDER,
    features=("transformers:PreTrainedModel.save_pretrained",),
)
def forget_gguf(model: Any) -> None:
    """Let a model that was read from GGUF be saved: its weights are dequantized already, but save_pretrained refuses
    as long as it calls itself quantized."""
    for owner, names in (
        (model, ("hf_quantizer", "is_quantized", "quantization_method")),
        (model.config, ("quantization_config",)),
    ):
        for name in names:
            if name in vars(owner):
                delattr(owner, name)


@patch(
    "transformers",
    VERSION,
    upstream="none found; from_pretrained and save_pretrained do it to whole models only",
    untested=OLDER,
    features=(
        "transformers.conversion_mapping:get_model_conversion_mapping",
        "transformers.core_model_loading:rename_source_key",
        "transformers.core_model_loading:revert_weight_conversion",
    ),
)
def stored_names(model: Any) -> "StoredNames":
    """Return how the weights of a built model are called in its checkpoints, which may be older than the class, and
    how those that it keeps in another shape are converted."""
    return StoredNames(model)


class StoredNames:
    """The names of a model's weights in its checkpoints, which may be older than the class.

    transformers renames tensors as it reads them, and joins or splits some: the weights of all experts of a layer are
    one parameter of the model and several tensors on disk (conversion_mapping.py).
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
        """Return the weight of the model that a stored tensor is, or is a part of; and whether it has to be converted.

        A tensor that is converted to several weights has the name of one of them.
        """
        name, pattern = self._renamed(stored)
        return name, pattern is not None

    def converted(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the weights of the model that are made of these stored tensors, all of one weight's."""
        from copy import deepcopy

        renamed = {name: self._renamed(name) for name in stored}
        target, first = next(iter(renamed.values()))
        converter = deepcopy(next(each for each in self._converters if first in each.source_patterns))
        for name, tensor in stored.items():
            _, pattern = renamed[name]
            assert pattern is not None
            converter.add_tensor(target, name, pattern, tensor)
        found = converter.convert(target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def stored(self, weights: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Return the tensors, of these names, that `converted` made the weights of."""
        from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

        found = revert_weight_conversion(self.model, weights)
        if found.keys() != set(names):  # an older checkpoint: the same tensors under other names
            assert len(found) == len(names), f"{sorted(found)[:3]} are not {sorted(names)[:3]}"
            found = dict(zip(sorted(names, key=dot_natural_key), sorted(found.items(), key=_natural), strict=True))
            found = {name: tensor for name, (_, tensor) in found.items()}
        return dict(found)

    def _renamed(self, stored: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        found: tuple[str, str | None] = rename_source_key(
            stored, self._renamings, self._converters, self.model.base_model_prefix, self.shapes
        )
        return found


def _natural(item: tuple[str, Any]) -> Any:
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(item[0])
