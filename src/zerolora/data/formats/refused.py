"""Columns and keys of messages that no form may leave unread, since they change the supervision.

Only unread names are looked up here, so a form that reads such a column supports it. Names used by known tools are
listed; others are classified by their words, such as train_on_turn or imagePaths.
"""

import functools
import re
from typing import NamedTuple

from zerolora.data.formats.reading import FACTORS, MODES, SWITCHES, Where
from zerolora.data.formats.row_values import factor_of
from zerolora.data.published import split_of
from zerolora.errors import wording


class Refusal(NamedTuple):
    """The effect of a column or key, and the remedy, with NAME for its name. forms: those concerned; empty for all."""

    what: str
    remedy: str
    forms: tuple[str, ...] = ()


CONVERSATIONS = ("alpaca", "labelled", "messages", "preference", "prompt", "sharegpt")
QUESTIONS = ("alpaca", "labelled", "preference", "prompt")
"""Forms of a single question; a conversation is complete without choices and passages."""
MEDIA = {
    **dict.fromkeys(("image", "images", "image_url", "input_image", "image_path", "pixel_values"), "images"),
    **dict.fromkeys(("video", "videos", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "audio"),
}
"""The medium in a column, a message key or a content part of this name or type."""
LABELS = ("label", "labels", "kto_tag")
JUDGED = (
    *("chosen", "rejected", "chosen_response", "rejected_response", "chosen_messages", "rejected_messages"),
    *("positive_messages", "negative_messages", "margin"),
)
"""Columns and keys of preference data in TRL, LLaMA-Factory, ms-swift and axolotl."""
WEIGHTS = (*FACTORS, *SWITCHES, "sample_weight")
"""Of a whole row; those of a message are supported."""
_ASKED = wording("changes what is asked, and this form does not read it")
_JUDGES = wording("judges or compares answers, and every answer would be supervised: train.objective is sft")
_COMPARED = Refusal(
    _JUDGES,
    "name the answers to learn, as in columns: {completion: chosen}, of conversations {messages: chosen}, or write "
    "train.objective: dpo for pairs",
)
_NOT_PAIRS = wording("judges or compares answers, and is not a column of the form")
OF_JUDGED = {
    "preference": Refusal(_NOT_PAIRS, "name the two answers, as in columns: {chosen: BETTER, rejected: WORSE}"),
    "labelled": Refusal(_NOT_PAIRS, "name the label, as in columns: {label: NAME}"),
}
"""The refusal of judged rows in the forms of such rows."""
_VERDICT = wording("write the better answer of each row as chosen and the other one as rejected")
"""The remedy for a column that says which of two answers is the better one."""
_MARGIN = Refusal("weighs a pair, and pairs have no weight", "remove it")
_WEIGHS = Refusal("weighs a whole row, and rows have no weight", "remove rows of weight 0, weigh files by sources")
_PARTS = Refusal(
    "selects which turns or tokens are in the loss",
    "write train: true or false in each turn, or labels beside input_ids, with -100 for tokens that are not supervised",
)
_SWITCH = Refusal(
    "seems to select turns for the loss, and is not a key that is read",
    "write columns: {train: NAME} if true means that it is supervised, or the opposite as train if not",
)
_TOKENS = Refusal(
    "selects which tokens are in the loss", "write labels, with -100 for tokens that are not supervised", ("tokens",)
)
_THOUGHTS = Refusal(
    "contains thoughts of an answer, and is not a key that is read",
    "write columns: {reasoning_content: NAME}",
    CONVERSATIONS,
)
_THOUGHTS_BESIDE = Refusal(
    "contains thoughts, which belong to one of the answers",
    "move it into that turn, as reasoning_content",
    CONVERSATIONS,
)
_SYSTEM = Refusal("is a system prompt, and no column that is read", "write columns: {system: NAME}", CONVERSATIONS)
_TOOLS = Refusal("is a list of tools, and no column that is read", "write columns: {tools: NAME}", CONVERSATIONS)
_TOOLS_OF_TURN = Refusal(
    "is a list of tools, which only a row or its system message can have", "move it there, as tools", CONVERSATIONS
)
_CHANNEL = Refusal(
    "marks a turn as no answer to the user, and would be in the loss as one",
    "write its text as reasoning_content of the next answer",
)
REFUSED: dict[str, Refusal] = {
    **dict.fromkeys(JUDGED, _COMPARED),
    **dict.fromkeys(LABELS, Refusal(_JUDGES, "keep the rows of good answers alone, or write train.objective: kto")),
    **{
        name: Refusal(
            f"holds {kind}, which are not supported: only text can be trained on, of a vision-language model too",
            "remove it",
        )
        for name, kind in MEDIA.items()
    },
    **dict.fromkeys(
        ("train_detail", "training_detail", "segments"),
        Refusal(
            "selects which parts of a text are in the loss", "split the text into turns, each with train: true or false"
        ),
    ),
    **dict.fromkeys(("completion_mask", "assistant_masks", "prompt_mask", "prompt_length", "prompt_len"), _TOKENS),
    **dict.fromkeys(
        ("seq_lengths", "seq_lens", "seqlens", "cu_seqlens", "sequence_lengths"),
        Refusal(
            "says that several rows are packed into one, which would see each other",
            "write each as a row, and pack: {packing: true}",
            ("tokens",),
        ),
    ),
    **dict.fromkeys(
        ("context", "history", "contexts", "documents"),
        Refusal(_ASKED, "put it into the question", CONVERSATIONS),
    ),
    "input": Refusal(_ASKED, "put it into the prompt", ("alpaca", "prompt")),
    **dict.fromkeys(("mask", "masked", "weights"), _PARTS),
    **dict.fromkeys(WEIGHTS, _WEIGHS),
}


_HELD_OUT = Refusal(
    "says that a row is held out of training",
    "put rows of each split into a file of their own, and name it in sources with its split",
)
SPLIT_COLUMNS = ("split", "splits", "dataset_split", "data_split", "partition")


class _Words(NamedTuple):
    """Names that consist of these words, at least one of `first` and any number of `others`."""

    first: frozenset[str]
    others: frozenset[str]


def _words(first: str, others: str) -> _Words:
    return _Words(frozenset(first.split()), frozenset(others.split()))


_OF_MEDIA = "url urls uri path paths file files data bytes list input values"
KINDS = {
    "supervised": _words(
        "loss train trained training trainable mask masks masked unmasked weight weights supervise supervised learn "
        "learned learnt",
        "on turn turns token tokens row sample example message messages assistant user answer response output input "
        "inputs prompt completion is do should compute calculate calc with no not step scale factor this in use apply "
        "skip skipped ignore ignored include exclude excluded from flag",
    ),
    "thoughts": _words(
        "thought thoughts think thinking reasoning cot rationale rationales scratchpad",
        "chain of content text details blocks steps trace traces process path paths trajectory trajectories response",
    ),
    "system": _words("system sys preamble", "prompt message msg instruction instructions content text"),
    "instructions": _words("instructions", ""),
    "history": _words(
        "history", "chat conversation conversations dialog dialogue message messages turn turns previous past full"
    ),
    "context": _words(
        "context contexts", "retrieved retrieval rag reference gold supporting source background knowledge text"
    ),
    "passage": _words(
        "passage passages document documents", "retrieved retrieval reference source supporting text texts content gold"
    ),
    "choices": _words("choices options", "answer answers multiple"),
    "tools": _words(
        "tools functions apis", "tool function api available list schema schemas definition definitions specs json"
    ),
    "one tool": _words("tool function api", "list schema schemas definition definitions specs json"),
    "images": _words("image images img imgs picture pictures photo photos pixel", _OF_MEDIA),
    "videos": _words("video videos", _OF_MEDIA),
    "audio": _words("audio audios speech", _OF_MEDIA),
    "verdict": _words(
        "winner better safer preference preferred",
        "response answer output completion model is id ids index idx label a b tie",
    ),
    "judged": _words(
        "chosen rejected preference preferences preferred dispreferred reward rewards ranking rankings advantage "
        "advantages winner loser",
        "response responses answer message messages conversations text output completion score scores rating tag is",
    ),
}
_WORD = re.compile(r"CoTs?(?![a-z])|[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
NUMBERS = re.compile(r"\s*\[\s*-?\d")
"""Matches a list of numbers as JSON."""
_NEGATIVE = frozenset(["no", "not", "skip", "skipped", "ignore", "ignored", "exclude", "excluded", "masked"])
_ANSWERED = {"yes": 1.0, "on": 1.0, "no": 0.0, "off": 0.0}
_VERDICTS = ("good", "bad", "chosen", "rejected", "desirable", "undesirable")


OF_KIND = {
    "supervised": _PARTS,
    **dict.fromkeys(("thoughts", "some thoughts"), _THOUGHTS),
    **dict.fromkeys(("system", "instructions"), _SYSTEM),
    **dict.fromkeys(("tools", "one tool"), _TOOLS),
    **{kind: REFUSED[kind] for kind in ("images", "videos", "audio")},
    **dict.fromkeys(("history", "context"), REFUSED["context"]),
    **dict.fromkeys(("passage", "choices"), REFUSED["context"]._replace(forms=QUESTIONS)),
}
OF_KEY: dict[str, Refusal | None] = {
    **dict.fromkeys(("tools", "one tool"), _TOOLS_OF_TURN),
    **dict.fromkeys(("system", "instructions", "choices", "history", "context", "passage")),
}
"""The same for a key of a message."""


def _words_of(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


@functools.lru_cache(4096)
def _kind_of(name: str) -> str:
    """Return the kind of a column or key by its words, "" for none."""
    listed = _words_of(name)
    words = frozenset(listed)
    for kind, (first, others) in KINDS.items():
        if words & first and words <= first | others and (kind != "one tool" or words & others):
            return kind
    # The last word decides: model_reasoning has thoughts, reasoning_effort and reasoning_model have not.
    return "some thoughts" if listed and listed[-1] in KINDS["thoughts"].first else ""


def refusal_of(name: str, held: object, where: Where, format: str) -> Refusal | None:
    """Return the refusal of a column or key with a value that `format` does not read; None if it may stay unread."""
    name = name.rpartition(".")[2]
    if name in LABELS and not _is_verdict(held):
        return None
    refusal = REFUSED.get(name) or _by_words(name, held, where, format)
    if refusal and refusal.what == _JUDGES and format in OF_JUDGED:
        if _is_score(name, held):
            return None
        refusal = _MARGIN if name == "margin" else OF_JUDGED[format]
        if format == "preference" and _kind_of(name) == "verdict" and not (_is_list(held) or _is_prose(held)):
            refusal = refusal._replace(remedy=_VERDICT)
    if refusal == _WEIGHS and where == "column" and not _is_list(held):
        # 1 changes nothing, and a text is another kind of weight, as in kilograms.
        harmless = 0.0 if _NEGATIVE.intersection(_words_of(name)) else 1.0
        return refusal if _factor(held) not in (None, harmless) else None
    if refusal in (_WEIGHS, _PARTS):
        refusal = _TOKENS if format == "tokens" else _PARTS if where == "column" else _SWITCH
    if where == "column" and name.lower() in SPLIT_COLUMNS and split_of(str(held)) not in ("", "train"):
        refusal = _HELD_OUT
    if where == "key" and name == "channel" and held == "analysis":
        refusal = _CHANNEL
    if refusal and refusal.what == _ASKED and where == "column":
        refusal = _in_alpaca(refusal, name, held, format)
    return refusal if refusal and (not refusal.forms or format in refusal.forms or not format) else None


def _in_alpaca(refusal: Refusal, name: str, held: object, format: str) -> Refusal:
    """Return the refusal of a part of the question; the remedy is alpaca's field for it, if any."""
    field = "history" if "history" in name.lower() and _is_list(held) else "input" if isinstance(held, str) else ""
    if field and format == "alpaca":
        return refusal._replace(remedy=f"write columns: {{{field}: NAME}}, or {refusal.remedy}")
    if field and format == "prompt":
        how = f"write format: alpaca, with columns for instruction and output and {field}: NAME"
        return refusal._replace(remedy=f"{refusal.remedy}, or {how}")
    return refusal


def _by_words(name: str, held: object, where: Where, format: str) -> Refusal | None:
    kind = _kind_of(name)
    if kind == "supervised" and not _is_list(held):
        return None if _factor(held) is None else _SWITCH if where == "key" else _WEIGHS
    if kind in ("judged", "verdict"):
        return _COMPARED
    if factor_of(held) is not None or _says_nothing(kind, held):
        return None  # a count, or a flag
    if where == "key" and kind in OF_KEY:
        return OF_KEY[kind]
    beside = where == "column" and format in ("labelled", "messages", "preference", "sharegpt")
    return _THOUGHTS_BESIDE if "thoughts" in kind and beside else OF_KIND.get(kind)


def _says_nothing(kind: str, held: object) -> bool:
    """Return whether a value is only a name, such as a document's, or a mode of thinking."""
    if "thoughts" in kind and isinstance(held, str) and held.strip().lower() in MODES:
        return True
    if kind in ("some thoughts", "instructions", "context", "passage"):
        return not _is_prose(held)
    return kind in ("choices", "history") and not (isinstance(held, list) or _is_prose(held))


def _is_list(held: object) -> bool:
    """Return whether a value is a list or object, maybe as JSON text."""
    return isinstance(held, (list, dict)) or (isinstance(held, str) and held.lstrip()[:1] in ("[", "{"))


def _is_score(name: str, held: object) -> bool:
    """Return whether a value rates an answer by a number."""
    return factor_of(held) is not None and bool({"score", "scores", "rating", "reward"}.intersection(_words_of(name)))


def _is_prose(held: object) -> bool:
    """Return whether a value contains a text of several words."""
    if isinstance(held, dict):
        held = list(held.values())
    return (
        any(map(_is_prose, held)) if isinstance(held, list) else isinstance(held, str) and len(held.split(None, 2)) > 1
    )


def _is_verdict(held: object) -> bool:
    """Return whether a label rates an answer or lists tokens, and is not a class of rows."""
    if isinstance(held, list):
        return any(isinstance(each, (int, float)) for each in held)
    if isinstance(held, str) and (held.strip().lower() in _VERDICTS or NUMBERS.match(held)):
        return True
    return factor_of(held) in (0.0, 1.0, -1.0)


def _factor(held: object) -> float | None:
    """Return a factor of the loss, maybe from a word."""
    word = held.strip().lower() if isinstance(held, str) else ""
    return _ANSWERED[word] if word in _ANSWERED else factor_of(held)
