"""Conversations, and what each of the templates must make of them: tests/templates/<name>.txt.

A golden text is written by hand from the template. Learned parts stand in « », `!!` begins the words of a refusal, and
a section {name} holds what stands for {name} in the others.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers_of import FAMILIES, TEMPLATES

from zerolora.config.settings import PrepareSettings
from zerolora.data.encode import Piece
from zerolora.data.example import Example


def prepare_settings(**changed: Any) -> PrepareSettings:
    """Return settings of a data set; `changed` as the config would say it."""
    values = {"model": "tiny", "path": "rows.json", "split": {"validation": 2, "test": 3}, "seed": 1}
    return PrepareSettings.model_validate(values | changed)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def user(content: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def answer(content: str, *cities: str) -> dict[str, Any]:
    """Return a message of the assistant that calls the tool for these cities."""
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": city}},
        }
        for number, city in enumerate(cities, 1)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


BRIEF = {"role": "system", "content": "Be brief."}
DEGREES = {"role": "tool", "content": "3 degrees", "tool_call_id": "call00001"}
ASKED = user("Weather in Oslo?")
TOLD = answer("It is 3 degrees.")
CONVERSATIONS = {
    "single": [user("Hi"), answer("Hello")],
    "multi": [user("Who are you?"), answer("I am Bo."), user("And now?"), answer("Now I rest.")],
    "system": [BRIEF, user("Hi"), answer("Hello")],
    "blanks": [user("  two\n\nlines "), answer("\n a  b \n")],
    "unicode": [user("王大丫丫的回答是"), answer("é — ½ 你好。")],
    "greeting": [answer("Welcome."), user("Hi"), answer("Hello")],
    "insisting": [user("Hi"), user("Are you there?"), answer("Hello")],
    "asking": [user("Hi"), answer("Hello"), user("More?")],
    "thinking": [
        user("Who are you?"),
        answer("<think>\nMy name?\n</think>\n\nI am Bo."),
        user("And now?"),
        answer("<think>\nLate.\n</think>\n\nNow I rest."),
    ],
    "pondering": [user("And now?"), answer("<think>\nLate.\n</think>\n\nNow I rest.")],
    "tools": [ASKED, answer("", "Oslo"), DEGREES, TOLD],
    "calls": [ASKED, answer("", "Oslo"), DEGREES, TOLD],
    "musing": [ASKED, answer("Let me look.", "Oslo"), DEGREES, TOLD],
    "pair": [ASKED, answer("Let me look.", "Oslo", "Bergen"), DEGREES, TOLD],
    "chatting": [user("Hi"), answer("Hello"), ASKED, answer("", "Oslo"), DEGREES, TOLD],
}
WITH_TOOLS = ("tools", "chatting")


class Golden(NamedTuple):
    """What a template must make of a conversation: the marked text, or the words with which the row is refused."""

    template: str
    conversation: str
    loss: str | list[str]
    stops: list[str]
    text: str
    refusal: str

    @property
    def example(self) -> Example:
        """The conversation, with the tools where it is one with tools."""
        return Example(CONVERSATIONS[self.conversation], TOOLS if self.conversation in WITH_TOOLS else None)

    def __str__(self) -> str:
        loss = self.loss if isinstance(self.loss, str) else "+".join(self.loss)
        return f"{self.template}-{self.conversation}-{loss}{'-stops' if self.stops else ''}"


def marked(pieces: list[Piece]) -> str:
    """Return pieces as a golden text."""
    return "".join(f"«{piece.text}»" if piece.supervised else piece.text for piece in pieces).replace("»«", "")


def goldens() -> list[Golden]:
    """Return all of them, in the order of the templates' names."""
    return [golden for name in sorted(FAMILIES) for golden in _goldens_of(name)]


def _goldens_of(name: str) -> list[Golden]:
    parts = re.split(r"^== (.+)\n", Path(TEMPLATES / f"{name}.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = {title: body.removesuffix("\n") for title, body in zip(parts[1::2], parts[2::2], strict=True)}
    shared = {title: sections.pop(title) for title in list(sections) if title.startswith("{")}
    result = []
    for title, body in sections.items():
        conversation, *options = title.split(", ")
        settings = {key: words for key, *words in (option.split() for option in options)}
        loss: str | list[str] = settings.get("loss", ["assistant"])
        if loss[0] in ("assistant", "last", "everything") and len(loss) == 1:
            loss = loss[0]
        text = re.sub(r"\{(preamble|tools|defaults)\}", lambda key: shared[key[0]], body)
        refusal = text.removeprefix("!! ") if text.startswith("!! ") else ""
        result.append(Golden(name, conversation, loss, settings.get("stops", []), "" if refusal else text, refusal))
    return result
