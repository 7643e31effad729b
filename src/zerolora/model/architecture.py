"""The class of a base model, and its language model. transformers is imported lazily."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from zerolora.bounded import within_bounds
from zerolora.errors import UserError, shown
from zerolora.model import foreign


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
    """Return transformers' auto class for a language model or a vision-language model.

    Raises UserError, naming the file `where`, if the architecture has neither.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UserError(
        f"{where}: model_type is {shown(config.model_type)}, which transformers has no decoder for; use a language "
        "model or a vision-language model"
    )


def model_class(config: Any) -> Any:
    """Return the model class that auto_class builds."""
    result = auto_class(config)._model_mapping[type(config)]
    return result[0] if isinstance(result, tuple) else result


def takes_own_attention(model: Any) -> bool:
    """Return whether a model, or its class, can compute with this project's attention, without a mask
    (train/attention.py). A class without _supports_flash_attn needs a mask, as Llama 4 does for its chunks."""
    return bool(model._supports_attention_backend and model._supports_flash_attn)


def built_on_meta(config: Any, attention: str | None = None) -> Any:
    """Return a model of this config on the meta device.

    Raises transformers' ValueError if the architecture lacks the named implementation of attention.
    """
    import torch

    options = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=False, **options)


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
