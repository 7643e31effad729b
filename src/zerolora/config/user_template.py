"""Reads a prompt format of the user's own: a Jinja chat template in config/templates/."""

from pathlib import Path
from typing import Any

from zerolora.bounded import bounded
from zerolora.config.schema import USER_TEMPLATE
from zerolora.errors import UserError

LONGEST = 100_000  # characters: the longest of tests/templates/ has 16,000


def user_template(name: str) -> str | None:
    """Return the text of the template file that `prepare.template` names, None for a template that is no file.

    Raises UserError, naming file and line, if it cannot be read, or is no Jinja.
    """
    if not USER_TEMPLATE.fullmatch(name):
        return None
    try:
        text = Path(name).read_bytes().decode()  # not read_text, which turns other line ends into \n
    except FileNotFoundError:
        raise UserError(f"{name}: there is no such file; correct the path, or put a chat template there") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}; put a file there that can be read") from None
    if len(text) > LONGEST:
        raise UserError(f"{name}: has {len(text):,} characters; write at most {LONGEST:,}")
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
