"""Readers of other programs' files: each checks every key that this project uses, by a class of its keys.

They return the file's own object, since an absent key and null differ, and callers copy keys that nothing here reads.
Each reader raises UserError with one line: file, key, value seen, expected type.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Predicate
from pydantic import Field

from zerolora import json_file
from zerolora.errors import CONTROLS, UserError, shown
from zerolora.files import MANIFEST, read_json
from zerolora.json_kinds import (
    Count,
    Expected,
    FileName,
    Flag,
    JsonObject,
    Null,
    Number,
    PathBelow,
    Positive,
    Text,
    Whole,
    check,
)

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ADAPTER_CONFIG = "adapter_config.json"
SMALL = 16 << 20
"""Maximum bytes of a config; real ones have kilobytes. A larger file, such as weights under this name, is not read."""
LARGE = 128 << 20
"""Maximum bytes of a list of files or tensors, or of a vocabulary."""
FETCH_AGAIN = "fetch or save the model again"

TokenIds = Whole | list[Whole] | Null


class QuantizationKeys(JsonObject):
    """The quantization_config of a config.json."""

    quant_method: Text | Null = None


class _TextModel(JsonObject):
    """The keys of a text model, or of the text part of a vision-language model."""

    architectures: list[Text] | Null = None
    tie_word_embeddings: Flag | Null = None
    quantization_config: QuantizationKeys | Null = None
    auto_map: dict[str, Any] | Null = None
    rope_scaling: dict[str, Any] | Null = None
    rope_parameters: dict[str, Any] | Null = None
    torch_dtype: Text | Null = None
    dtype: Text | dict[str, Any] | Null = None  # an object by part, in a composite model
    add_cross_attention: Flag | Null = None
    is_encoder_decoder: Flag | Null = None
    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: Whole | Null = None
    # Some architectures have a size for each layer.
    vocab_size: Number | list[Any] | Null = None
    hidden_size: Number | list[Any] | Null = None
    num_hidden_layers: Number | list[Any] | Null = None
    num_attention_heads: Number | list[Any] | Null = None
    num_key_value_heads: Number | list[Any] | Null = None
    head_dim: Number | list[Any] | Null = None
    max_position_embeddings: Number | list[Any] | Null = None
    num_experts_per_tok: Number | list[Any] | Null = None


class ModelKeys(_TextModel):
    """A model's config.json."""

    model_type: Text = ""
    text_config: _TextModel | Null = None


class TokenContent(JsonObject):
    """A token as an object."""

    content: Text


Token = Text | TokenContent | Null


class NamedTemplate(JsonObject):
    """One of several chat templates."""

    name: Text
    template: Text


class TokenizerKeys(JsonObject):
    """A tokenizer_config.json."""

    bos_token: Token = None
    eos_token: Token = None
    unk_token: Token = None
    sep_token: Token = None
    pad_token: Token = None
    cls_token: Token = None
    mask_token: Token = None
    added_tokens_decoder: dict[str, TokenContent] | Null = None
    auto_map: dict[str, Any] | Null = None
    tokenizer_class: Text | Null = None
    model_max_length: Number | Null = None
    add_bos_token: Flag | Null = None
    add_eos_token: Flag | Null = None
    clean_up_tokenization_spaces: Flag | Null = None
    chat_template: Text | list[NamedTemplate] | dict[str, Text] | Null = None


class GenerationKeys(JsonObject):
    """A generation_config.json."""

    bos_token_id: TokenIds = None
    eos_token_id: TokenIds = None
    pad_token_id: Whole | Null = None
    do_sample: Flag | Null = None
    temperature: Number | Null = None
    top_p: Number | Null = None
    min_p: Number | Null = None
    typical_p: Number | Null = None
    repetition_penalty: Number | Null = None
    max_length: Whole | Null = None
    max_new_tokens: Whole | Null = None
    min_length: Whole | Null = None
    num_beams: Whole | Null = None
    top_k: Whole | Null = None


class IndexKeys(JsonObject):
    """A model.safetensors.index.json."""

    metadata: dict[str, Any] | Null = None
    weight_map: dict[str, FileName]


class IndexTotals(JsonObject):
    """Totals in the metadata of a weight index."""

    total_parameters: Number = 0
    total_size: Number = 0


def _is_expression(value: str) -> bool:
    try:
        return bool(re.compile(value))
    except (re.error, OverflowError, RecursionError):
        return False


Expression = Annotated[str, Predicate(_is_expression), Expected("a regular expression")]
ModuleNames = list[Annotated[str, Field(min_length=1), Expected("a name")]]
Modules = Expression | ModuleNames | Null
SavedName = Annotated[
    str,
    Field(min_length=1),
    Predicate(_is_expression),
    Expected("a name, which peft reads as a regular expression"),
]
WithProjections = Annotated[bool, Predicate(lambda value: value), Expected("true, with the projections in the file")]


class AdapterKeys(JsonObject):
    """An adapter_config.json."""

    peft_type: Text = ""
    r: Positive = 1
    lora_alpha: Number = 1
    rank_pattern: dict[Expression, Positive] | Null = None
    alpha_pattern: dict[Expression, Number] | Null = None
    target_modules: Modules = None
    exclude_modules: Modules = None
    feedforward_modules: Modules = None
    layers_pattern: Modules = None
    target_parameters: ModuleNames | Null = None
    trainable_token_indices: list[Count] | dict[str, Annotated[list[Count], Field(min_length=1)]] | Null = None
    init_lora_weights: Flag | Text | Null = None
    layers_to_transform: Count | list[Count] | Null = None
    bias: Annotated[Literal["none", "all", "lora_only"], Expected("none, all or lora_only")] = "none"
    save_projection: WithProjections = True
    lora_dropout: Number | Null = None
    modules_to_save: list[SavedName] | Null = None
    use_dora: Flag | Null = None
    use_rslora: Flag | Null = None
    fan_in_fan_out: Flag | Null = None
    ensure_weight_tying: Flag | Null = None
    lora_bias: Flag | Null = None
    base_model_name_or_path: Text | Null = None
    revision: Text | Null = None
    task_type: Text | Null = None


class FileEntry(JsonObject):
    """A file in a manifest."""

    sha256: Text
    bytes: Count


class BaseKeys(JsonObject):
    """The base model of an adapter."""

    revision: Text | Null = None
    name: Text
    weights: Text


class TokenEntry(JsonObject):
    """A token that the data adds."""

    token: Text
    id: Count
    special: Flag


class SourceKeys(JsonObject):
    """Where a model comes from."""

    source: Text = ""
    path: Text = ""
    package: Text = ""
    version: Text = ""
    file: Text = ""
    repository: Text = ""
    license: Text = ""
    revision: Text | Null = None


class ManifestKeys(JsonObject):
    """A manifest.json, or a stamp."""

    files: dict[PathBelow, FileEntry] = Field({})
    source: SourceKeys = SourceKeys.model_construct()
    license: Text | Null = None
    parameters: Count = 0
    path: Text = ""
    enabled: Flag = True
    converted: Flag = False
    dequantized: Flag = False
    base_model: BaseKeys | Null = None
    from_adapter: dict[str, Any] | Null = None
    untrained: list[Text] = Field([])
    data_manifest_sha256: Text = ""
    sources: list[Text] = Field([])
    read: dict[str, Text] = Field({})
    stop_tokens: list[Text] = Field([])
    pad_token: Text | Null = None
    added_tokens: list[TokenEntry] = Field([])
    chat_template: Text | Null = None


class ArrowFile(JsonObject):
    """A file of a saved data set."""

    filename: FileName


class SavedState(JsonObject):
    """The state.json of a saved data set."""

    files: list[ArrowFile] = Field(alias="_data_files")


class SavedSplits(JsonObject):
    """The dataset_dict.json of saved splits."""

    splits: list[FileName]


class TokenizerFile(JsonObject):
    """A tokenizer.json."""

    model: dict[str, Any]


def model_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a model's directory."""
    return config_file(directory / CONFIG)


def config_file(path: Path, remedy: str = FETCH_AGAIN) -> dict[str, Any]:
    """Return the content of a model's config.json, under any name; infinite numbers are read."""
    return _read(path, ModelKeys, remedy, infinite=True)


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return the tokenizer_config.json of a model's directory, {} if there is none."""
    return _optional(directory / TOKENIZER_CONFIG, TokenizerKeys)


def generation_config(directory: Path) -> dict[str, Any]:
    """Return the generation_config.json of a model's directory, {} if there is none."""
    return _optional(directory / GENERATION, GenerationKeys)


def weight_index(path: Path) -> dict[str, Any]:
    """Return the index of a model's weight files: `weight_map` maps each tensor to its file."""
    index = _read(path, IndexKeys, FETCH_AGAIN, LARGE)
    if not index["weight_map"]:
        raise UserError(f"{path}: weight_map is {{}}; expected the file of each tensor; {FETCH_AGAIN}")
    return index


def adapter_config(directory: Path) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter's directory."""
    named = sorted(path.parent.name for path in directory.glob(f"*/{ADAPTER_CONFIG}"))
    if named and not (directory / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{directory}: has no {ADAPTER_CONFIG}, but an adapter in {', '.join(named[:8])}; give one of these folders"
        )
    return _read(directory / ADAPTER_CONFIG, AdapterKeys, "save the adapter again, with peft's save_pretrained")


def manifest(path: Path, written_by: str, *required: str) -> dict[str, Any]:
    """Return the manifest of a directory, or a stamp, that the command `written_by` writes, with the keys `required`,
    by default `files`."""
    value: dict[str, Any] = read_json(path, written_by)
    remedy = f"delete it and run `{written_by}` again"
    check(value, ManifestKeys, path, remedy)
    for name in required or ("files",):
        if name not in value:
            raise UserError(f"{path}: {name} is missing; {remedy}")
    return value


def adapter_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest that the stage `train` wrote into an adapter's directory; {} if there is none, or if another
    tool wrote the file."""
    path = directory / MANIFEST
    if not path.is_file():
        return {}
    remedy = "remove it if another tool wrote it; else run `zerolora stage train` again"
    value = json_file.read_foreign(path, remedy, LARGE)
    if not isinstance(value.get("files"), dict):
        return {}
    check(value, ManifestKeys, path, remedy)
    return value


def saved_files(directory: Path, written_by: str) -> list[str]:
    """Return the files of a data set that `written_by` saved, in the order of the directory's state.json."""
    files = _read(directory / "state.json", SavedState, f"save the data again, with {written_by}")["_data_files"]
    return [each["filename"] for each in files]


def saved_splits(directory: Path, written_by: str) -> list[str]:
    """Return the splits that `written_by` saved, in the order of the directory's dataset_dict.json."""
    path = directory / "dataset_dict.json"
    splits: list[str] = _read(path, SavedSplits, f"save the data again, with {written_by}")["splits"]
    if not splits:
        raise UserError(f"{path}: splits is []; expected the names of the splits; save the data again")
    return splits


def check_model(directory: Path) -> None:
    """Raise UserError unless every small file of a model's directory has the expected form."""
    model_config(directory)
    check_tokenizer(directory)
    generation_config(directory)


def check_tokenizer(directory: Path) -> None:
    """Raise UserError unless the files of a tokenizer have the expected form; the vocabulary is not read."""
    tokenizer_config(directory)
    for name in ("special_tokens_map.json", "added_tokens.json"):
        if (directory / name).exists():
            json_file.read_foreign(directory / name, FETCH_AGAIN, LARGE)
    if (path := directory / TOKENIZER).is_file() and ESCAPED.search(path.read_bytes()):
        _check_added_tokens(path)
    if (path := directory / "chat_template.jinja").exists():
        json_file.read_text(path, SMALL)


ESCAPED = re.compile(
    rb"\\u00[018-9][0-9a-fA-F]|\\u007[fF]|\\u20[26]|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]|\x7f|\\[bf]"
)
"""Finds what may be a control character in JSON; a tokenizer.json without one is not parsed once more."""


def _check_added_tokens(path: Path) -> None:
    """Raise UserError for a key with control characters in a token that a tokenizer.json adds: the library prints the
    keys that it does not know. The words of a vocabulary are keys too, and may have some."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # reported by the library
        return
    added = value.get("added_tokens") if isinstance(value, dict) else None
    for token in added if isinstance(added, list) else ():
        for key in token if isinstance(token, dict) else ():
            if CONTROLS.search(key.translate(json_file.WHITE_SPACE)):
                raise UserError(f"{path}: the key {shown(key)} has control characters; {FETCH_AGAIN}")


@contextmanager
def tokenizer_errors(directory: Path) -> Iterator[None]:
    """Raise UserError, naming the file, for any error of the tokenizer libraries."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise _tokenizer_error(directory, error) from None


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a failed assertion of a library's Rust code, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _tokenizer_error(directory: Path, error: BaseException) -> UserError:
    path = directory / TOKENIZER
    if path.exists():
        try:
            value = json_file.read_foreign(path, FETCH_AGAIN, LARGE)
            check(value, TokenizerFile, path, FETCH_AGAIN)
        except UserError as wrong:
            return wrong
    where = path if path.exists() else directory
    return UserError(f"{where}: is not a tokenizer that transformers reads ({reason(error)}); {FETCH_AGAIN}")


def reason(error: BaseException) -> str:
    """Return the beginning of an error's message in one line."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.160}"


def _optional(path: Path, kind: type[JsonObject]) -> dict[str, Any]:
    return _read(path, kind, FETCH_AGAIN) if path.exists() else {}


def _read(
    path: Path, kind: type[JsonObject], remedy: str, largest: int = SMALL, *, infinite: bool = False
) -> dict[str, Any]:
    value = json_file.read_foreign(path, remedy, largest, infinite=infinite)
    check(value, kind, path, remedy)
    return value
