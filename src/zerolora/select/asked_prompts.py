"""The prompts that answers were sampled from: the split `prompts` of a data set."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerolora.data.prepared_rows import PROMPTS, ROW, open_table
from zerolora.data.sampled_prompts import GIVEN, prompt_key
from zerolora.files import MANIFEST
from zerolora.model import foreign


class SampledPrompt(NamedTuple):
    """A prompt."""

    row: dict[str, Any]
    """Its row, for a task's judge."""
    tokens: int
    hash: str
    """Of its tokens."""
    source: str
    """Name of its source in the data set."""
    given: list[str]
    """The answers that the rows with this prompt give to it."""

    @property
    def conversation(self) -> dict[str, Any]:
        """The conversation before the answer, as columns of a row: `messages`, and what else the template reads."""
        return dict(json.loads(self.row[ROW]))

    @property
    def texts(self) -> list[str]:
        """The texts by which it is compared with other questions: the last one, and of several turns all together."""
        turns = [str(turn.get("content") or "") for turn in self.conversation["messages"] if turn["role"] != "system"]
        return [*dict.fromkeys((str(self.row["question"]), "\n\n".join(turns)))]

    @property
    def as_text(self) -> str:
        """The conversation as a text for a judge: the question, or, if there is more, the tools and all turns with
        their roles."""
        conversation = self.conversation
        parts = [(turn["role"], _content(turn)) for turn in conversation["messages"]]
        if tools := conversation.get("tools"):
            parts.insert(0, ("tools", json.dumps(tools, ensure_ascii=False)))
        if len(parts) == 1:
            return parts[0][1]
        return "\n\n".join(f"### {role.capitalize()}:\n{text}" for role, text in parts)


def _content(turn: dict[str, Any]) -> str:
    calls = turn.get("tool_calls")
    texts = [turn.get("content"), json.dumps(calls, ensure_ascii=False) if calls else None]
    return "\n".join(str(text) for text in texts if text)


def read_prompts(data: Path) -> list[SampledPrompt]:
    """Return the prompts of the prepared `data`."""
    sources = foreign.manifest(data / MANIFEST, "zerolora stage prepare", "sources")["sources"]
    table = open_table(data, PROMPTS)
    result = []
    for batch in table.to_batches():
        for row in batch.to_pylist():
            ids = row.pop("input_ids")[: row["prompt"]]
            row.pop("labels", None)
            key = prompt_key(np.array(ids, np.int32)).hex()
            given = row.pop(GIVEN)
            result.append(SampledPrompt(row, len(ids), key, sources[row["source"]], given))
    return result
