"""json_schema: the answer is JSON that conforms to a JSON Schema."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator

from zerolora.config.section import Section
from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"is not JSON Schema: {error.message}; correct it") from None
    return schema


class JsonSchemaSettings(Section):
    """Settings of json_schema."""

    json_schema: Annotated[dict[str, Any], AfterValidator(_checked)]
    """The schema; in the config also the path of its file, as in config/tasks/answer.json."""
    equal: bool = False
    """The value must also equal the value of the row's output."""


def _judge(row: Row, answer: str, settings: JsonSchemaSettings) -> Judgement:
    from jsonschema.validators import validator_for

    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return Judgement(format=False, right=False)
    # The validator has an empty registry, so references to other documents are not fetched.
    valid = validator_for(settings.json_schema)(settings.json_schema).is_valid(value)
    return Judgement(format=True, right=valid and (not settings.equal or value == _value(row["expected"])))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


TASK = Task(
    name="json_schema",
    rule="it is JSON that `json_schema` allows",
    judge=_judge,
    settings=JsonSchemaSettings,
    example=TaskExample(
        question="Paris?",
        expected='{"city": "Paris"}',
        right='{"city": "Paris"}',
        wrong='{"city": 1}',
        settings={"json_schema": {"properties": {"city": {"type": "string"}}, "required": ["city"]}},
    ),
)
