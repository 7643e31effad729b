"""Every form of row becomes the same Example, and the reason of every bad row has a remedy."""

import copy
import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from zerolora.config.values import fields
from zerolora.data.example import BadRow, Example
from zerolora.data.formats import FORMS, detect, parse
from zerolora.data.formats.form import Form
from zerolora.data.formats.reading import Reading
from zerolora.data.readers import chunks
from zerolora.testing import check_form

USER = {"role": "user", "content": "Add 1 and 4."}
ANSWER = {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "You add."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [4]}}}
CALL_AS_JSON = {"function": {"name": "add", "arguments": '{"a": 1, "b": [4]}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "5"}
GPT = {"from": "gpt", "value": "y"}


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


EXAMPLES: list[tuple[str, dict[str, Any], Example]] = [
    (
        "alpaca",
        {"instruction": "Add", "input": "1 and 4.", "output": "5"},
        Example(messages=[{"role": "user", "content": "Add\n1 and 4."}, ANSWER], input="1 and 4."),
    ),
    ("alpaca", {"instruction": "Add 1 and 4.", "input": "", "output": "5"}, Example(messages=[USER, ANSWER])),
    ("alpaca", {"instruction": "Add 1 and 4.", "input": " \n", "output": "5"}, Example(messages=[USER, ANSWER])),
    ("alpaca", {"instruction": "Add 1 and 4.", "input": None, "output": "5"}, Example(messages=[USER, ANSWER])),
    ("alpaca", {"instruction": "Add 1 and 4.", "output": "5"}, Example(messages=[USER, ANSWER])),
    (
        "alpaca",
        {"instruction": "Add 1 and 4.", "output": "5", "system": "You add.", "history": [["Hi", "Hello"], ["?", "!"]]},
        Example(messages=[SYSTEM, *turns("Hi", "Hello", "?", "!"), USER, ANSWER]),
    ),
    (
        "alpaca",
        {"instruction": "Add 1 and 4.", "output": "5", "system": "", "history": [], "images": [], "image": None},
        Example(messages=[USER, ANSWER]),
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "Add 1 and 4."}, {"from": "gpt", "value": "5"}]},
        Example(messages=[USER, ANSWER]),
    ),
    (
        "sharegpt",
        {
            "system": "You add.",
            "tools": json.dumps([TOOL]),
            "conversations": [
                {"from": "user", "value": "Add 1 and 4."},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": [4]}}'},
                {"from": "observation", "value": "5"},
                {"from": "assistant", "value": "5"},
                {"from": "human", "value": "Thanks"},
            ],
        },
        Example(
            messages=[SYSTEM, USER, CALLING, RESULT, ANSWER, {"role": "user", "content": "Thanks"}],
            tools=[TOOL],
        ),
    ),
    ("messages", {"messages": [SYSTEM, USER, ANSWER]}, Example(messages=[SYSTEM, USER, ANSWER])),
    ("messages", {"conversations": [USER, ANSWER]}, Example(messages=[USER, ANSWER])),
    ("messages", {"messages": [USER, ANSWER, USER], "tools": []}, Example(messages=[USER, ANSWER, USER])),
    ("messages", {"messages": [USER, ANSWER], "tools": [TOOL]}, Example(messages=[USER, ANSWER], tools=[TOOL])),
    (
        "messages",
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "You "}, {"type": "text", "text": "add."}]},
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "call1", "type": "function", **CALL_AS_JSON}],
                },
                {"role": "tool", "content": "5", "tool_call_id": "call1", "name": "add"},
                {"role": "function", "content": "", "name": "other"},
                {"role": "assistant", "content": "5", "refusal": None},
            ]
        },
        Example(
            messages=[
                SYSTEM,
                USER,
                {"role": "assistant", "content": "", "tool_calls": [{"id": "call1", **CALL}]},
                {**RESULT, "tool_call_id": "call1", "name": "add"},
                {"role": "tool", "content": "", "name": "other"},
                ANSWER,
            ]
        ),
    ),
    (
        "messages",
        {"messages": [USER, {"role": "assistant", "function_call": {"name": "add", "arguments": ""}}]},
        Example(messages=[USER, {**CALLING, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {}}}]}]),
    ),
    ("prompt", {"prompt": "Add 1 and 4.", "completion": "5"}, Example(messages=[USER, ANSWER])),
    ("prompt", {"prompt": [SYSTEM, USER], "completion": [ANSWER]}, Example(messages=[SYSTEM, USER, ANSWER], prompt=2)),
    (
        "prompt",
        {"prompt": [USER], "completion": [ANSWER], "tools": [TOOL]},
        Example(messages=[USER, ANSWER], tools=[TOOL], prompt=1),
    ),
    ("text", {"text": " Once upon a time\n"}, Example(text=" Once upon a time\n")),
    ("tokens", {"input_ids": [5, 0, 7]}, Example(tokens=[5, 0, 7], labels=[5, 0, 7])),
    (
        "tokens",
        {"input_ids": [5, 0, 7], "labels": [-100, -100, 7], "attention_mask": [1, 1, 1]},
        Example(tokens=[5, 0, 7], labels=[-100, -100, 7]),
    ),
]


@pytest.mark.parametrize(("form", "row", "example"), EXAMPLES)
def test_each_form_is_detected_and_parsed(form: str, row: dict[str, Any], example: Example) -> None:
    assert detect(row, Reading()) == form
    assert parse(row, form, Reading()) == example


@pytest.mark.parametrize(("form", "row", "example"), EXAMPLES)
def test_lists_may_be_json_text(form: str, row: dict[str, Any], example: Example) -> None:
    cells = {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
    assert detect(cells, Reading()) == form
    assert parse(cells, form, Reading()) == example


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def _called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        (
            "messages",
            [
                {"messages": [USER, ANSWER]},
                {
                    "messages": [SYSTEM, USER, _called("add", a=1, b=4), {**RESULT, "tool_call_id": "x"}, ANSWER],
                    "tools": [_tool("add", a={"type": "integer"}, b={"type": "integer"})],
                },
                {"messages": [USER, _called("say", text="x")], "tools": [_tool("say", text={"type": "string"})]},
            ],
        ),
        (
            "alpaca",
            [
                {"instruction": "a", "output": "b"},
                {"instruction": "a", "output": "b", "input": "c", "system": "d", "history": [["e", "f"]]},
            ],
        ),
        (
            "sharegpt",
            [
                {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y", "weight": 1}]},
                {"conversations": [GPT], "system": "s", "tools": [_tool("f", a={"type": "x"})]},
            ],
        ),
        (
            "prompt",
            [{"prompt": [USER], "completion": [ANSWER]}, {"prompt": [USER], "completion": [{**ANSWER, "name": "x"}]}],
        ),
        ("tokens", [{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}]),
    ],
)
def test_rows_are_equal_from_json_and_parquet(tmp_path: Path, form: str, rows: list[dict[str, Any]]) -> None:
    """Parquet fills fields missing in a row with null."""
    parquet.write_table(pyarrow.Table.from_pylist(rows, _schema(rows)), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    actual = [
        [
            (detect(value, reading), parse(value, form, reading))
            for chunk in chunks(tmp_path / name)
            for reading in [Reading(filled=chunk.kind == "parquet")]
            for _, value in chunk.records()
        ]
        for name in ("rows.jsonl", "rows.parquet")
    ]
    assert [name for name, _ in actual[0]] == [form] * len(rows)
    assert actual[0] == actual[1]


def _schema(rows: list[dict[str, Any]]) -> Any:
    """Return a schema with the fields of all rows; Arrow infers it from the first row only."""
    return pyarrow.unify_schemas(
        [pyarrow.Table.from_pylist([row]).schema for row in rows], promote_options="permissive"
    )


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *[(name, "user") for name in ("human", "user")],
        *[(name, "assistant") for name in ("gpt", "chatgpt", "bing", "bard", "assistant", "model")],
        ("system", "system"),
        *[(name, "tool") for name in ("tool", "observation", "function_response", "ipython")],
    ],
)
def test_sharegpt_speaker_names(name: str, role: str) -> None:
    row = {"conversations": [{"from": name, "value": "x"}, GPT]}
    messages = parse(row, "sharegpt", Reading()).messages
    assert messages is not None
    assert messages[0] == {"role": role, "content": "x"}


# Detection and columns

PAIR = turns("q", "a")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "a", "answer": "b"},
            "its fields (question, answer) fit none of the formats alpaca, messages, prompt, sharegpt, text, tokens; "
            "say which columns hold what, as in columns: {prompt: question, completion: answer}",
        ),
        (
            {"q": "a", "a": "b"},
            "its fields (q, a) fit none of the formats alpaca, messages, prompt, sharegpt, text, tok",
        ),
        ({}, "its fields (none) fit none"),
        ({"instruction": "a", "output": None}, "its fields (instruction, output (null)) fit none"),
        (
            {"instruction": "a", "input": "", "output": "b", "text": "c"},
            "its fields (instruction, input, output, text) fit alpaca and text; choose one, as in format: alpaca",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "its fields (prompt, chosen, rejected) are of the form preference, which has pairs of answers, for "
            "train.objective: dpo, ipo, simpo or orpo, but the runs of this data set read texts to learn, for "
            "train.objective: sft or distill; set train.objective: dpo, or format: prompt, columns: "
            "{completion: chosen} and ignore: [rejected] to learn the chosen answers",
        ),
        ({"a\n\ud800": 1}, r"its fields ('a\n\ud800') fit none"),
        ({f"column{number}": 1 for number in range(30)}, "its fields (column0, column1, "),
    ],
)
def test_row_that_fits_none_or_several_forms_is_bad(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow) as caught:
        detect(row, Reading())
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("row", "columns", "form"),
    [
        ({"question": "q", "answer": "a"}, {"instruction": "question", "output": "answer"}, "alpaca"),
        ({"question": "q", "text": "a"}, {"instruction": "question", "output": "text"}, "alpaca"),
        ({"data": {"q": "q", "a": {"text": "a"}}}, {"instruction": "data.q", "output": "data.a.text"}, "alpaca"),
        ({"data.q": "q", "a": "a"}, {"instruction": "data.q", "output": "a"}, "alpaca"),
        ({"output": "q", "instruction": "a"}, {"instruction": "output", "output": "instruction"}, "alpaca"),
        ({"input": "q", "output": "a"}, {"instruction": "input"}, "alpaca"),
        ({"q": "q", "a": "a"}, {"prompt": "q", "completion": "a"}, "prompt"),
        ({"chat": PAIR}, {"messages": "chat"}, "messages"),
        ({"chat": PAIR}, {"conversations": "chat"}, "messages"),
        (
            {"chat": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            {"conversations": "chat"},
            "sharegpt",
        ),
    ],
)
def test_columns_are_renamed(row: dict[str, Any], columns: dict[str, str], form: str) -> None:
    assert detect(row, Reading(columns)) == form
    assert set(columns) <= set(FORMS[form].fields)
    assert parse(row, form, Reading(columns)).messages == PAIR


def test_column_inside_a_text_is_missing() -> None:
    with pytest.raises(BadRow, match=r"a.b is missing \(the row has a\); fill it in, or set columns: \{text: ...\}"):
        parse({"a": "x"}, "text", Reading({"text": "a.b"}))


def test_every_field_can_be_renamed() -> None:
    for form, row, example in EXAMPLES:
        columns = {field: f"my {field}" for field in FORMS[form].fields}
        renamed = {columns.get(name, name): value for name, value in row.items()}
        assert parse(renamed, form, Reading(columns)) == example


# Bad rows


def _chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, *messages]}


def _share(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "x"}, *turns], **more}


def _calls(*calls: Any) -> dict[str, Any]:
    return _chat({"role": "assistant", "tool_calls": list(calls)})


def _called_as(value: str) -> dict[str, Any]:
    return _share({"from": "function_call", "value": value})


def _content(*parts: Any) -> dict[str, Any]:
    return _chat({"role": "user", "content": list(parts)})


def _arguments(value: Any) -> dict[str, Any]:
    return _calls({"function": {"name": "f", "arguments": value}})


CONTENT, FUNCTION = "messages[1].content", "messages[1].tool_calls[0].function"
BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "alpaca": [
        ({"instruction": "a"}, "output is missing (the row has instruction); fill it in, or set columns: {output:"),
        ({"instruction": "a", "output": None}, "output is missing (the row has instruction, output (null));"),
        ({"instruction": " ", "output": "b"}, "instruction is empty; fill it in or remove the row"),
        ({"instruction": "a", "output": "\n"}, "output is empty; fill it in or remove the row"),
        ({"instruction": 5, "output": "b"}, "instruction is 5; use a text"),
        ({"instruction": "a", "output": "b", "input": {"c": 1}}, "input is {'c': 1}; use a text"),
        ({"instruction": "a", "output": "b", "history": "x"}, "history is 'x'; use a list"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "history[0] is ['q']; use [question, answer]"),
        ({"instruction": "a", "output": "b", "history": [["q", ""]]}, "history[0][1] is empty; fill it in"),
        ({"instruction": "a\ud83d", "output": "b"}, r"instruction contains half a character ('\ud83d', at 2), which"),
    ],
    "sharegpt": [
        ({"a": 1}, "conversations is missing (the row has a);"),
        ({"conversations": "x"}, "conversations is 'x'; use a list"),
        ({"conversations": "[x"}, "conversations is '[x', which is not JSON (Expecting value: line 1 column 2"),
        ({"conversations": []}, "conversations has no message of the assistant, so nothing to learn;"),
        (_share({"from": "gpt", "value": " "}), "conversations[1].value is empty; fill it in or remove the row"),
        (_share({"from": "gpt"}), "conversations[1].value is missing; add a text"),
        (_share({"from": "Alice", "value": "x"}), "conversations[1].from is 'Alice'; use one of human, user,"),
        (_share({"role": "assistant", "content": "x"}), "conversations[1].from is missing (it has 'role', 'content');"),
        (_called_as("add(1)"), "conversations[1].value is 'add(1)', which is not"),
        (_called_as("[]"), 'conversations[1].value is []; write {"name": ...'),
        (_called_as('{"name": 1}'), "conversations[1].value is {'name': 1}; write"),
        (_called_as('{"name": "f", "arguments": [1]}'), "conversations[1].value.arguments is [1]; use an object"),
        (
            _called_as('{"name": "f", "parameters": {"a": 1}}'),
            "conversations[1].value.parameters is {'a': 1}, and a call",
        ),
        (_share(GPT, tools="add"), "tools is 'add'; use a list"),
        (_share(GPT, tools=[{"name": "\udc00"}]), "tools[0].name contains half a character"),
        (
            {"conversations": [{"from": "system", "value": "a"}, GPT], "system": "b"},
            "system and conversations[0] are both system prompts; keep one",
        ),
    ],
    "messages": [
        ({"text": "x"}, "messages is missing (the row has text);"),
        ({"messages": {"role": "user"}}, "messages is {'role': 'user'}; use a list"),
        (_chat(), "messages has no message of the assistant, so nothing to learn; add one or remove the row"),
        (_chat({"role": "bot", "content": "x"}), "messages[1].role is 'bot'; use one of system, developer,"),
        (_chat({"content": "x"}), "messages[1].role is missing (it has 'content'); use one of"),
        (_chat({"role": "assistant", "content": ""}), "messages[1].content is empty; fill it in"),
        (_chat({"role": "assistant", "content": None}), "messages[1].content is missing; add a text"),
        (_chat({"role": "assistant", "content": "", "tool_calls": []}), "messages[1].content is empty;"),
        *(
            (
                _content({"type": "text", "text": "What?"}, {"type": kind, "data": "x"}),
                f"{CONTENT}[1] holds {what}, which",
            )
            for kind, what in (("image", "images"), ("input_image", "images"), ("video", "videos"), ("audio", "audio"))
        ),
        (
            _content({"type": "image_url", "image_url": {"url": "x"}}),
            f"{CONTENT}[0] holds images, which are not supported: only text can be trained on",
        ),
        (
            _content({"type": "file", "f": "x"}),
            f"{CONTENT}[0] is {{'type': 'file', 'f': 'x'}}; only text can be trained",
        ),
        (_content("x"), f"{CONTENT}[0] is 'x'; only text can be trained on"),
        (_content({"type": "text"}), f"{CONTENT}[0].text is missing;"),
        (_chat(USER | {"tool_calls": [CALL]}), "messages[1].tool_calls is in a message of 'user'; only the assistant"),
        (_calls({"function": {"arguments": {}}}), f"{FUNCTION} is {{'arguments': {{}}}}; write"),
        (_arguments("{"), f"{FUNCTION}.arguments is '{{', which is not JSON"),
        (_arguments(0), f"{FUNCTION}.arguments is 0; use an object"),
        (_arguments({"a": ["\ud800"]}), f"{FUNCTION}.arguments.a[0] contains half a character"),
        (
            _arguments('{"a": {"b": 1, "b": 2}}'),
            f"{FUNCTION}.arguments has the key 'b' twice in one object, of which one",
        ),
        *(
            (
                _calls({"function": {"name": "f", key: {"a": 1}}}),
                f"{FUNCTION}.{key} is {{'a': 1}}, and a call has only a name and arguments; write "
                f'{{"name": ..., "arguments": {{...}}}}, or ignore: [{key}] to leave it out',
            )
            for key in ("parameters", "args", "input", "kwargs", "Arguments")
        ),
        (_calls({**CALL, "result": "5"}), "messages[1].tool_calls[0].result is '5', and a call has only a name"),
        (
            _chat({**CALLING, "function_call": {"name": "add", "arguments": "{}"}}),
            "messages[1].function_call and messages[1].tool_calls are not the same calls; keep one",
        ),
        *(
            (_arguments({"a": [value]}), f"{FUNCTION}.arguments.a[0] is {value!r}, which")
            for value in (datetime.time(10, 30), b"x", decimal.Decimal("1.5"), ("a", 1))
        ),
        (
            {**_chat(ANSWER), "tools": [{"name": "f", "since": datetime.date(2024, 5, 1)}]},
            "tools[0].since is datetime.date(2024, 5, 1), which JSON has no form for; write it as text",
        ),
        (_calls({"id": 5, **CALL}), "messages[1].tool_calls[0].id is 5; use a text"),
        (_chat({"role": "assistant", "function_call": "f"}), "messages[1].function_call is 'f'; write"),
        (
            _chat({"role": "user", "content": "a \udfff"}),
            r"messages[1].content contains half a character ('\udfff', at",
        ),
        ({**_chat(ANSWER), "tools": "[{]"}, "tools is '[{]', which is not JSON"),
    ],
    "text": [
        ({"text": ""}, "text is empty; fill it in or remove the row"),
        ({"text": 1.5}, "text is 1.5; use a text"),
        ({"text": "x" * 9 + "\ud800"}, r"text contains half a character ('\ud800', at 10)"),
    ],
    "prompt": [
        ({"prompt": "a"}, "completion is missing (the row has prompt);"),
        ({"prompt": "a", "completion": " "}, "completion is empty; fill it in"),
        ({"prompt": "a", "completion": [ANSWER]}, "prompt is 'a' and completion is [{'role': 'assistant', "),
        ({"prompt": 1, "completion": 2}, "prompt is 1 and completion is 2; use two texts, or two lists of messages"),
        ({"prompt": [USER], "completion": [USER]}, "completion has no message of the assistant"),
        ({"prompt": [{"role": "x"}], "completion": [ANSWER]}, "prompt[0].role is 'x'; use one of"),
        (
            {"prompt": str([USER]), "completion": str([ANSWER])},
            "prompt is \"[{'role': 'user', 'content': 'Add 1 and 4.'}]\", a list as Python writes it; write it as JSON",
        ),
        ({"prompt": json.dumps([USER])[:-1], "completion": json.dumps([ANSWER])}, 'prompt is \'[{"role": '),
    ],
    "tokens": [
        ({"labels": [1]}, "input_ids is missing (the row has labels);"),
        ({"input_ids": [1]}, "input_ids has 1 token; a row needs 2"),
        ({"input_ids": "1 2"}, "input_ids is '1 2'; use a list"),
        ({"input_ids": [1, -2, -1]}, "input_ids[1] is -2; token numbers begin at 0"),
        ({"input_ids": [1, 2.0]}, "input_ids[1] is 2.0; use a token number"),
        ({"input_ids": [1, "2"]}, "input_ids[1] is '2'; use a token number"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries for 2 tokens; use one for each"),
        ({"input_ids": [1, 2], "labels": [1, 3]}, "labels[1] is 3 where the token is 2; use 2, or -100"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "labels are -100 after the first token, so the loss sees"),
    ],
}


@pytest.mark.parametrize(("form", "row", "message"), [(form, *case) for form, cases in BAD.items() for case in cases])
def test_bad_row_has_a_reason(form: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow) as caught:
        parse(row, form, Reading())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "[1, 2]", "completion": "[2]"},
        {"prompt": '[{"name": "a"}]', "completion": '[{"name": "b"}]'},
        {"prompt": '[{"name": "the role"}, {"role": "x"}]', "completion": "a"},
        {"prompt": "[{role", "completion": "a"},
        {"prompt": "Write a chat.", "completion": json.dumps([USER, ANSWER])},
    ],
)
def test_prompt_that_resembles_json_stays_a_text(row: dict[str, Any]) -> None:
    messages = parse(row, "prompt", Reading()).messages or []
    assert [message["content"] for message in messages] == [row["prompt"], row["completion"]]


def test_message_keys_are_renamed_inside_json() -> None:
    row = {name: json.dumps([{"who": role, "content": "x"}]) for name, role in PARTS.items()}
    example = parse(row, "prompt", Reading({"role": "who"}))
    assert example.prompt == 1 and [message["role"] for message in example.messages or []] == [*PARTS.values()]


PARTS = {"prompt": "user", "completion": "assistant"}


def test_reasons_name_the_columns_of_the_file() -> None:
    with pytest.raises(BadRow, match="^answer is empty"):
        parse({"q": "a", "answer": ""}, "alpaca", Reading({"instruction": "q", "output": "answer"}))
    with pytest.raises(BadRow, match=r"^chat.turns\[0\].value is empty"):
        parse({"chat": {"turns": [{"from": "gpt", "value": ""}]}}, "sharegpt", Reading({"conversations": "chat.turns"}))


def test_long_value_is_truncated_in_the_reason() -> None:
    with pytest.raises(BadRow) as caught:
        parse({"text": ["x" * 10_000]}, "text", Reading())
    assert len(str(caught.value)) < 120


def test_deep_nesting_is_a_bad_row() -> None:
    deep: Any = {}
    for _ in range(2000):
        deep = {"a": deep}
    for row in (
        {"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}]},
        {"messages": [USER, ANSWER], "tools": [deep]},
    ):
        with pytest.raises(BadRow, match="is nested too deep"):
            parse(row, "messages", Reading())
    assert detect({"conversations": [deep]}, Reading()) == "sharegpt"


def test_numpy_numbers_become_ints() -> None:
    tokens = parse({"input_ids": [np.int64(5), np.uint16(6)], "labels": [np.int64(-100), 6]}, "tokens", Reading())
    assert tokens == Example(tokens=[5, 6], labels=[-100, 6])
    assert {type(token) for token in [*(tokens.tokens or []), *(tokens.labels or [])]} == {int}


def test_extra_keys_of_a_tool_call() -> None:
    called = {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}
    for message in (
        {"function_call": called, "tool_calls": [{"id": "x", "index": 0, **CALL}]},
        {"function_call": "", "tool_calls": [{"id": "x", **CALL, "result": None}]},
        {"function_call": {}, "tool_calls": [{"id": "x", "function": {**CALL["function"], "parsed_arguments": {}}}]},
    ):
        row = _chat({"role": "assistant", **message})
        assert (parse(row, "messages", Reading()).messages or [])[1]["tool_calls"] == [{"id": "x", **CALL}]
    row = _calls({"function": {**CALL["function"], "parameters": {"a": 1}}, "result": "5"})
    reading = Reading(ignored=frozenset({"parameters", "result"}))
    assert (parse(row, "messages", reading).messages or [])[1]["tool_calls"] == [CALL]
    turn = {"from": "function_call", "value": json.dumps({**CALL["function"], "parameters": {"a": 1}})}
    assert (parse(_share(turn), "sharegpt", reading).messages or [])[1]["tool_calls"] == [CALL]


def test_nulls_in_json_arguments_are_preserved() -> None:
    """Only nulls that Arrow may have filled in are dropped."""
    call = {"function": {"name": "f", "arguments": '{"a": null}'}, "type": None}
    messages = parse(_calls(call), "messages", Reading()).messages
    assert messages is not None
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


KEYS = sorted({*fields()} | {"from", "value", "role", "content", "a"})
WORDS = st.sampled_from(["user", "assistant", "gpt", "function_call", "text", "[1]", "{}", "\ud800", "", " ", "x\n"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-101, 3) | st.floats() | WORDS | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*KEYS, "tool_calls", "function", "name", "arguments", "type"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@st.composite
def _spoilt(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return a valid row with a random value in a random position."""
    form, row, _ = draw(st.sampled_from(EXAMPLES))
    row = copy.deepcopy(row)
    inside: Any = row
    while True:
        keys = sorted(inside) if isinstance(inside, dict) else range(len(inside))
        key = draw(st.sampled_from(keys))
        if not (isinstance(inside[key], dict | list) and inside[key] and draw(st.booleans())):
            inside[key] = draw(VALUES)
            return form, row
        inside = inside[key]


@given(
    _spoilt()
    | st.tuples(st.sampled_from(sorted(FORMS)), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), VALUES))
)
def test_any_row_is_parsed_or_bad(case: tuple[str, dict[str, Any]]) -> None:
    form, row = case
    for action in (lambda: detect(row, Reading()), lambda: parse(row, form, Reading())):
        try:
            actual = action()
        except BadRow as error:
            assert "\n" not in str(error)
            str(error).encode()
            continue
        if isinstance(actual, str):
            assert actual in FORMS
            continue
        assert [actual.messages, actual.text, actual.tokens].count(None) == 2
        json.dumps([actual.messages, actual.text, actual.tokens], ensure_ascii=False, default=str).encode()
        if actual.messages is not None:
            answers = [message for message in actual.messages if message["role"] == "assistant"]
            assert answers
            assert all(message["content"].strip() or message["tool_calls"] for message in answers)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_every_form_has_a_detectable_documented_example(form: Form) -> None:
    assert detect(form.example, Reading(), form.rows) == form.name
    check_form(form)
    row = f"| `{form.name}` | "
    section = (ROOT / "docs/data.md").read_text().split("\n## Forms of rows\n")[1].split("\n## ")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(row)]
    _, _, fields, shown, _ = (part.strip() for part in line.split("|"))
    assert {field for part in fields.split(";") for field in part.strip().split(", ")} == set(form.fields)
    assert json.loads(shown.strip("`")) == form.example
