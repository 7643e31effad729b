"""Readers of other programs' files: each checks every key that this project uses.

Callers rely on the checked form; unused keys pass unchecked. Each reader raises UserError with one line: file, key,
value seen, expected kind.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolora import json_file
from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_json
from zerolora.json_file import (
    COUNT,
    FILE_NAME,
    FLAG,
    LIST,
    NULL,
    NUMBER,
    OBJECT,
    PATH_BELOW,
    POSITIVE,
    TEXT,
    WHOLE,
    JsonKind,
    check,
    list_of,
    map_of,
    nullable,
    plain,
    record,
)

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ADAPTER_CONFIG = "adapter_config.json"
SMALL = 16 << 20
"""Maximum bytes of a config; real ones have kilobytes. A larger file, such as weights under this name, is not read."""
LARGE = 128 << 20
"""Maximum bytes of a list of files or tensors, or of a vocabulary."""
FETCH_AGAIN = "fetch or save the model again"

_IDS = WHOLE | list_of(WHOLE) | NULL
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "num_experts_per_tok"),
)
# Keys of a text model, or of the text part of a vision-language model.
_MODEL_KEYS = nullable(
    {
        "architectures": list_of(TEXT),
        "tie_word_embeddings": FLAG,
        "quantization_config": record(nullable({"quant_method": TEXT})),
        "auto_map": OBJECT,
        "rope_scaling": OBJECT,
        "rope_parameters": OBJECT,
        "torch_dtype": TEXT,
        "dtype": TEXT | OBJECT,  # an object by part, in a composite model
        "add_cross_attention": FLAG,
        "is_encoder_decoder": FLAG,
        "bos_token_id": _IDS,
        "eos_token_id": _IDS,
        "pad_token_id": WHOLE,
        # Some architectures have a size for each layer.
        **dict.fromkeys(_SIZES, NUMBER | LIST),
    }
)
MODEL_CONFIG = record({**_MODEL_KEYS, "model_type": TEXT, "text_config": record(_MODEL_KEYS) | NULL})
_TOKEN = TEXT | record({}, {"content": TEXT}) | NULL
TOKENIZER_SETTINGS = record(
    {
        **{f"{name}_token": _TOKEN for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
        **nullable(
            {
                "added_tokens_decoder": map_of(record({}, {"content": TEXT})),
                "auto_map": OBJECT,
                "tokenizer_class": TEXT,
                "model_max_length": NUMBER,
                "add_bos_token": FLAG,
                "add_eos_token": FLAG,
                "clean_up_tokenization_spaces": FLAG,
            }
        ),
        "chat_template": TEXT | list_of(record({}, {"name": TEXT, "template": TEXT})) | map_of(TEXT) | NULL,
    }
)
GENERATION_SETTINGS = record(
    {
        "bos_token_id": _IDS,
        "eos_token_id": _IDS,
        **nullable(
            {
                "pad_token_id": WHOLE,
                "do_sample": FLAG,
                **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"), NUMBER),
                **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "num_beams", "top_k"), WHOLE),
            }
        ),
    }
)
WEIGHT_INDEX = record({"metadata": OBJECT | NULL}, {"weight_map": map_of(FILE_NAME)})


def _is_expression(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except (re.error, OverflowError, RecursionError):
        return False


_EXPRESSION = plain("a regular expression", _is_expression)
_PATTERN = plain("an object whose keys are regular expressions", lambda value: all(map(_is_expression, value or ())))
_NAMES = list_of(plain("a name", lambda value: isinstance(value, str) and value != "")) | NULL
_MODULES = _EXPRESSION | _NAMES
_ROWS = list_of(COUNT) & plain("a list of rows", bool)
ADAPTER_SETTINGS = record(
    {
        "peft_type": TEXT,
        "r": POSITIVE,
        "lora_alpha": NUMBER,
        "rank_pattern": (map_of(POSITIVE) | NULL) & _PATTERN,
        "alpha_pattern": (map_of(NUMBER) | NULL) & _PATTERN,
        **dict.fromkeys(("target_modules", "exclude_modules", "feedforward_modules", "layers_pattern"), _MODULES),
        "target_parameters": _NAMES,
        "trainable_token_indices": list_of(COUNT) | map_of(_ROWS) | NULL,
        "init_lora_weights": FLAG | TEXT | NULL,
        "layers_to_transform": COUNT | list_of(COUNT) | NULL,
        "bias": plain("none, all or lora_only", lambda value: value in ("none", "all", "lora_only")),
        "save_projection": plain("true, with the projections in the file", lambda value: value is True),
        **nullable(
            {
                "lora_dropout": NUMBER,
                "modules_to_save": list_of(
                    plain(
                        "a name, which peft reads as a regular expression",
                        lambda value: value and _is_expression(value),
                    )
                ),
                **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "ensure_weight_tying", "lora_bias"), FLAG),
                **dict.fromkeys(("base_model_name_or_path", "revision", "task_type"), TEXT),
            }
        ),
    }
)
_FILE = record({}, {"sha256": TEXT, "bytes": COUNT})
_FILES = map_of(_FILE, PATH_BELOW)
_BASE = record({"revision": TEXT | NULL}, {"name": TEXT, "weights": TEXT})
ADDED_TOKEN = record({}, {"token": TEXT, "id": COUNT, "special": FLAG})
_SOURCE = record(
    {
        **dict.fromkeys(("source", "path", "package", "version", "file", "repository", "license"), TEXT),
        "revision": TEXT | NULL,
    }
)
MANIFEST_KEYS: dict[str, JsonKind] = {
    "files": _FILES,
    "source": _SOURCE,
    "license": TEXT | NULL,
    "parameters": COUNT,
    "path": TEXT,
    "enabled": FLAG,
    "converted": FLAG,
    "dequantized": FLAG,
    "base_model": _BASE | NULL,
    "from_adapter": OBJECT | NULL,
    "data_manifest_sha256": TEXT,
    "sources": list_of(TEXT),
    "read": map_of(TEXT),
    "stop_tokens": list_of(TEXT),
    "pad_token": TEXT | NULL,
    "added_tokens": list_of(ADDED_TOKEN),
    "chat_template": TEXT | NULL,
}


def model_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a model's directory."""
    return config_file(directory / CONFIG)


def config_file(path: Path, remedy: str = FETCH_AGAIN) -> dict[str, Any]:
    """Return the content of a model's config.json, under any name; infinite numbers are read."""
    return _read(path, MODEL_CONFIG, remedy, infinite=True)


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return the tokenizer_config.json of a model's directory, {} if there is none."""
    return _optional(directory / TOKENIZER_CONFIG, TOKENIZER_SETTINGS)


def generation_config(directory: Path) -> dict[str, Any]:
    """Return the generation_config.json of a model's directory, {} if there is none."""
    return _optional(directory / GENERATION, GENERATION_SETTINGS)


def weight_index(path: Path) -> dict[str, Any]:
    """Return the index of a model's weight files: `weight_map` maps each tensor to its file."""
    index = _read(path, WEIGHT_INDEX, FETCH_AGAIN, LARGE)
    if not index["weight_map"]:
        raise UserError(f"{path}: weight_map is {{}}; expected the file of each tensor; {FETCH_AGAIN}")
    return index


def adapter_config(directory: Path) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter's directory."""
    return _read(directory / ADAPTER_CONFIG, ADAPTER_SETTINGS, "save the adapter again, with peft's save_pretrained")


def manifest(path: Path, written_by: str, *required: str) -> dict[str, Any]:
    """Return the manifest of a directory, or a stamp, that the command `written_by` writes, with the keys `required`,
    by default `files`."""
    value: dict[str, Any] = read_json(path, written_by)
    needed = {name: MANIFEST_KEYS[name] for name in required or ("files",)}
    check(value, record(MANIFEST_KEYS, needed), path, f"delete it and run `{written_by}` again")
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
    check(value, record(MANIFEST_KEYS, {"files": _FILES}), path, remedy)
    return value


def saved_files(directory: Path, written_by: str) -> list[str]:
    """Return the files of a data set that `written_by` saved, in the order of the directory's state.json."""
    kind = record({}, {"_data_files": list_of(record({}, {"filename": FILE_NAME}))})
    files = _read(directory / "state.json", kind, f"save the data again, with {written_by}")["_data_files"]
    return [each["filename"] for each in files]


def saved_splits(directory: Path, written_by: str) -> list[str]:
    """Return the splits that `written_by` saved, in the order of the directory's dataset_dict.json."""
    path = directory / "dataset_dict.json"
    kind = record({}, {"splits": list_of(FILE_NAME)})
    splits: list[str] = _read(path, kind, f"save the data again, with {written_by}")["splits"]
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
    if (path := directory / "chat_template.jinja").exists():
        json_file.read_text(path, SMALL)


@contextmanager
def tokenizer_errors(directory: Path) -> Iterator[None]:
    """Raise UserError, naming the file, for any error of the tokenizer libraries."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A failed assertion of the library's Rust code is a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _tokenizer_error(directory, error) from None


def _tokenizer_error(directory: Path, error: BaseException) -> UserError:
    path = directory / TOKENIZER
    if path.exists():
        try:
            value = json_file.read_foreign(path, FETCH_AGAIN, LARGE)
            check(value, record({}, {"model": OBJECT}), path, FETCH_AGAIN)
        except UserError as wrong:
            return wrong
    where = path if path.exists() else directory
    return UserError(f"{where}: is not a tokenizer that transformers reads ({reason(error)}); {FETCH_AGAIN}")


def reason(error: BaseException) -> str:
    """Return the beginning of an error's message in one line."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.160}"


def _optional(path: Path, kind: JsonKind) -> dict[str, Any]:
    return _read(path, kind, FETCH_AGAIN) if path.exists() else {}


def _read(path: Path, kind: JsonKind, remedy: str, largest: int = SMALL, *, infinite: bool = False) -> dict[str, Any]:
    value = json_file.read_foreign(path, remedy, largest, infinite=infinite)
    check(value, kind, path, remedy)
    return value
