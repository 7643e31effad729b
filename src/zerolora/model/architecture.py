"""The class of a base model, and its part that reads and writes text. transformers is imported when it is needed."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from zerolora.bounded import within_bounds
from zerolora.errors import UserError, shown
from zerolora.model import foreign


def config_of(directory: Path) -> Any:
    """Return the config of the model in a directory; no code from there is run.

    Raises UserError if the config, or that of its generation, is none that transformers reads.
    """
    from transformers import AutoConfig, GenerationConfig

    foreign.model_config(directory)
    path, generation = directory / foreign.CONFIG, foreign.generation_config(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        path = directory / foreign.GENERATION
        GenerationConfig.from_dict(generation)
        return config
    except Exception as error:  # config classes raise errors of many types for what they cannot read
        raise UserError(
            f"{path}: is none that transformers reads ({foreign.reason(error)}); {foreign.FETCH_AGAIN}"
        ) from None


def tokenizer_of(directory: Path) -> Any:
    """Return the tokenizer of a model's or an adapter's directory; no code from there is run.

    Raises UserError if its files are none that transformers reads.
    """
    from transformers import AutoTokenizer

    foreign.check_tokenizer(directory)
    if (directory / foreign.CONFIG).exists():
        foreign.model_config(directory)
    with foreign.tokenizer_errors(directory):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # Also where other libraries render the template.
    tokenizer.apply_chat_template = partial(  # type: ignore[method-assign]
        _rendered, type(tokenizer).apply_chat_template, tokenizer
    )
    return tokenizer


def _rendered(render: Callable[..., Any], tokenizer: Any, *arguments: Any, **options: Any) -> Any:
    """Render a conversation in the bounds of every template. Raises UserError for whatever the template raises."""
    try:
        return within_bounds("the chat template", lambda: render(tokenizer, *arguments, **options))
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _refused()(f"the chat template refuses it: {reason}") from None


@cache
def _refused() -> type[UserError]:
    """Return the class of a template's refusal: jinja2's as well, at which lm-evaluation-harness tries a conversation
    without its system prompt."""
    from jinja2 import TemplateError

    class RefusedError(UserError, TemplateError):
        """A conversation that a chat template refuses."""

    return RefusedError


def auto_class(config: Any, where: Path = Path("config.json")) -> Any:
    """Return the auto class that builds a model which generates text: of a language model, or of a vision-language one.

    Raises UserError, which names the file `where`, if transformers has neither for the architecture.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UserError(
        f"{where}: model_type is {shown(config.model_type)}, which transformers has no decoder for; write a language "
        "model or a vision-language model"
    )


def model_class(config: Any) -> Any:
    """Return transformers' class of the model that auto_class builds."""
    found = auto_class(config)._model_mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def takes_own_attention(model: Any) -> bool:
    """Return whether a model, or its class, computes with this project's attention, which gets no mask
    (train/attention.py). One without _supports_flash_attn needs a mask, as Llama 4 for its chunks."""
    return bool(model._supports_attention_backend and model._supports_flash_attn)


def built_on_meta(config: Any, attention: str | None = None) -> Any:
    """Return a model of this config on the meta device: its modules, and the names and shapes of its weights.

    Raises ValueError, transformers' own, if the architecture has not the named implementation of attention.
    """
    import torch

    options = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=False, **options)


def other_parts(model: Any) -> list[str]:
    """Return the paths of the parts of a vision-language model that are not the language model: towers, projectors.

    Empty for a language model.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is head:  # ModernBERT's head is named decoder, which transformers takes for one
        decoder = model.base_model
    inside = {id(parameter) for part in (decoder, head) if part is not None for parameter in part.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    depth = path.count(".") + 1
    return sorted({".".join(name.split(".")[:depth]) for name in outside})
