"""What a merge by hand takes from an adapter's directory beside its tensors: tokenizer, chat template, stop tokens.

An adapter was trained with them; the base's own would ask the merged model in another way than it was taught.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from zerolora.errors import UserError, shown
from zerolora.files import write_json
from zerolora.log import LOGGER
from zerolora.model import added_tokens, foreign
from zerolora.model.architecture import tokenizer_of
from zerolora.model.foreign import GENERATION, TOKENIZER, TOKENIZER_CONFIG
from zerolora.model.prompt_format import vocabulary

TEMPLATE = "chat_template.jinja"
BESIDE = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")
"""Files of a tokenizer, which belong together."""


def check_carried(adapter: Path, base: Path) -> None:
    """Raise UserError if the tokenizer of an adapter's directory is none of this base: it has another number for a
    token, or more tokens than the base has rows for."""
    foreign.check_tokenizer(adapter)
    foreign.generation_config(adapter)
    if not _has_tokenizer(adapter):
        return
    theirs = vocabulary(adapter).get_vocab()
    ours = vocabulary(base).get_vocab() if (base / TOKENIZER).is_file() else tokenizer_of(base).get_vocab()
    path = adapter / TOKENIZER
    for token, number in theirs.items():
        if ours.get(token, number) != number:
            raise UserError(
                f"{path}: {shown(token)} is token {number}, and {ours[token]} of the base's tokenizer; write the base "
                "that the adapter was trained on, or remove the tokenizer's files from the adapter"
            )
    config = foreign.model_config(base)
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    last = max(theirs, key=lambda token: theirs[token])
    if rows is not None and theirs[last] >= rows:
        raise UserError(
            f"{path}: {shown(last)} is token {theirs[last]}, and the base has {rows} rows of its embedding; resize the "
            "base with resize_token_embeddings, save it with the adapter's tokenizer, and take that as the base"
        )


def carry(adapters: Sequence[Path], base: Path, model: Path) -> None:
    """Write what an adapter's directory has of its own into the merged model's, instead of the base's files, and log
    it. Of several adapters nothing is taken."""
    for adapter in adapters:
        wanted = (*(BESIDE if _has_tokenizer(adapter) else ()), TEMPLATE, GENERATION)
        names = [name for name in wanted if (adapter / name).is_file()]
        if not names:
            continue
        if len(adapters) > 1:
            LOGGER.warning(
                "%s: its %s are left out; of several adapters the base's are taken", adapter, ", ".join(names)
            )
            continue
        for name in names:
            shutil.copyfile(adapter / name, model / name)
        if TOKENIZER in names:
            for name in BESIDE:
                if name not in (*names, TOKENIZER_CONFIG):
                    (model / name).unlink(missing_ok=True)
            _keep_template(adapter, base, model)
            if GENERATION not in names:
                _stop_as(adapter, model)
        LOGGER.info("%s: its %s replace the base's", adapter, ", ".join(names))


def _has_tokenizer(adapter: Path) -> bool:
    """Return whether a directory has a tokenizer that is not the base's with tokens of `zerolora train` added."""
    return (adapter / TOKENIZER).is_file() and not (adapter / added_tokens.FILE).is_file()


def _keep_template(adapter: Path, base: Path, model: Path) -> None:
    """Leave one chat template: the adapter's, or the base's if the adapter has none. A file of its own is read first,
    then the tokenizer's config."""
    settings = foreign.tokenizer_config(model)
    if (adapter / TEMPLATE).is_file():
        return
    if settings.get("chat_template"):
        (model / TEMPLATE).unlink(missing_ok=True)
    elif template := foreign.tokenizer_config(base).get("chat_template"):
        write_json(model / TOKENIZER_CONFIG, settings | {"chat_template": template})


def _stop_as(adapter: Path, model: Path) -> None:
    """Let the model stop at the last token of the adapter's tokenizer as well."""
    token = foreign.tokenizer_config(adapter).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    number = vocabulary(adapter).token_to_id(token) if token else None
    generation, config = foreign.generation_config(model), foreign.model_config(model)
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if number is not None and number not in ends:
        write_json(model / GENERATION, generation | {"eos_token_id": [*ends, number]})
