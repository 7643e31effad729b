"""The base class of the config's sections, whose fields are documented by docstrings, and common field types."""

import ast
import inspect
import itertools
import textwrap
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class AlwaysCompared:
    """Marks a field to be compared even at its default (compared.py), since dvc.yaml names it."""


Fault = tuple[tuple[str, ...], str]
"""The path of a key below a section, and what is wrong with its value."""
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]


def _field_docstrings(section: "type[Section]") -> dict[str, str]:
    """Return the docstring of each field of a section, including inherited fields."""
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, Section) or base is Section:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in itertools.pairwise(definition.body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = inspect.cleandoc(text)
    return texts


class Section(BaseModel):
    """A part of the config, or of a stage's settings: immutable, without unknown keys or type conversion.

    Its validator is built when first used, since a command uses a few of the many classes. Defaults that are sections
    are therefore written as SECTION.model_construct(), which validates nothing.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True, strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each field by its docstring.

        Pydantic's `use_attribute_docstrings` does this at class definition, and so would parse this file at every
        start.
        """
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in _field_docstrings(cls).items():
            properties[name].setdefault("description", text)
        return schema
