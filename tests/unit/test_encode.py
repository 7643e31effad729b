"""Tokens and labels with tokenizers built like those of real models."""

import json
import unicodedata
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from goldens import CONVERSATIONS, Golden, answer, goldens, prepare_settings, user
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers_of import FAMILIES, UNKNOWN, Family, tokenizer_like, tokenizer_of
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from zerolora.data.encode import CONTEXT, LONG, Encoder, Piece
from zerolora.data.example import BadRow, Example
from zerolora.data.prepared_rows import IGNORED
from zerolora.data.ragged import Ragged
from zerolora.data.template import Template
from zerolora.errors import UserError

END = "</s>"
# Templates whose prompt differs from the text before an answer: by a thought, by one line break.
QUIRKS = ("command-r7b", "hermes-3")
GOLDENS = [golden for golden in goldens() if not golden.refusal]
# Templates for one tokenizer of each kind.
KINDS = ("deepseek-v2", "qwen2.5", "llama-3", "llama-2", "mistral-v0.3", "mistral-v0.2", "gemma-2", "phi-3", "zephyr")
CONTENT = st.text(st.sampled_from("ab H\n\t.é你王\u00a0_«0"), min_size=1, max_size=12)


class Row(NamedTuple):
    """A row's tokens; labels for the loss; number of tokens before the last answer; supervised tokens by role."""

    input_ids: list[int]
    labels: list[int]
    prompt: int
    learned: dict[str, int]


def rows_of(tokenizer: Any, rows: list[list[Piece]]) -> list[Row | BadRow]:
    tokens = Encoder(tokenizer).encode(rows)
    result: list[Row | BadRow] = []
    for number in range(len(tokens.ids)):
        ids = tokens.ids[number].tolist()
        kinds = tokens.supervised_role[tokens.ids.offsets[number] : tokens.ids.offsets[number + 1]].tolist()
        labels = [IGNORED if kind == CONTEXT else token for token, kind in zip(ids, kinds, strict=True)]
        learned = Counter(tokens.roles[kind] for kind in kinds if kind != CONTEXT)
        result.append(tokens.wrong.get(number) or Row(ids, labels, int(tokens.prompt[number]), dict(learned)))
    return result


def row_of(template: Template, example: Example) -> Row:
    (row,) = rows_of(template.tokenizer, [template.pieces(example)])
    assert isinstance(row, Row), row
    return row


def runs(row: Row) -> list[list[int]]:
    grouped = groupby(row.labels, key=lambda label: label == IGNORED)
    return [list(labels) for ignored, labels in grouped if not ignored]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))


def stops_of(golden: Golden, directory: Path) -> Template:
    tokenizer = tokenizer_of(golden.template)
    config = {"eos_token_id": tokenizer.convert_tokens_to_ids(golden.stops)}
    (directory / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Template(tokenizer, prepare_settings(loss=golden.loss), directory)


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_labels_of_golden_rows(golden: Golden, tmp_path: Path) -> None:
    template = stops_of(golden, tmp_path)
    tokenizer, row = template.tokenizer, row_of(template, golden.example)
    assert len(row.labels) == len(row.input_ids)
    assert all(label in (IGNORED, token) for label, token in zip(row.labels, row.input_ids, strict=True))
    assert row.labels[0] == IGNORED
    assert sum(row.learned.values()) == sum(label != IGNORED for label in row.labels)
    if golden.loss == "everything":
        assert row.labels[1:] == row.input_ids[1:]
        return
    pieces = [piece for piece in template.pieces(golden.example) if piece.supervised]
    for piece, ids in zip(pieces, runs(row), strict=True):
        # SentencePiece's decoder removes one leading blank.
        assert piece.text in (read(tokenizer, ids), f" {read(tokenizer, ids)}")
        if piece.role == "assistant":
            assert tokenizer.convert_ids_to_tokens(ids[-1]) in template.stops
            assert piece.text.endswith(tokenizer.convert_ids_to_tokens(ids[-1]))


@pytest.mark.parametrize("golden", [golden for golden in GOLDENS if isinstance(golden.loss, str)], ids=str)
def test_prompt_tokens_equal_those_of_generation(golden: Golden, tmp_path: Path) -> None:
    template, example = stops_of(golden, tmp_path), golden.example
    assert example.messages is not None
    last = max(number for number, message in enumerate(example.messages) if message["role"] == "assistant")
    prompt = template.write(example.messages[:last], example.tools, prompt=True)
    row = row_of(template, example)
    same = row.input_ids[: row.prompt] == ids_of(template.tokenizer, prompt)
    assert same == (golden.template not in QUIRKS)


# Without answers that begin with a line break, since a token could span it and the prompt's last one.
@pytest.mark.parametrize("golden", [golden for golden in GOLDENS if golden.conversation != "blanks"], ids=str)
def test_tokens_equal_those_of_the_whole_text(golden: Golden, tmp_path: Path) -> None:
    template = stops_of(golden, tmp_path)
    text = "".join(piece.text for piece in template.pieces(golden.example))
    assert row_of(template, golden.example).input_ids == ids_of(template.tokenizer, text)


@pytest.mark.parametrize("name", KINDS)
@given(question=CONTENT, said=CONTENT)
@settings(max_examples=25, deadline=None)
def test_any_answer_is_supervised_whole_after_the_models_prompt(name: str, question: str, said: str) -> None:
    template = Template(tokenizer_of(name), prepare_settings(loss="assistant"))
    messages = [user(question), answer(said)]
    pieces = template.pieces(Example(messages))
    (row,) = rows_of(template.tokenizer, [pieces])
    assert isinstance(row, Row), row
    assert row.labels == [IGNORED] * row.prompt + row.input_ids[row.prompt :]
    assert row.input_ids[: row.prompt] == ids_of(template.tokenizer, template.write(messages[:1], prompt=True))
    back = read(template.tokenizer, row.input_ids[row.prompt :])
    assert pieces[-1].text in (back, f" {back}")
    assert template.tokenizer.convert_ids_to_tokens(row.input_ids[-1]) in template.stops


@pytest.mark.parametrize("name", KINDS)
@given(contents=st.lists(CONTENT.map(lambda text: text.strip() or "a"), min_size=4, max_size=6))
@settings(max_examples=15, deadline=None)
def test_prompt_of_several_turns_equals_that_of_generation(name: str, contents: list[str]) -> None:
    """Answers without leading blanks cannot merge with the text before them."""
    template = Template(tokenizer_of(name), prepare_settings(loss="assistant"))
    even = contents[: len(contents) // 2 * 2]
    messages = [(answer if number % 2 else user)(text) for number, text in enumerate(even)]
    row = row_of(template, Example(messages))
    prompt = template.write(messages[:-1], prompt=True)
    assert row.input_ids[: row.prompt] == ids_of(template.tokenizer, prompt)


@pytest.mark.parametrize("name", KINDS)
def test_texts_and_plain_rows_begin_with_the_tokenizers_bos(name: str) -> None:
    tokenizer = tokenizer_of(name)
    plain = Template(tokenizer, prepare_settings(template="plain", loss="assistant"))
    eos = tokenizer.eos_token_id
    assert row_of(plain, Example(text="Hello world")).input_ids == [*tokenizer("Hello world")["input_ids"], eos]
    row = row_of(plain, Example(CONVERSATIONS["single"]))
    assert row.input_ids[: row.prompt] == tokenizer("Hi")["input_ids"]
    assert read(tokenizer, row.input_ids[row.prompt :]) == f"Hello{tokenizer.eos_token}"


def test_first_token_of_a_text_is_not_supervised() -> None:
    template = Template(tokenizer_of("qwen2.5"), prepare_settings(loss="assistant"))
    row = row_of(template, Example(text="Hello world"))
    assert row.labels == [IGNORED, *row.input_ids[1:]]
    assert (row.prompt, row.learned) == (0, {"text": len(row.input_ids) - 1})


def test_supervised_tokens_by_role() -> None:
    template = Template(tokenizer_of("phi-3"), prepare_settings(loss="everything"))
    row = row_of(template, Example(CONVERSATIONS["multi"]))
    said = ids_of(template.tokenizer, "I am Bo.<|end|>") + ids_of(template.tokenizer, "Now I rest.<|end|>")
    assert row.learned == {"context": len(row.input_ids) - 1 - len(said), "assistant": len(said)}


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_chunks_at_added_tokens_give_the_tokens_of_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    added = st.sampled_from([token.content for token in tokenizer.added_tokens_decoder.values()])
    texts = data.draw(st.lists(st.lists(CONTENT | added, min_size=1, max_size=6).map("".join), min_size=1, max_size=4))
    actual = rows_of(tokenizer, [[Piece(text, "text", True)] for text in texts])
    for text, row in zip(texts, actual, strict=True):
        if isinstance(row, Row):
            assert row.input_ids == ids_of(tokenizer, text)


def test_only_chunk_safe_tokenizers_are_chunked() -> None:
    cut = {name for name in KINDS if Encoder(tokenizer_of(name)).cut}
    assert cut == {"qwen2.5", "llama-3", "deepseek-v2", "gemma-2"}
    tokenizer = tokenizer_like(FAMILIES["qwen2.5"], None)
    tokenizer.add_tokens([AddedToken("<sep>", lstrip=True)])
    assert Encoder(tokenizer).cut is None


@given(text=st.text(max_size=8))
def test_spelling_of_tokens_equals_the_decoders(text: str) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    spelling = Encoder(tokenizer).spelling
    ids = ids_of(tokenizer, f"{text}<|im_end|>")
    assert spelling is not None
    assert [part.decode() for part in spelling.of(Ragged.of([ids, []]))] == [read(tokenizer, ids), ""]


def test_tokenizer_that_changes_a_text_is_refused() -> None:
    tokenizer = tokenizer_like(FAMILIES["qwen2.5"], None)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    rows = [[Piece("Hi", None, False), Piece(said, "assistant", True)] for said in ("one", "Two")]
    same, changed = rows_of(tokenizer, rows)
    assert isinstance(same, Row)
    assert str(changed) == "the tokenizer reads 'Two' back as 'two'; remove the characters it does not know"


def test_spelling_is_invalid_where_the_decoder_differs() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    spelling = Encoder(tokenizer).spelling
    assert spelling is not None
    (token,) = ids_of(tokenizer, "a")
    spelling.alphabet = {**spelling.alphabet, "a": ord("b")}
    assert spelling.of(Ragged.of([[token]])) == [b"\xff"]


def test_rows_and_bad_rows_stay_in_order() -> None:
    rows = [[Piece("Hi", None, False), Piece(text, "assistant", True)] for text in ("one", "你", "two")]
    backend = Tokenizer(models.WordLevel({UNKNOWN: 0, "Hi": 1, "one": 2, "two": 3, END: 4}, UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=UNKNOWN, eos_token=END)
    first, bad, last = rows_of(tokenizer, rows)
    assert first == Row([1, 2], [IGNORED, 2], 1, {"assistant": 1})
    assert last == Row([1, 3], [IGNORED, 3], 1, {"assistant": 1})
    assert isinstance(bad, BadRow)
    assert str(bad) == "the tokenizer reads '你' back as '<unk>'; remove the characters it does not know"
    assert rows_of(tokenizer, []) == []


def test_end_of_sequence_may_be_the_unknown_token() -> None:
    """As in GPT-2, where the token is no sign of an unknown character."""
    tokenizer = tokenizer_like(FAMILIES["falcon-180b"], tokenizer_of("falcon-180b").chat_template)
    tokenizer.unk_token = tokenizer.eos_token
    template = Template(tokenizer, prepare_settings(loss="assistant"))
    assert row_of(template, Example(CONVERSATIONS["single"])).input_ids[-1] == tokenizer.eos_token_id


def test_decomposed_accents_are_normalized() -> None:
    template = Template(tokenizer_of("qwen2.5"), prepare_settings(loss="assistant"))
    texts = [unicodedata.normalize(form, "é ñ") for form in ("NFC", "NFD")]
    composed, decomposed = (row_of(template, Example([user("Hi"), answer(text)])) for text in texts)
    assert composed == decomposed


def test_row_without_supervised_tokens_is_bad() -> None:
    (row,) = rows_of(tokenizer_of("qwen2.5"), [[Piece("a", "assistant", True)]])
    assert str(row) == "no token of it is in the loss; remove it"


def test_slow_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"\(ByT5Tokenizer\) has no tokenizer.json; choose a model that has one"):
        Encoder(ByT5Tokenizer())


def test_tokenizer_that_joins_everything_is_refused() -> None:
    """Anchors cannot separate a piece that the tokenizer merges with any text before it."""
    joined = [("\n", "b"), (")", "b"), ("a", "b"), ("0", "b")]
    tokens = [UNKNOWN, END, "▁", "x", "b", *(first for first, _ in joined), *map("".join, joined)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, joined))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=UNKNOWN, eos_token=END)
    with pytest.raises(UserError, match="joins 'b' to the text before it; set template: plain"):
        rows_of(tokenizer, [[Piece("x", None, False), Piece("b", "assistant", True)]])


def test_sentencepieces_blank_symbol_in_a_row_is_refused() -> None:
    template = Template(tokenizer_of("llama-2"), prepare_settings(loss="assistant"))
    (row,) = rows_of(template.tokenizer, [template.pieces(Example([user("a▁b"), answer("a▁b")]))])
    assert str(row) == "the tokenizer reads ' a▁b </s>' back as 'a b </s>'; remove the characters it does not know"


@pytest.mark.parametrize("kind", ["legacy", "first", "always"])
def test_blank_of_sentencepiece(kind: str) -> None:
    """A blank before an answer is part of its first word, and no blank is added."""
    tokenizer = tokenizer_like(Family(kind, "<s>", END, ("<s>", END), opens=True), None)
    prompt = "<s>USER: Hi ASSISTANT:"
    rows = [[Piece(prompt, None, False), Piece(said, "assistant", True)] for said in (" answer</s>", "answer</s>")]
    joined, apart = (row for row in rows_of(tokenizer, rows) if isinstance(row, Row))
    assert joined.input_ids == ids_of(tokenizer, f"{prompt} answer</s>")
    assert tokenizer.convert_ids_to_tokens(joined.input_ids[joined.prompt]).startswith("▁")
    assert "▁" not in "".join(tokenizer.convert_ids_to_tokens(apart.input_ids[apart.prompt :]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_same_tokens_in_parts(kind: str) -> None:
    """Encoding it in one call takes some 400 bytes for each token."""
    encoder = Encoder(tokenizer_of(kind))
    words = [f"word{number % 97} is\n\n  here, 你好 it's  <b> {number}" for number in range(8000)]
    for text in (" ".join(words), "x" * (LONG + 10), "word " * (LONG // 4)):
        parts = [*encoder._parts(text)]
        assert "".join(parts) == text
        assert encoder._ids([text, "short"]) == encoder._encoded([text, "short"])
    assert max(map(len, encoder._parts(" ".join(words)))) <= LONG or encoder.backend.pre_tokenizer is None
