"""The class of every section of the config, whose fields are described by their docstrings, and types of fields."""

import ast
import inspect
import itertools
import textwrap
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class AlwaysCompared:
    """Marks a field that is compared at its default too (compared.py), since dvc.yaml names it by itself."""


Positive = Annotated[int, Field(ge=1, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]


def _field_docstrings(section: "type[Section]") -> dict[str, str]:
    """Return the docstring of each field of a section, inherited fields included."""
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
    """A part of the config. Unknown keys are refused, and values are not converted between types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each field by its docstring.

        Pydantic's `use_attribute_docstrings` does the same when the class is defined, which would parse this file at
        every start.
        """
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in _field_docstrings(cls).items():
            properties[name].setdefault("description", text)
        return schema
