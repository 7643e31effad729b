"""The interface of a well-known prompt format."""

from dataclasses import dataclass

# Before every template: what no format of this folder can write.
CHECKS = """{%- for message in messages if message.tool_calls or message.role == "tool" -%}
{{- raise_exception("tool calls have no form in it; write template: chat") -}}
{%- endfor -%}
"""
ALTERNATION = """{%- for message in (messages[1:] if messages and messages[0].role == "system" else messages) -%}
{%- if message.role != ("user" if loop.index is odd else "assistant") -%}
{{- raise_exception("user and assistant must take turns in it, after one system prompt at most") -}}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class PromptFormat:
    """A well-known prompt format, which a file in this folder defines as `FORMAT`.

    source: who published it, and where. template: it as a Jinja chat template of transformers, in which `bos_token` is
    empty if the tokenizer adds none to a text. tokens: what of it the model must have as one token each, besides BOS
    and the end of sequence. example: what it makes of the question Hi and the answer Hello for a tokenizer whose BOS
    and end of sequence are <s> and </s>, with the supervised text in « ». alternates: user and assistant must take
    turns. input: what it writes between an instruction and its input, of rows that have one.
    """

    name: str
    source: str
    template: str
    example: str
    tokens: tuple[str, ...] = ()
    alternates: bool = False
    input: str = "\n"

    @property
    def jinja(self) -> str:
        """Return the template with the checks of what it has no form for."""
        return CHECKS + (ALTERNATION if self.alternates else "") + self.template
