"""Makes the tokenizer of InternLM2 or Baichuan, which is a Python class around a SentencePiece model, a tokenizer.json.

The class in their repositories is never run. What it does is known: a text is divided at the special tokens, and
SentencePiece encodes each part. The result is compared with SentencePiece itself, on every piece and on many texts, and
refused if one of them gets other tokens.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolora import json_file
from zerolora.errors import UserError, shown
from zerolora.files import as_json
from zerolora.model import foreign

MODEL = "tokenizer.model"
TOKENIZER_FILES = {
    *(foreign.TOKENIZER, foreign.TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    "chat_template.jinja",
}
"""Files that are written again, or whose content the written ones contain."""
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # sentencepiece_model.proto, SentencePiece.Type
BPE_TYPE = 2  # the same file, TrainerSpec.ModelType
SUPPLY = (
    "save the tokenizer as tokenizer.json, with save_pretrained of the fast class in its repository, where that code "
    "may run, and put the file into the model's directory (fetch.directory)"
)
TEXTS = (
    *("", " ", "  ", "\n", "\n\n", "\t", " a", "a ", "a  b", "a   b\n\n  c", "\r\n", "Hello, world! It's 3.14."),
    *(
        "你好,世界。王大丫丫的回答是",
        "12345 67890 2024-01-17",
        "ＡＢＣ ①②③ ﬁ é e\u0301",
        "🐉🙂👩\u200d👧",
        "Ünïcödé ñ ß İ",
    ),
    *("def f(x):\n    return x ** 2\n", "\u3000全角\u00a0nbsp\u200bzero", "ابجد हिन्दी 한국어 ไทย"),
    "\U0001f9ff\U00020000\ue000",
)
JOINED, LONGEST = 20_000, 12
"""Texts of joined pieces, and the most pieces of one."""


def convert_tokenizer(source: Path, target: Path) -> None:
    """Write the tokenizer of the model in `source` to `target` as tokenizer.json and tokenizer_config.json.

    A tokenizer.json in `source` is taken as it is, without the name of a class that needs code. Raises UserError if
    there is neither, or if the result would encode a text otherwise.
    """
    from transformers import PreTrainedTokenizerFast

    settings = foreign.tokenizer_config(source)
    named, listed = _special_tokens(source, settings)
    path = source / MODEL
    with foreign.tokenizer_errors(source):
        if (source / foreign.TOKENIZER).is_file():
            from tokenizers import Tokenizer

            backend = Tokenizer.from_file(str(source / foreign.TOKENIZER))
        elif path.is_file():
            if settings.get("sp_model_kwargs"):
                raise UserError(
                    f"{source / foreign.TOKENIZER_CONFIG}: sp_model_kwargs is {shown(settings['sp_model_kwargs'])}; "
                    "use {}"
                )
            backend = _built(path, named, listed)
            _set_ends(backend, named, settings)
        else:
            raise UserError(f"{source}: has neither {foreign.TOKENIZER} nor {MODEL}; {SUPPLY}")
        kept = ("chat_template", "model_max_length", "clean_up_tokenization_spaces", "padding_side")
        tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            **named,
            **{name: settings[name] for name in kept if settings.get(name) is not None},
        )
        template = source / "chat_template.jinja"
        if template.is_file():
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        tokenizer.save_pretrained(target)
    path = target / foreign.TOKENIZER_CONFIG
    written = foreign.tokenizer_config(target)
    written.pop("backend", None)
    # The name of the class that every release has, and the tokens as llama.cpp reads them beside tokenizer.model.
    written["tokenizer_class"] = "PreTrainedTokenizerFast"
    written["added_tokens_decoder"] = {
        str(number): {"content": token.content, "special": token.special, "lstrip": token.lstrip}
        | {"rstrip": token.rstrip, "normalized": token.normalized, "single_word": token.single_word}
        for number, token in sorted(backend.get_added_tokens_decoder().items())
    }
    path.write_text(as_json(written), encoding="utf-8")


def _special_tokens(source: Path, settings: dict[str, Any]) -> tuple[dict[str, str], dict[int, dict[str, Any]]]:
    """Return the named tokens, and the tokens that replace a piece or are added, by number."""
    path = source / "special_tokens_map.json"
    mapped = json_file.read_foreign(path, foreign.FETCH_AGAIN, foreign.LARGE) if path.is_file() else {}
    named = dict(DEFAULTS)
    for name in NAMED:
        values = {_content(each[name]) for each in (settings, mapped) if each.get(name) is not None}
        if len(values) > 1:
            raise UserError(
                f"{path}: {name} is {shown(_content(mapped[name]))}, and {shown(_content(settings[name]))} in "
                f"{foreign.TOKENIZER_CONFIG}; use one of them in both"
            )
        if values:
            named[name] = values.pop()
    listed = {int(number): token for number, token in (settings.get("added_tokens_decoder") or {}).items()}
    path = source / "added_tokens.json"
    if path.is_file():
        added = json_file.read_foreign(path, foreign.FETCH_AGAIN, foreign.LARGE)
        for content, number in added.items():
            if listed.setdefault(number, {"content": content})["content"] != content:
                raise UserError(
                    f"{path}: {shown(content)} is {number}, which is {shown(listed[number]['content'])} in "
                    f"{foreign.TOKENIZER_CONFIG}; use one of them in both"
                )
    contents = {each["content"] for each in listed.values()}
    for token in (*(settings.get("additional_special_tokens") or ()), *(mapped.get("additional_special_tokens") or ())):
        if (content := _content(token)) not in contents:
            raise UserError(
                f"{source / foreign.TOKENIZER_CONFIG}: additional_special_tokens has {shown(content)}, whose number "
                f"added_tokens_decoder does not state; add it there, or {SUPPLY}"
            )
    return named, listed


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _built(path: Path, named: dict[str, str], listed: dict[int, dict[str, Any]]) -> Any:
    """Return the tokenizer of a SentencePiece model, compared with SentencePiece."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    message: Any = sentencepiece_model_pb2
    proto = message.ModelProto()
    proto.ParseFromString(path.read_bytes())
    if proto.trainer_spec.model_type != BPE_TYPE:
        raise UserError(f"{path}: is no BPE model, as those of InternLM2 and Baichuan are; {SUPPLY}")
    pieces = [piece.piece for piece in proto.pieces]
    types = [piece.type for piece in proto.pieces]
    skipped = {piece for piece, kind in zip(pieces, types, strict=True) if kind != NORMAL}
    scores = {piece.piece: piece.score for piece in proto.pieces}
    merges = generate_merges({piece: number for number, piece in enumerate(pieces)}, scores, skipped)
    replaced = {number: token["content"] for number, token in listed.items() if number < len(pieces)}
    names = [replaced.get(number, piece) for number, piece in enumerate(pieces)]
    backend = Tokenizer(
        models.BPE(
            {name: number for number, name in enumerate(names)},
            merges,
            unk_token=pieces[proto.trainer_spec.unk_id],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    prefix = proto.normalizer_spec.add_dummy_prefix
    blank = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank]) if prefix else blank
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decoding, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    special = {named[name]: {"content": named[name]} for name in named}
    special |= {token["content"]: token for _, token in sorted(listed.items()) if token.get("special", True)}
    # `single_word` has no effect in the published class.
    backend.add_special_tokens(
        [
            AddedToken(name, lstrip=token.get("lstrip", False), rstrip=token.get("rstrip", False), normalized=False)
            for name, token in special.items()
        ]
    )
    plain = [token["content"] for _, token in sorted(listed.items()) if not token.get("special", True)]
    plain += [name for name, kind in zip(names, types, strict=True) if kind == USER_DEFINED and name not in special]
    # Normalized, since SentencePiece looks for these pieces in the text with its blanks replaced.
    backend.add_tokens([AddedToken(name, normalized=not prefix, special=False) for name in plain])
    numbers = {token["content"]: number for number, token in listed.items()}
    numbers |= {name: pieces.index(name) for name in named.values() if name not in numbers and name in pieces}
    for name in special:
        if backend.token_to_id(name) != numbers.get(name):
            raise UserError(
                f"{path}: the special token {shown(name)} would be {backend.token_to_id(name)}, and the model's files "
                f"state {shown(numbers.get(name))}; {SUPPLY}"
            )
    hidden = {*special, *replaced.values(), *(pieces[number] for number in replaced)}
    _compare(path, backend, SentencePieceProcessor(model_file=str(path)), proto, hidden)
    return backend


def _compare(path: Path, backend: Any, reference: Any, proto: Any, hidden: set[str]) -> None:
    """Raise UserError if a text without any of the tokens `hidden` gets other tokens than from SentencePiece."""
    texts = [text for text in _texts(proto) if not any(each in text for each in hidden)]
    encodings = backend.encode_batch(texts, add_special_tokens=False)
    for text, encoded, numbers in zip(texts, encodings, reference.encode(texts), strict=True):
        if encoded.ids != numbers:
            raise UserError(
                f"{path}: SentencePiece encodes {shown(text)} as {numbers[:8]}, and a tokenizer.json as "
                f"{encoded.ids[:8]}; {SUPPLY}"
            )


def _texts(proto: Any) -> Iterator[str]:
    surfaces = [piece.piece.replace("▁", " ") for piece in proto.pieces if piece.type in (NORMAL, USER_DEFINED)]
    yield from TEXTS
    yield from surfaces
    draw = random.Random(0)  # noqa: S311
    for _ in range(JOINED):
        yield "".join(draw.choices(surfaces, k=draw.randint(2, LONGEST)))


def _set_ends(backend: Any, named: dict[str, str], settings: dict[str, Any]) -> None:
    """Make the tokenizer put BOS before a text and EOS behind it, as its settings say; by default BOS alone."""
    from tokenizers import processors

    first = [named["bos_token"]] if settings.get("add_bos_token", True) else []
    last = [named["eos_token"]] if settings.get("add_eos_token", False) else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys([*first, *last])],
        )
