"""The special tokens of an axolotl config, and what ends an answer."""

import re
from pathlib import Path
from typing import Any

from zerolora.data.prompt_formats import PROMPT_FORMATS
from zerolora.imports.formats.import_format import (
    NO_EFFECT,
    Draft,
    Remark,
    Rule,
    fact,
    none,
    same,
    text,
    texts,
    unless_off,
)
from zerolora.model.foreign import TOKENIZER_CONFIG, tokenizer_config

TOKENS = "special tokens are those of the model's tokenizer files"
ROLES = ("bos_token", "unk_token")
"""Special tokens without a key here."""
KNOWN_TOKENS = {
    r"codellama/CodeLlama-|openlm-research/open_llama_|huggyllama/llama-|(meta-llama|NousResearch)/Llama-2-": {
        "bos_token": "<s>",
        "unk_token": "<unk>",
    },
    r"Qwen/Qwen[23][\w.]*-[\d.]+B-Instruct|Qwen/Qwen3-[\d.]+B$": {"eos_token": "<|im_end|>"},
    r"Qwen/Qwen2(\.5)?-[\d.]+B$": {"eos_token": "<|endoftext|>"},
    r"01-ai/Yi-": {"bos_token": "<|startoftext|>", "unk_token": "<unk>"},
    r"(meta-llama|NousResearch)/(Meta-)?Llama-3[\w.]*-\d+B-Instruct": {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
    },
    r"(meta-llama|NousResearch)/(Meta-)?Llama-3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
}
"""Special tokens of published tokenizers (tokenizer_config.json), by the beginning of the repository's name."""


def _stop(value: Any, draft: Draft) -> str | None:
    draft.facts["stop"] = [*texts(value), *draft.facts.get("stop", [])]
    return None


def _eos(value: Any, draft: Draft) -> str | None:
    draft.facts["stop"] = [*draft.facts.get("stop", []), text(value)]
    draft.facts["eos"] = value
    return Remark("ends an answer here, and is eos_token in templates; the tokenizer's files stay", NO_EFFECT)


def token_lines(draft: Draft) -> list[str]:
    """Return a line for each special token that the tokenizer may not have in this role; it has no key here."""
    lines: list[str] = []
    known = _known_tokens(draft)
    for role in ROLES:
        if (token := draft.facts.get(role)) is None:
            continue
        if known.get(role) == token:
            lines.append(Remark(f"special_tokens.{role}: {token} is that of the model's tokenizer", NO_EFFECT))
        else:
            own = f"which have {known[role]}" if known.get(role) else "which must have it"
            lines.append(Remark(f"special_tokens.{role}: {TOKENS}, {own}"))
    return lines


def ends(draft: Draft) -> list[str]:
    """Set the end of sequence that TRL's trainers append to answers which the template ends otherwise; return a line if
    it is not known."""
    rows = draft.config["prepare"]["rows"]
    form, written = PROMPT_FORMATS.get(rows["template"]), rows.get("template_writes")
    if "objective" not in draft.facts or not (form or written):
        return []
    stop = form.example.rpartition("Hello")[2].removesuffix("»") if form else written[0].rpartition("Bye")[2]
    stop, eos = stop.strip(), draft.facts.get("eos") or _known_tokens(draft).get("eos_token")
    if stop in ("</s>", "{eos_token}", eos):
        return []
    if eos:
        draft.key = "rl"
        draft.set("prepare.rows.append_token", eos)
        return []
    text = f"the tokenizer's end of sequence follows {stop} in an answer there, not here, unless they are the same"
    return [Remark(f"rl: {text}; set prepare.rows.append_token")]


def _known_tokens(draft: Draft) -> dict[str, Any]:
    """Return the special tokens of the model's tokenizer by role, as far as they are known."""
    model = draft.facts.get("model", "")
    if Path(model).is_dir() and (Path(model) / TOKENIZER_CONFIG).is_file():
        return {key: _content(value) for key, value in tokenizer_config(Path(model)).items()}
    return next((dict(each) for begins, each in KNOWN_TOKENS.items() if re.match(begins, model)), {})


def _content(token: Any) -> Any:
    """Return the text of a token of tokenizer_config.json."""
    return token.get("content") if isinstance(token, dict) else token


RULES = {
    "eot_tokens": unless_off(Rule("prepare.rows.stop_tokens", _stop)),
    "special_tokens.pad_token": same("prepare.rows.pad_token", text),
    "special_tokens.eos_token": Rule("prepare.rows.stop_tokens", _eos),
    **{
        f"special_tokens.{role}": unless_off(fact(role, "", text, f"{TOKENS}: no change if this is theirs"))
        for role in ROLES
    },
    "special_tokens": none(TOKENS),
    "special_tokens.additional_special_tokens": unless_off(same("prepare.rows.add_special_tokens", texts)),
}
