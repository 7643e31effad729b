"""Reads a prompt format of the user's own: a Jinja chat template in config/templates/."""

from typing import Any

from zerolora.bounded import bounded
from zerolora.config.user_file import user_text
from zerolora.config.values import USER_TEMPLATE
from zerolora.errors import UserError

LONGEST = 100_000  # characters: the longest of tests/templates/ has 16,000


def user_template(name: str) -> str | None:
    """Return the text of the template file that `prepare.template` names, None for a template that is not a file.

    Raises UserError, naming file and line, if it cannot be read, or is not Jinja.
    """
    if not USER_TEMPLATE.fullmatch(name):
        return None
    text = user_text(name, "a chat template", LONGEST)
    if not text.strip():
        raise UserError(f"{name}: is empty; write a chat template, as in docs/data.md")
    _check_syntax(name, text)
    return text


def _check_syntax(name: str, text: str) -> None:
    """Raise UserError, naming the line, for what transformers could not compile. Imports no transformers."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag of transformers around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = str
    try:
        with bounded(name):  # jinja2 computes constants when it compiles
            environment.compile(text)
    except TemplateSyntaxError as error:
        reason = " ".join(str(error.message).split())
        raise UserError(f"{name}:{error.lineno}: no Jinja template: {reason}; correct that line") from None
    except RecursionError:
        raise UserError(f"{name}: is nested too deep; write fewer blocks inside each other") from None
