"""A tokenizer.json whose code panics, never ends or fills the memory is one line, at every call."""

import copy
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tiny_model, refusal, served, write_rows
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from zerolora.data import tokenize
from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.model import bounded_tokenizer
from zerolora.model.architecture import tokenizer_of
from zerolora.model.bounded_tokenizer import BoundedTokenizer

PANIC = {"type": "Split", "pattern": {"Regex": "(?:a|aa|a+)+$"}, "behavior": "Isolated", "invert": False}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
GROWTH = {"type": "Sequence", "normalizers": [REPLACE] * 4}
SMALL = "from zerolora.model import bounded_tokenizer; bounded_tokenizer.BYTES = 1 << 26"


def with_tokenizer(directory: Path, **parts: Any) -> Path:
    """Return a model whose tokenizer.json has these parts."""
    make_tiny_model(directory)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return directory


def small() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))  # noqa: S106 (no password)


def test_results_are_those_of_the_library(tiny_model: Path) -> None:
    tokenizer = tokenizer_of(tiny_model)
    own, text = tokenizer.backend_tokenizer, "a text of 3 wörds\n"
    library = own._backend
    assert isinstance(own, BoundedTokenizer) and isinstance(library, Tokenizer)
    ids = library.encode(text).ids
    assert own.encode(text).ids == ids and tokenizer(text)["input_ids"] == ids
    assert own.encode(text, text, add_special_tokens=False).ids == library.encode(text, text).ids
    assert own.decode(ids) == library.decode(ids) == tokenizer.decode(ids)
    assert copy.deepcopy(tokenizer).encode(text) == ids


@pytest.mark.parametrize(
    ("method", "given"), [("encode", "aaa"), ("encode_batch", ["aaa"]), ("encode_batch_fast", ["a"])]
)
def test_a_panic_is_one_line(method: str, given: Any) -> None:
    library = small()
    library.pre_tokenizer = pre_tokenizers.Split(Regex(PANIC["pattern"]["Regex"]), "isolated")  # type: ignore[index]
    given = "a" * 60 + "b" if method == "encode" else ["a" * 60 + "b"]
    said = refusal(getattr(BoundedTokenizer(library, "x/tokenizer.json"), method), given)
    assert said.startswith("x/tokenizer.json: the tokenizer refuses a text: Onig: Regex search error"), said


def test_an_error_of_the_library_is_one_line_and_one_of_the_caller_is_not() -> None:
    library = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))  # noqa: S106 (no password)
    bounded = BoundedTokenizer(library, "x/tokenizer.json")
    assert "Missing [UNK] token" in refusal(bounded.encode, "b")
    with pytest.raises(TypeError):
        bounded.encode(5)


@pytest.mark.parametrize("limit", ["memory", "time"])
def test_a_call_beyond_its_bounds_ends_the_process_with_one_line(
    limit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bounded_tokenizer, *(("BYTES", 1 << 26) if limit == "memory" else ("SECONDS", 0.2)))
    library = small()
    library.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 4)
    if (child := os.fork()) == 0:
        LOGGER.handlers = [logging.FileHandler(tmp_path / "log")]
        BoundedTokenizer(library, "x/tokenizer.json").encode("aaa")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == bounded_tokenizer.CODE
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert f"takes more than {'0.1 GiB' if limit == 'memory' else '0 s'} for a text of 3 characters" in line


def test_the_parent_reports_what_ended_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bounded_tokenizer, "BYTES", 1 << 26)
    library = small()
    library.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 4)
    bounded = BoundedTokenizer(library, "x/tokenizer.json")
    work: Any = lambda job, file: bounded.encode("aaa")  # noqa: E731
    jobs: Any = [1, 2]
    with pytest.raises(UserError, match=r"^x/tokenizer.json: takes more than 0.1 GiB for a text of 3 characters"):
        [*tokenize.tokenize(jobs, work, 2, tmp_path)]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"pre_tokenizer": PANIC}, "tokenizer.json: the tokenizer refuses a text: Onig: Regex search error"),
        ({"normalizer": GROWTH}, "tokenizer.json: takes more than 0.1 GiB for a text of "),
    ],
    ids=["panic", "growth"],
)
def test_init_refuses_such_a_model(parts: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Two starts of the command: 10 s."""
    with_tokenizer(tmp_path / "model", **parts)
    write_rows(tmp_path / "rows.json", 40)
    rows = json.loads((tmp_path / "rows.json").read_text())
    (tmp_path / "rows.json").write_text(json.dumps([row | {"input": "a" * 60 + "b"} for row in rows]))
    line = ("zerolora", "init", "--model", "model", "--data", "rows.json", "--output", "config.yaml")
    done = served(*line, directory=tmp_path, before=SMALL)
    errors = [text for text in done.stderr.splitlines() if text.startswith("zerolora: ")]
    assert done.returncode == 2 and len(errors) == 1 and said in errors[0], done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "config.yaml").exists()
