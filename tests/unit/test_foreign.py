"""Invalid files of other programs: one line names file, key, value and the expectation."""

import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import refusal

from zerolora import json_file
from zerolora.data.readers import chunks, files_of
from zerolora.errors import UserError
from zerolora.files import read_json
from zerolora.model import foreign
from zerolora.model.manifest import check_intact, count_parameters
from zerolora.model.weight_files import weight_files
from zerolora.tensor_file import read_header

Reader = Callable[[Path], Any]
READERS: dict[str, Reader] = {
    "config.json": lambda path: foreign.model_config(path.parent),
    "tokenizer_config.json": lambda path: foreign.tokenizer_config(path.parent),
    "generation_config.json": lambda path: foreign.generation_config(path.parent),
    "model.safetensors.index.json": lambda path: weight_files(path.parent),
    "adapter_config.json": lambda path: foreign.adapter_config(path.parent),
    "manifest.json": lambda path: check_intact(path.parent, "zerolora stage train"),
    "state.json": lambda path: foreign.saved_files(path.parent, "datasets"),
    "dataset_dict.json": lambda path: foreign.saved_splits(path.parent, "datasets"),
}
DEEP = "[" * 5000 + "]" * 5000
# Invalid JSON of every kind, and the error.
BROKEN = {
    "empty": (b"", "not valid JSON"),
    "not closed": (b'{"a": 1', "not valid JSON"),
    "a list": (b"[]", "is|holds"),
    "a text": (b'"x"', "is|holds"),
    "a number": (b"1", "is|holds"),
    "null": (b"null", "is|holds"),
    "not UTF-8": (b'{"a": "\xff\xfe"}', "byte 7 is not UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "is UTF-16"),
    "byte order mark": (b'\xef\xbb\xbf{"a": 1}', "begins with a byte order mark"),
    "equal keys": (b'{"files": {}, "files": {"a": 1}}', "the key 'files' is there twice"),
    "deep": (DEEP.encode(), "nested too deep|not valid JSON"),
    "deep value": (b'{"x": ' + DEEP.encode() + b"}", "nested too deep|not valid JSON"),
    "huge number": (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
}


def refused(reader: Reader, path: Path) -> str:
    text = refusal(reader, path)
    assert len(text) < 1000
    assert str(path) in text or str(path.parent) in text
    return text


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("name", READERS)
def test_invalid_json_is_one_line(tmp_path: Path, name: str, case: str) -> None:
    content, wrong = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    assert re.search(wrong, refused(READERS[name], tmp_path / name))


@pytest.mark.parametrize("name", [name for name in READERS if name != "manifest.json"])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_infinite_numbers_are_refused(tmp_path: Path, name: str, number: str) -> None:
    (tmp_path / name).write_text(f'{{"vocab_size": {number}, "a": {number}}}')
    assert "finite number" in refused(READERS[name], tmp_path / name)


def test_infinity_in_a_config_written_by_python_is_read(tmp_path: Path) -> None:
    """Mamba's time_step_limit is [0.0, Infinity]."""
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert foreign.model_config(tmp_path) == {"time_step_limit": [0.0, float("inf")]}


EVIL = "x\x1b]0;pwned\x07\u202e"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "adapter_config.json"])
def test_a_key_with_control_characters_is_refused(tmp_path: Path, name: str) -> None:
    """Libraries print the keys that they do not know."""
    (tmp_path / name).write_text(json.dumps({"a": [{EVIL: 1}]}))
    said = refused(READERS[name], tmp_path / name)
    assert r"the key 'x\x1b]0;pwned\x07\u202e' has control characters" in said and "\x1b" not in said


@pytest.mark.parametrize("ascii_alone", [True, False])
def test_only_words_of_a_tokenizer_may_have_control_characters(tmp_path: Path, ascii_alone: bool) -> None:
    tokenizer: dict[str, Any] = {"model": {"vocab": {EVIL: 0}}, "added_tokens": [{"content": EVIL, "id": 0}]}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer, ensure_ascii=ascii_alone))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"\t\t": 1}))
    foreign.check_tokenizer(tmp_path)
    tokenizer["added_tokens"][0][EVIL] = True
    path.write_text(json.dumps(tokenizer, ensure_ascii=ascii_alone))
    assert "tokenizer.json: the key 'x" in refusal(foreign.check_tokenizer, tmp_path)


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(r'{"model_type": "\ud800"}')
    assert "half a character" in refused(READERS["config.json"], tmp_path / "config.json")


@pytest.mark.parametrize("name", READERS)
def test_directory_pipe_or_device_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert "is a directory" in _refused_or_missing(name, tmp_path)
    (tmp_path / name).rmdir()
    os.mkfifo(tmp_path / name)
    assert "is a pipe or a device" in _refused_or_missing(name, tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    assert "is a pipe or a device" in _refused_or_missing(name, tmp_path)


def _refused_or_missing(name: str, folder: Path) -> str:
    if name != "model.safetensors.index.json":  # otherwise the directory lists the weights
        return refused(READERS[name], folder / name)
    return refused(foreign.weight_index, folder / name)


def test_unreadable_file_raises_with_its_name(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads every file")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.json").chmod(0)
    with pytest.raises(PermissionError) as raised:
        foreign.model_config(tmp_path)
    assert raised.value.filename == str(tmp_path / "config.json")


def test_oversized_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "too many for such a file" in refused(READERS["config.json"], tmp_path / "config.json")


SHAPES: list[tuple[str, Any, str]] = [
    ("config.json", {"model_type": 5}, "model_type is 5; expected a text"),
    ("config.json", {"model_type": None}, "model_type is None; expected a text"),
    ("config.json", {"architectures": "Llama"}, "architectures is 'Llama'; expected a list or null"),
    ("config.json", {"architectures": [5]}, "architectures.0 is 5; expected a text"),
    ("config.json", {"text_config": []}, r"text_config is \[\]; expected an object or null"),
    ("config.json", {"text_config": {"vocab_size": "9"}}, "text_config.vocab_size is '9'; expected a finite number"),
    ("config.json", {"eos_token_id": {"a": 1}}, "eos_token_id is"),
    ("config.json", {"eos_token_id": [1, "2"]}, "eos_token_id.1 is '2'; expected a whole number"),
    ("config.json", {"quantization_config": "x"}, "quantization_config is 'x'; expected an object"),
    ("config.json", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
    ("tokenizer_config.json", {"eos_token": 5}, "eos_token is 5; expected a text or an object"),
    ("tokenizer_config.json", {"eos_token": {"content": 5}}, "eos_token.content is 5; expected a text"),
    ("tokenizer_config.json", {"added_tokens_decoder": []}, r"added_tokens_decoder is \[\]; expected an object"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"1": {}}}, "added_tokens_decoder.1.content is missing"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template is 5; expected a text"),
    ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "chat_template.0.template is missing"),
    ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id is '2'; expected a whole number"),
    ("generation_config.json", {"eos_token_id": [[1]]}, r"eos_token_id.0 is \[1\]; expected a whole number"),
    ("generation_config.json", {"pad_token_id": True}, "pad_token_id is True; expected a whole number or null"),
    ("generation_config.json", {"pad_token_id": 2**70}, "pad_token_id is .*; expected a whole number or null"),
    ("generation_config.json", {"temperature": "hot"}, "temperature is 'hot'; expected a finite number"),
    ("model.safetensors.index.json", {"weight_map": ["x"]}, r"weight_map is \['x'\]; expected an object"),
    ("model.safetensors.index.json", {"weight_map": {}}, "weight_map is {}; expected the file of each tensor"),
    ("model.safetensors.index.json", {"weight_map": {"a": 1}}, "weight_map.a is 1; expected the name of a file"),
    ("model.safetensors.index.json", {"weight_map": {"a": "../b"}}, r"weight_map.a is '../b'; expected the name of a"),
    ("model.safetensors.index.json", {"weight_map": {"a": "/etc/passwd"}}, "weight_map.a is '/etc/passwd'; expected"),
    ("model.safetensors.index.json", {}, "weight_map is missing"),
    ("adapter_config.json", {"r": [8]}, r"r is \[8\]; expected a whole number, 1 or more"),
    ("adapter_config.json", {"r": 0}, "r is 0; expected a whole number, 1 or more"),
    ("adapter_config.json", {"r": True}, "r is True; expected a whole number"),
    ("adapter_config.json", {"r": 8.0}, "r is 8.0; expected a whole number"),
    ("adapter_config.json", {"lora_alpha": "16"}, "lora_alpha is '16'; expected a finite number"),
    ("adapter_config.json", {"rank_pattern": {"q": -1}}, "rank_pattern.q is -1; expected a whole number, 1 or more"),
    ("adapter_config.json", {"alpha_pattern": [1]}, r"alpha_pattern is \[1\]; expected an object"),
    ("adapter_config.json", {"target_modules": [["q"]]}, r"target_modules.0 is \['q'\]; expected a name"),
    ("adapter_config.json", {"modules_to_save": "head"}, "modules_to_save is 'head'; expected a list"),
    ("adapter_config.json", {"use_dora": "false"}, "use_dora is 'false'; expected true or false"),
    ("manifest.json", {"files": True}, "files is True; expected an object"),
    ("manifest.json", {"files": {"a": []}}, r"files.a is \[\]; expected an object"),
    ("manifest.json", {"files": {"a": {"sha256": "x"}}}, "files.a.bytes is missing"),
    ("manifest.json", {"files": {"a": {"sha256": "x", "bytes": -1}}}, "files.a.bytes is -1; expected a whole number"),
    ("manifest.json", {"files": {"../a": {"sha256": "x", "bytes": 1}}}, "has a key that is '../a'; expected the rel"),
    ("manifest.json", {"files": {"/etc/passwd": {"sha256": "x", "bytes": 1}}}, "has a key that is '/etc/passwd'"),
    ("manifest.json", {"files": {}, "base_model": {"name": 1}}, "base_model.weights is missing|base_model.name is 1"),
    ("manifest.json", {"files": {}, "added_tokens": [{"token": "x", "id": "1", "special": True}]}, "added_tokens.0.id"),
    ("state.json", {}, "_data_files is missing"),
    ("state.json", {"_data_files": "x"}, "_data_files is 'x'; expected a list"),
    ("state.json", {"_data_files": [{"filename": 1}]}, "_data_files.0.filename is 1; expected the name of a file"),
    ("state.json", {"_data_files": [{"filename": "../../secret.arrow"}]}, "filename is '../../secret.arrow'; expected"),
    ("state.json", {"_data_files": [{"filename": "/etc/passwd"}]}, "filename is '/etc/passwd'; expected the name of"),
    ("dataset_dict.json", {"splits": {"train": 1}}, "splits is {'train': 1}; expected a list"),
    ("dataset_dict.json", {"splits": []}, r"splits is \[\]; expected the names"),
]


@pytest.mark.parametrize(("name", "content", "wrong"), SHAPES, ids=lambda each: str(each)[:60])
def test_wrong_type_names_key_and_value(tmp_path: Path, name: str, content: dict[str, Any], wrong: str) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    text = refused(READERS[name], tmp_path / name)
    assert re.search(wrong, text), text


@pytest.mark.parametrize("wrong", ["../outside.arrow", "/etc/hostname", "sub/../../outside.arrow"])
def test_saved_data_set_refuses_files_outside_itself(tmp_path: Path, wrong: str) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for file in (tmp_path / "outside.arrow", saved / "data-00000-of-00001.arrow"):
        file.write_bytes(b"ARROW1")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": wrong}]}))
    with pytest.raises(UserError, match=r"_data_files.0.filename is .*; expected the name of a file beside it"):
        files_of(saved)


def test_duplicate_key_of_a_large_object_is_refused_fast(tmp_path: Path) -> None:
    """Counting every key would take minutes."""
    pairs = [(f"k{number}", 1) for number in range(50_000)] + [("k49999", 2)]
    text = "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"
    (tmp_path / "x.json").write_text(text)
    (tmp_path / "rows.jsonl").write_text(text)
    begun = time.process_time()
    with pytest.raises(UserError, match=r"x\.json: not valid JSON .*'k49999' is there twice.*run `zerolora y` again"):
        read_json(tmp_path / "x.json", "zerolora y")
    (actual,) = (value for chunk in chunks(tmp_path / "rows.jsonl") for _, value in chunk.records())
    assert "has the key 'k49999' twice" in str(actual) and time.process_time() - begun < 5


def test_device_is_not_read_forever(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pipe or a device"):
        json_file.read_bytes(Path("/dev/zero"), 100)


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HEADERS: list[tuple[Any, str]] = [
    ({"a": []}, r"a is \[\]; expected an object"),
    ({"a": TENSOR | {"shape": "1"}}, "a.shape is '1'; expected a list"),
    ({"a": TENSOR | {"shape": [True]}}, "a.shape.0 is True; expected a whole number"),
    ({"a": TENSOR | {"shape": [-1]}}, "a.shape.0 is -1; expected a whole number"),
    ({"a": TENSOR | {"shape": [1.0]}}, "a.shape.0 is 1.0; expected a whole number"),
    ({"a": TENSOR | {"shape": [[1]]}}, r"a.shape.0 is \[1\]; expected a whole number"),
    ({"a": TENSOR | {"dtype": ["F32"]}}, r"a.dtype is \['F32'\]; expected a text"),
    ({"a": TENSOR | {"data_offsets": [0]}}, r"a.data_offsets is \[0\]; expected 2 or more entries"),
    ({"a": TENSOR | {"data_offsets": [0, 4, 8]}}, "a.data_offsets is .*; expected 2 or fewer entries"),
    ({"a": TENSOR | {"data_offsets": ["0", 4]}}, "a.data_offsets.0 is '0'; expected a whole number"),
    ({"a": TENSOR | {"data_offsets": [4, 0]}}, "has bytes"),
    ({"a": TENSOR, "__metadata__": {"x": 1}}, "__metadata__.x is 1; expected a text"),
    ({"a": TENSOR, "__metadata__": []}, r"__metadata__ is \[\]; expected an object"),
    ([], r"holds \[\]"),
]


@pytest.mark.parametrize(("header", "wrong"), HEADERS, ids=str)
def test_invalid_tensor_header_is_one_line(tmp_path: Path, header: Any, wrong: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    for reader in (read_header, lambda path: count_parameters(path.parent)):
        actual = refused(reader, tmp_path / "model.safetensors")
        assert re.search(wrong, actual), actual


def test_weights_in_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "it is not a file" in refused(read_header, tmp_path / "model.safetensors")
