"""Names the template that keeps a conversation which another one rejects or cuts.

A remedy that removes a part of the row is worse than a well-known format that writes the same text and keeps it.
"""

from typing import TYPE_CHECKING

from zerolora.data.example import BadRow, Example
from zerolora.data.prompt_formats import PROMPT_FORMATS
from zerolora.errors import UserError, wording

if TYPE_CHECKING:
    from zerolora.data.template import Template

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
EXCHANGES = ([USER, ASSISTANT], [{"role": "system", "content": "Be brief."}, USER, ASSISTANT])


def keeping(template: "Template", example: Example) -> str | None:
    """Return what to write to keep all of `example`, which `template` rejects; None if nothing that is known does.

    The model's own template, where `template` is another; or a format that writes a plain exchange exactly as
    `template` does.
    """
    from_model = template.name != "chat" and template.own is None and bool(template.tokenizer.chat_template)
    if from_model and _keeps(template.named("chat"), example):
        return wording("template: chat, which has a form for it")
    for name in PROMPT_FORMATS:
        other = template.named(name) if name != template.name else None
        if other and any(_same(template, other, exchange) for exchange in EXCHANGES) and _keeps(other, example):
            return wording(f"template: {name}, which writes the same text, but keeps all of the row")
    return None


def _same(one: "Template", other: "Template", exchange: list[dict[str, str]]) -> bool:
    try:
        return one.write(exchange).strip() == other.write(exchange).strip()
    except BadRow:
        return False


def _keeps(template: "Template | None", example: Example) -> bool:
    """Return whether a template writes every message of a conversation."""
    if template is None:
        return False
    try:
        text = "".join("".join(piece.text for piece in template.pieces(example, remedy=False)).split())
    except (BadRow, UserError):
        return False
    messages = example.messages or []
    last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
    return all("".join(message["content"].split()) in text for message in messages[: last + 1])
