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
