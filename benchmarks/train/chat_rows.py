"""A chat set of mixed lengths, equal on every machine: conversations cut from this project's documents.

Turns, and words a turn, are distributed as in published chat sets: most are short, a few are long (lognormal).
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""A chat template with the mark that TRL needs. Like ours, it ends with the last answer."""
ROOT = Path(__file__).resolve().parents[2]
TURNS = (0.45, 0.25, 0.12, 0.08, 0.06, 0.04)
"""Share of conversations with one, two … six questions and answers."""
WORDS = {"user": (12, 0.8), "assistant": (36, 0.9)}
"""Of a turn: median and sigma of a lognormal distribution."""
LONGEST = 600
"""Words of a conversation: with the documents' 2 tokens a word, and at most 3, none is cut at 2,048 tokens."""


def write_chat(path: Path, count: int, seed: int = 0, longest: int = LONGEST, system: int = 0) -> None:
    """Write `count` conversations as JSONL, each {"messages": [{"role", "content"}, …]}; with `system`, all have a
    system prompt of so many words, and `longest` does not count it."""
    draw, words = np.random.default_rng(seed), document_words()
    first = [{"role": "system", "content": " ".join(words[:system])}] if system else []
    rows = (json.dumps({"messages": [*first, *_conversation(draw, words, longest)]}) for _ in range(count))
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def _conversation(draw: np.random.Generator, words: list[str], longest: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * int(1 + draw.choice(len(TURNS), p=TURNS))
    lengths = np.array([max(1, draw.lognormal(np.log(WORDS[role][0]), WORDS[role][1])) for role in roles])
    lengths = np.maximum(1, lengths * min(1, longest / lengths.sum())).astype(int)
    starts = draw.integers(len(words) - lengths)
    return [
        {"role": role, "content": " ".join(words[start : start + length])}
        for role, start, length in zip(roles, starts, lengths, strict=True)
    ]


def document_words() -> list[str]:
    """Return the words of the project's documents."""
    documents = [ROOT / "README.md", ROOT / "config/README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return re.findall(r"[A-Za-z][A-Za-z,.;:'-]*", " ".join(path.read_text(encoding="utf-8") for path in documents))
