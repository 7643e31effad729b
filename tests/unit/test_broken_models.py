"""A model with damaged files is refused in one line by every reader."""

import json
import re
from pathlib import Path

import pytest
from conftest import refusal

from zerolora.config.settings import PrepareSettings
from zerolora.data.prepare import prepare
from zerolora.errors import UserError
from zerolora.merge.merge import update_index
from zerolora.model.architecture import config_of, tokenizer_of
from zerolora.model.manifest import check_needs_no_code
from zerolora.model.stored_quantization import stored_quantization

CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = WordLevel({"a": 0, "b": 1}, unk_token="a")  # noqa: S106 - no password
    Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return tmp_path


def test_sound_model_is_read(model: Path) -> None:
    assert config_of(model).hidden_size == 8
    assert tokenizer_of(model)("b")["input_ids"] == [1]


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("tokenizer_config.json", b"[]", r"holds \[\]; expected a JSON object"),
        ("tokenizer.json", b'{"model": "\xff"}', "byte 11 is not UTF-8"),
        ("tokenizer.json", b"{", "not valid JSON"),
        ("tokenizer.json", b"[]", r"holds \[\]; expected a JSON object"),
        ("tokenizer.json", b'{"model": []}', r"model is \[\]; expected an object"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "is not a tokenizer that transformers reads"),
        ("special_tokens_map.json", b"5", "holds 5; expected a JSON object"),
        ("chat_template.jinja", b"\xff", "byte 0 is not UTF-8"),
        ("config.json", b'"x"', "holds 'x'; expected a JSON object"),
    ],
)
def test_a_broken_tokenizer_is_one_line(model: Path, name: str, content: bytes, wrong: str) -> None:
    (model / name).write_bytes(content)
    line = refusal(tokenizer_of, model)
    assert re.search(wrong, line) and line.startswith(str(model / name))


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("config.json", '"x"', "holds 'x'"),
        ("config.json", '{"model_type": "llama", "hidden_size": {"a": 1}}', "hidden_size is {'a': 1}; expected"),
        ("config.json", '{"model_type": "none such"}', "transformers cannot read it"),
        ("config.json", '{"model_type": "llama", "num_hidden_layers": "x"}', "num_hidden_layers is 'x'; expected"),
        ("generation_config.json", "[1]", r"holds \[1\]"),
        ("generation_config.json", '{"temperature": "hot", "do_sample": true}', "temperature is 'hot'; expected"),
        ("generation_config.json", '{"cache_implementation": 5}', "transformers cannot read it"),
    ],
)
def test_a_broken_config_is_one_line(model: Path, name: str, content: str, wrong: str) -> None:
    (model / name).write_text(content)
    line = refusal(config_of, model)
    assert re.search(wrong, line) and line.startswith(str(model / name))


@pytest.mark.parametrize("content", ["[]", '"x"', '{"quantization_config": [1]}', '{"auto_map": 5}'])
def test_checks_at_fetch_refuse_the_same(model: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json: "):
        stored_quantization(model)
    with pytest.raises(UserError, match=r"config\.json: "):
        check_needs_no_code(model)


def test_total_size_must_be_a_number(model: Path) -> None:
    index = {"metadata": {"total_size": "x"}, "weight_map": {"a": "b"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="total_size is 'x'; expected a finite number"):
        update_index(model, 1, 1, {})


def test_prepare_refuses_a_directory_as_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--model: .*: is not a file; give the path of the manifest\.json"):
        prepare(PrepareSettings.model_construct(), model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
