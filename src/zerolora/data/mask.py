"""The loss mask: counted and checked while rows are written, and shown in mask.html, by the template here."""

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerolora.config.settings import PrepareSettings
from zerolora.data.formats.reading import FACTORS, REASONING, SWITCHES, Seen
from zerolora.data.formats.template_arguments import KEYWORDS
from zerolora.data.prepared_rows import IGNORED, open_table
from zerolora.data.statistics import printed
from zerolora.errors import UserError
from zerolora.files import write_text
from zerolora.pages import environment

SAMPLE = 20  # rows on the page
LONGEST = 2000  # tokens shown of a row
COUNTS = {
    "turns": "turns",
    "supervised_turns": "supervised turns",
    "supervised_tokens": "supervised tokens",
    "turns_left_out": "left out by the row itself (weight 0)",
    "turns_put_in": "put in by the row itself",
    "turns_of_prompts": "of a prompt, with a completion",
}
"""Titles of the counts of mask.json by role."""
GIVEN = "given to the template"
EFFECTS = {
    **dict.fromkeys(("messages", "conversations"), "the turns"),
    **dict.fromkeys(("role", "from"), "whose turn it is, which decides with loss whether it is supervised"),
    **dict.fromkeys(("content", "value"), "the text of a turn: supervised where the turn is"),
    **dict.fromkeys(FACTORS, "0: the turn is not supervised; 1 changes nothing"),
    **dict.fromkeys(SWITCHES, "false or 0: the turn is not supervised; true or 1: it is, whatever its role"),
    **dict.fromkeys(
        REASONING, "the thoughts of an answer, in the template's place for them: supervised where the answer is"
    ),
    **dict.fromkeys(("tool_calls", "function_call"), "calls of tools: supervised where the turn is"),
    **dict.fromkeys(("tools", "functions"), "the tools that the template lists: context"),
    **dict.fromkeys(("system", "system_prompt"), "the system message, a turn of its own"),
    **dict.fromkeys(("instruction", "input", "context"), "the question, a turn of the user"),
    "history": "earlier questions and answers, turns of user and assistant",
    "output": "the answer, a turn of the assistant",
    "prompt": "the question, whose answers are not supervised with loss: assistant or last",
    "completion": "the answer, or the turns behind the prompt",
    "text": "supervised as a whole",
    "input_ids": "the tokens: supervised where labels say so, all of them without labels",
    "labels": "the tokens that are supervised; -100 = context",
    **dict.fromkeys(("attention_mask", "position_ids"), "checked: a single row without padding"),
    **dict.fromkeys(("tool_call_id", "name"), GIVEN),
}
"""The effect of each field."""


class Proof:
    """The loss mask of all rows, counted from the written columns, independently of the code that made them."""

    def __init__(self) -> None:
        self.roles: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.stops: collections.Counter[str] = collections.Counter()
        self.rows: collections.Counter[str] = collections.Counter()

    def add(self, counts: dict[str, int]) -> None:
        """Add a chunk's counts (tokenize.Result) of turns, supervised turns and tokens by role, and of stop tokens."""
        for name, number in counts.items():
            what, _, which = name.partition(".")
            if what == "stop":
                self.stops[which] += number
            elif what not in ("rows", "column"):
                self.roles[which][what] += number

    def look(self, batch: Any) -> None:
        """Count written rows (an Arrow record batch)."""
        numbers = [_look(batch, prefix) for prefix in ("", "rejected_") if f"{prefix}input_ids" in batch.schema.names]
        for each in numbers:
            self.rows.update(each.counts)
        lengths, supervised = (
            np.sum([getattr(each, name) for each in numbers], 0) for name in ("lengths", "supervised")
        )
        wrong = (batch["length"].to_numpy() != lengths) | (batch["supervised"].to_numpy() != supervised)
        if len(numbers) > 1:
            wrong |= batch["chosen_supervised"].to_numpy() != numbers[0].supervised
            self.rows["rows_with_two_prompts"] += _with_two_prompts(batch)
        self.rows.update(rows=len(batch), rows_with_wrong_counts=int(wrong.sum()))

    def check(self) -> None:
        """Raise UserError if the written rows violate a rule of the mask."""
        rules = [name for name in self.rows if name.startswith(("rows_", "labels_"))]
        broken = [f"{name.replace('_', ' ')}: {self.rows[name]}" for name in rules if self.rows[name]]
        if broken:
            raise UserError(f"the mask is wrong ({'; '.join(broken)}); nothing was published, please report it")

    def as_json(self) -> dict[str, Any]:
        """Return the content of mask.json."""
        return {
            **self.rows,
            "roles": {role: dict(sorted(counts.items())) for role, counts in sorted(self.roles.items())},
            "stop_tokens": dict(sorted(self.stops.items())),
        }


class _Looked(NamedTuple):
    """The tokens and supervised tokens of each sequence, [rows], and counts over all."""

    lengths: np.ndarray
    supervised: np.ndarray
    counts: dict[str, int]


def _look(batch: Any, prefix: str) -> _Looked:
    """Count one sequence of each row."""
    ids, labels = (batch[f"{prefix}{name}"].flatten().to_numpy() for name in ("input_ids", "labels"))
    lengths = np.diff(batch[f"{prefix}input_ids"].offsets.to_numpy())
    starts = np.cumsum(lengths) - lengths
    supervised = labels != IGNORED
    counts = np.add.reduceat(supervised, starts) if len(starts) else starts
    same = len(ids) == len(labels) and np.array_equal(lengths, np.diff(batch[f"{prefix}labels"].offsets.to_numpy()))
    return _Looked(
        lengths,
        counts,
        {
            "tokens": len(ids),
            "supervised_tokens": int(supervised.sum()),
            "rows_without_supervised_token": int((counts == 0).sum()),
            "rows_whose_first_token_is_supervised": int(supervised[starts].sum()),
            "labels_that_are_not_their_token": int((labels != ids)[supervised].sum()) if same else len(labels),
        },
    )


def _with_two_prompts(batch: Any) -> int:
    """Return the number of pairs whose answers follow different prompts."""
    columns = [batch[name].to_numpy(zero_copy_only=False) for name in
               ("input_ids", "labels", "rejected_input_ids", "rejected_labels")]  # fmt: skip
    return sum(
        not np.array_equal(*(ids[: np.flatnonzero(labels != IGNORED)[0]] for ids, labels in (row[:2], row[2:])))
        for row in zip(*columns, strict=True)
    )


class ReadSource(NamedTuple):
    """A source after reading: its name, the form of its rows, its column of each field, the use of every name, and the
    variables that the chat template reads."""

    name: str
    form: str
    columns: dict[str, str]
    seen: Seen
    arguments: frozenset[str]


def write_page(
    data: Path, tokenizer: Any, settings: PrepareSettings, proof: dict[str, Any], sources: list[ReadSource]
) -> None:
    """Write mask.html to the prepared `data`: counts by role, the columns and keys of each source, and SAMPLE training
    rows token by token, supervised tokens in green and context in grey."""
    rows = open_table(data, "train")
    drawn = np.sort(np.random.default_rng(settings.seed).permutation(len(rows))[:SAMPLE])
    page = environment(Path(__file__).parent).get_template("mask.html")
    write_text(
        data / "mask.html",
        page.render(
            proof=proof,
            counts=COUNTS,
            sources=[(_title(source, settings.template, settings.loss), _names(source)) for source in sources],
            rows=[_sample(tokenizer, number, rows.slice(number, 1).to_pylist()[0]) for number in drawn.tolist()],
        ),
    )


class _Sample(NamedTuple):
    """A row of the page: its number, length and supervised tokens, and its sequences by their titles."""

    number: int
    length: int
    supervised: int
    sequences: list[tuple[str, "_Shown"]]


class _Shown(NamedTuple):
    """The texts of a sequence's tokens, each with the class of its colour, and the number of tokens left out."""

    texts: list[tuple[str, str]]
    more: int


def _sample(tokenizer: Any, number: int, row: dict[str, Any]) -> _Sample:
    """Return a row for the page; its first title is the verdict on an answer, empty for a text to learn."""
    rejected = "rejected_input_ids" in row
    verdict = "chosen" if rejected else ("undesirable", "desirable")[row["desirable"]] if "desirable" in row else ""
    sequences = [(verdict, _coloured(tokenizer, row["input_ids"], row["labels"]))]
    if rejected:
        sequences.append(("rejected", _coloured(tokenizer, row["rejected_input_ids"], row["rejected_labels"])))
    return _Sample(number + 1, row["length"], row["supervised"], sequences)


def _title(source: ReadSource, template: str, loss: object) -> str:
    return f"{source.name}: read as {source.form or 'nothing'}, template {template}, loss {loss}"


def _names(source: ReadSource) -> Iterator[tuple[str, str, int, str]]:
    """Yield each name in a source, what it is, how often, and what becomes of it; those that are read first."""
    fields = {column: field for field, column in source.columns.items()}
    order = ("read", "ignored", "redundant", "constant")
    for status, where, name in sorted(source.seen, key=lambda each: (order.index(each[0]), *each[1:])):
        argument = name.removeprefix(f"{KEYWORDS}.") in source.arguments or name == KEYWORDS
        effect = {
            "read": EFFECTS.get(fields.get(name, name), GIVEN if argument else "read by the form"),
            "ignored": "left out, since ignore names it",
            "redundant": "not read: part of a text that is read",
            "constant": "not read: the same in all rows",
        }[status]
        what = "column, in rows" if where == "column" else "key, in messages"
        yield printed(name), what, source.seen[status, where, name], effect


def _coloured(tokenizer: Any, ids: list[int], labels: list[int]) -> _Shown:
    """Return the texts of a sequence's tokens. Tokens that share a character are joined."""
    texts: list[tuple[str, str]] = []
    pending: list[int] = []
    shown = list(zip(ids, labels, strict=True))[:LONGEST]
    for index, (token, label) in enumerate(shown):
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        follows = index + 1 < len(shown) and (shown[index + 1][1] == IGNORED) == (label == IGNORED)
        if text.endswith("\ufffd") and follows and len(pending) < 8:
            continue
        texts.append(("c" if label == IGNORED else "l", text.replace("\n", "⏎\n")))
        pending = []
    return _Shown(texts, max(len(ids) - LONGEST, 0))
