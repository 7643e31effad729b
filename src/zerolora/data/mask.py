"""The loss mask: counted and checked while rows are written, and shown in mask.html."""

import collections
import html
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
    **dict.fromkeys(
        ("role", "from"), "whose turn it is, which decides with <code>loss</code> whether it is supervised"
    ),
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
    "prompt": "the question, whose answers are not supervised with <code>loss: assistant</code> or <code>last</code>",
    "completion": "the answer, or the turns behind the prompt",
    "text": "supervised as a whole",
    "input_ids": "the tokens: supervised where labels say so, all of them without labels",
    "labels": "the tokens that are supervised; -100 = context",
    **dict.fromkeys(("attention_mask", "position_ids"), "checked: a single row without padding"),
    **dict.fromkeys(("tool_call_id", "name"), GIVEN),
}
"""The effect of each field, as HTML."""


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
    names = (_names_table(source, settings.template, settings.loss) for source in sources)
    parts = [_PAGE, _summary(proof), *names]
    for number in drawn.tolist():
        row = rows.slice(number, 1).to_pylist()[0]
        parts.append(
            f"<h2>row {number + 1:,} of train</h2><p>{row['length']:,} tokens, {row['supervised']:,} supervised</p>"
            f"{_verdict(row)}<pre>{_coloured(tokenizer, row['input_ids'], row['labels'])}</pre>"
        )
        if "rejected_input_ids" in row:
            coloured = _coloured(tokenizer, row["rejected_input_ids"], row["rejected_labels"])
            parts.append(f"<p>rejected:</p><pre>{coloured}</pre>")
    write_text(data / "mask.html", "\n".join([*parts, "</body></html>", ""]))


def _verdict(row: dict[str, Any]) -> str:
    """Return the verdict on the first answer of a row, as HTML; empty for a text to learn."""
    if "rejected_input_ids" in row:
        return "<p>chosen:</p>"
    return f"<p>{'desirable' if row['desirable'] else 'undesirable'}:</p>" if "desirable" in row else ""


def _summary(proof: dict[str, Any]) -> str:
    roles = "".join(
        f"<tr><td>{html.escape(role)}</td>" + "".join(f"<td>{counts.get(name, 0):,}</td>" for name in COUNTS) + "</tr>"
        for role, counts in proof["roles"].items()
    )
    stops = ", ".join(f"<code>{html.escape(stop)}</code> {number:,}" for stop, number in proof["stop_tokens"].items())
    return (
        f"<p>{proof['rows']:,} rows, {proof['tokens']:,} tokens, {proof['supervised_tokens']:,} supervised. "
        f"Stop tokens of supervised turns: {stops or 'none'}.</p>"
        f"<table><tr><th>role</th>{''.join(f'<th>{title}</th>' for title in COUNTS.values())}</tr>{roles}</table>"
    )


def _names_table(source: ReadSource, template: str, loss: object) -> str:
    """Return a source's columns and keys as an HTML table, those that were read first."""
    fields = {column: field for field, column in source.columns.items()}
    order = ("read", "ignored", "redundant", "constant")
    lines = []
    for status, where, name in sorted(source.seen, key=lambda each: (order.index(each[0]), *each[1:])):
        argument = name.removeprefix(f"{KEYWORDS}.") in source.arguments or name == KEYWORDS
        effect = {
            "read": EFFECTS.get(fields.get(name, name), GIVEN if argument else "read by the form"),
            "ignored": "left out, since <code>ignore</code> names it",
            "redundant": "<b>not read</b>: part of a text that is read",
            "constant": "<b>not read</b>: the same in all rows",
        }[status]
        what = "column, in rows" if where == "column" else "key, in messages"
        number = source.seen[status, where, name]
        lines.append(
            f"<tr><td>{html.escape(printed(name))}</td><td>{what}</td><td>{number:,}</td><td>{effect}</td></tr>"
        )
    title = f"{source.name}: read as {source.form or 'nothing'}, template {template}, loss {loss}"
    return (
        f"<h2>{html.escape(title)}</h2>"
        f"<table><tr><th>name</th><th>is a</th><th>number</th><th>what becomes of it</th></tr>{''.join(lines)}</table>"
    )


def _coloured(tokenizer: Any, ids: list[int], labels: list[int]) -> str:
    """Return a row's tokens as HTML. Tokens that share a character are joined."""
    result: list[str] = []
    pending: list[int] = []
    shown = list(zip(ids, labels, strict=True))[:LONGEST]
    for index, (token, label) in enumerate(shown):
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        follows = index + 1 < len(shown) and (shown[index + 1][1] == IGNORED) == (label == IGNORED)
        if text.endswith("\ufffd") and follows and len(pending) < 8:
            continue
        kind = "c" if label == IGNORED else "l"
        visible = html.escape(text).replace("\n", "⏎\n")
        result.append(f'<span class="{kind}">{visible}</span>')
        pending = []
    if len(ids) > LONGEST:
        result.append(f" … {len(ids) - LONGEST:,} more tokens")
    return "".join(result)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>What the loss sees</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { white-space: pre-wrap; background: #fafafa; padding: 1rem; line-height: 1.8; overflow-wrap: anywhere; }
pre span { border-right: 1px solid #fff; unicode-bidi: isolate; }
.c { color: #777; background: #eee; } .l { color: #0b4; background: #dfd; }
h2 { font-size: 1rem; margin: 2rem 0 0; } td, th { padding: .2rem .8rem; text-align: left; }
</style></head><body><h1>What the loss sees</h1>
<p><span class="l">Green</span> tokens are supervised, <span class="c">grey</span> ones are ignored by the loss.
Each box is a token.</p>"""
