"""`zerolora merge --base`: merge peft adapters into a base from user directories, outside a pipeline."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from zerolora.errors import UserError, shown
from zerolora.files import staged_directory, write_json
from zerolora.log import LOGGER, result
from zerolora.merge.merge import write_model
from zerolora.methods.registry import OWN_FILES
from zerolora.model import added_tokens, foreign
from zerolora.model.architecture import tokenizer_of
from zerolora.model.base_check import check_weights
from zerolora.model.foreign import GENERATION, TOKENIZER, TOKENIZER_CONFIG
from zerolora.model.manifest import check_adapter_files, check_base_directory
from zerolora.model.prompt_format import vocabulary
from zerolora.units import byte_size, counted

TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json")
"""Files that belong together."""


def merge_by_hand(
    base: Path, adapters: Sequence[Path], weights: Sequence[float], output: Path, dequantized: bool = False
) -> None:
    """Write a base plus adapters, each times its weight, to a new directory.

    `weights` may be empty for a single adapter. Raises UserError if the base or an adapter cannot be merged, or if
    `output` exists.
    """
    factors = _factors(adapters, weights)
    _check_base(base)
    _check_output(output, base)
    for adapter in adapters:
        if not adapter.is_dir():
            raise UserError(f"--adapter: {adapter}: there is no such directory; give the directory of an adapter")
        check_adapter_files(adapter, OWN_FILES)
        check_base_directory(adapter, base)
        _check_tokenizer(adapter, base)
    with staged_directory(output) as staged:
        write_model(base, list(zip(adapters, factors, strict=True)), staged, output, dequantized=dequantized)
        _copy_tokenizer_files(adapters, base, staged)
    result(byte_size(sum(path.stat().st_size for path in output.iterdir())))


def _factors(adapters: Sequence[Path], weights: Sequence[float]) -> list[float]:
    if not weights and len(adapters) == 1:
        return [1.0]
    if len(weights) != len(adapters):
        raise UserError(
            f"--weight appears {counted(len(weights), 'time')}, and --adapter {counted(len(adapters), 'time')}; give "
            "a weight for each adapter, in the same order"
        )
    for weight in weights:
        if not math.isfinite(weight) or not weight:
            raise UserError(
                f"--weight: {weight:g} times an adapter is not a model, or the base itself; use a finite number "
                "other than 0, or omit the adapter"
            )
    return list(weights)


def _check_base(base: Path) -> None:
    try:
        check_weights(base)
    except UserError as error:
        raise UserError(f"--base: {error}") from None


def _check_output(output: Path, base: Path) -> None:
    is_empty = output.is_dir() and not any(output.iterdir())
    if (output.exists() or output.is_symlink()) and not is_empty:
        raise UserError(f"--output: {output}: exists already; choose another directory, or remove this one")
    if output.resolve().is_relative_to(base.resolve()):
        raise UserError(f"--output: {output}: is inside the base {base}; choose a directory outside of it")


def _check_tokenizer(adapter: Path, base: Path) -> None:
    """Raise UserError if the tokenizer in an adapter's directory does not fit the base.

    It does not if a token has another number than in the base, or if it has more tokens than the base's embedding rows.
    """
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
                f"{path}: {shown(token)} is token {number}, and {ours[token]} of the base's tokenizer; use the base "
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


def _copy_tokenizer_files(adapters: Sequence[Path], base: Path, model: Path) -> None:
    """Replace the base's tokenizer, chat template and generation config by an adapter's own, and log it.

    The adapter was trained with them. With several adapters, the base's files stay.
    """
    for adapter in adapters:
        wanted = (*(TOKENIZER_FILES if _has_tokenizer(adapter) else ()), TEMPLATE, GENERATION)
        names = [name for name in wanted if (adapter / name).is_file()]
        if not names:
            continue
        if len(adapters) > 1:
            LOGGER.warning(
                "%s: its %s are ignored: with several adapters, the base's files are used", adapter, ", ".join(names)
            )
            continue
        for name in names:
            shutil.copyfile(adapter / name, model / name)
        if TOKENIZER in names:
            for name in TOKENIZER_FILES:
                if name not in (*names, TOKENIZER_CONFIG):
                    (model / name).unlink(missing_ok=True)
            _keep_template(adapter, base, model)
            if GENERATION not in names:
                _add_stop_token(adapter, model)
        LOGGER.info("%s: its %s replace the base's", adapter, ", ".join(names))


def _has_tokenizer(adapter: Path) -> bool:
    """Return whether a directory has a tokenizer other than the base's with tokens added by `zerolora stage train`."""
    return (adapter / TOKENIZER).is_file() and not (adapter / added_tokens.FILE).is_file()


def _keep_template(adapter: Path, base: Path, model: Path) -> None:
    """Keep one chat template: the adapter's, or the base's if the adapter has none.

    transformers reads TEMPLATE first, then the tokenizer's config.
    """
    settings = foreign.tokenizer_config(model)
    if (adapter / TEMPLATE).is_file():
        return
    if settings.get("chat_template"):
        (model / TEMPLATE).unlink(missing_ok=True)
    elif template := foreign.tokenizer_config(base).get("chat_template"):
        write_json(model / TOKENIZER_CONFIG, settings | {"chat_template": template})


def _add_stop_token(adapter: Path, model: Path) -> None:
    """Add the end-of-sequence token of the adapter's tokenizer to the model's stop tokens."""
    token = foreign.tokenizer_config(adapter).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    number = vocabulary(adapter).token_to_id(token) if token else None
    generation, config = foreign.generation_config(model), foreign.model_config(model)
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if number is not None and number not in ends:
        write_json(model / GENERATION, generation | {"eos_token_id": [*ends, number]})
