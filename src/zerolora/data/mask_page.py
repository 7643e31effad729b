"""mask.html: training rows, token by token, with supervised tokens marked."""

import html
from pathlib import Path
from typing import Any

import numpy as np

from zerolora.config.settings import PrepareSettings
from zerolora.data.names_page import ReadSource, names_table
from zerolora.data.prepared_rows import IGNORED, open_split
from zerolora.files import write_text
from zerolora.model.added_tokens import extend
from zerolora.model.architecture import tokenizer_of

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


def write_page(
    path: Path, data: Path, model: Path, settings: PrepareSettings, proof: dict[str, Any], sources: list[ReadSource]
) -> None:
    """Write a page of what is learnt: by role, by column and key of the sources, and token by token in some rows.

    In a row, context is grey and supervised tokens are green, with a border between tokens.
    """
    tokenizer = tokenizer_of(model)
    extend(tokenizer, settings.add_special_tokens, settings.add_tokens)
    rows = open_split(data, "train")
    drawn = np.sort(np.random.default_rng(settings.seed).permutation(len(rows))[:SAMPLE])
    names = (names_table(source, settings.template, settings.loss) for source in sources)
    parts = [_PAGE, _summary(proof), *names]
    for number in drawn.tolist():
        row = rows[number]
        parts.append(
            f"<h2>row {number + 1:,} of train</h2><p>{row['length']:,} tokens, {row['supervised']:,} supervised</p>"
            f"<pre>{_coloured(tokenizer, row['input_ids'], row['labels'])}</pre>"
        )
    write_text(path, "\n".join([*parts, "</body></html>", ""]))


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


def _coloured(tokenizer: Any, ids: list[int], labels: list[int]) -> str:
    """Return a row's tokens as HTML. Tokens that are parts of one character are shown as one."""
    result: list[str] = []
    pending: list[int] = []
    shown = list(zip(ids, labels, strict=True))[:LONGEST]
    for place, (token, label) in enumerate(shown):
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        follows = place + 1 < len(shown) and (shown[place + 1][1] == IGNORED) == (label == IGNORED)
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
<html lang="en"><head><meta charset="utf-8"><title>What the loss sees</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
pre { white-space: pre-wrap; background: #fafafa; padding: 1rem; line-height: 1.8; overflow-wrap: anywhere; }
pre span { border-right: 1px solid #fff; } .c { color: #777; background: #eee; } .l { color: #0b4; background: #dfd; }
h2 { font-size: 1rem; margin: 2rem 0 0; } td, th { padding: .2rem .8rem; text-align: left; }
</style></head><body><h1>What the loss sees</h1>
<p><span class="l">Green</span> tokens are supervised, <span class="c">grey</span> ones are ignored by the loss.
Each box is a token.</p>"""
