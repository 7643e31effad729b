"""A row keeps its meaning: its own loss settings apply, and what nothing reads is decided by the user."""

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from goldens import marked, prepare_settings
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers_of import Family, tokenizer_like, tokenizer_of

from zerolora.data.example import BadRow, Example
from zerolora.data.formats import detect, parse
from zerolora.data.formats.leaves import Unread, undecided_lines
from zerolora.data.formats.reading import Reading, Seen
from zerolora.data.readers import chunks
from zerolora.data.template import Template

U, A = "<|im_start|>user\n", "<|im_start|>assistant\n"
HI = {"role": "user", "content": "Hi"}
AGAIN = {"role": "user", "content": "Again"}


def reply(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def supervised(row: dict[str, Any], template: str = "smollm2", reading: Reading | None = None, **settings: Any) -> str:
    """Return the text of a row, with supervised parts in « »."""
    reading = reading or Reading()
    example = parse(row, detect(row, reading), reading)
    return marked(Template(tokenizer_of(template), prepare_settings(**settings)).pieces(example))


def refused(row: dict[str, Any], **how: Any) -> str:
    with pytest.raises(BadRow) as caught:
        supervised(row, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def undecided(*rows: dict[str, Any], reading: Reading | None = None, form: str = "") -> list[str]:
    """Return the errors of what nothing reads in the rows of a file."""
    reading, unread = reading or Reading(), Unread()
    for number, row in enumerate(rows, 1):
        parse(row, form or detect(row, reading), reading, unread=unread, place=f"rows.jsonl:{number}")
    lines = undecided_lines(unread.end(), reading, 5, pairs=form == "preference")
    assert all(line.isprintable() for line in lines)
    return lines


def ignoring(*names: str, **columns: str) -> Reading:
    return Reading(columns, ignored=frozenset(names))


def turns(row: dict[str, Any], **how: Any) -> list[str]:
    """Return the supervised turns of a row without stop tokens."""
    return [part.partition("»")[0].removesuffix("<|im_end|>") for part in supervised(row, **how).split("«")[1:]]


# Weights of turns

FORMS: dict[str, Any] = {
    "messages": lambda first, second: {"messages": [HI, reply("Bad.", **first), AGAIN, reply("Good.", **second)]},
    "conversations": lambda first, second: {
        "conversations": [HI, reply("Bad.", **first), AGAIN, reply("Good.", **second)]
    },
    "sharegpt": lambda first, second: {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Bad.", **first},
            {"from": "human", "value": "Again"},
            {"from": "gpt", "value": "Good.", **second},
        ]
    },
    "prompt": lambda first, second: {
        "prompt": [HI],
        "completion": [reply("Bad.", **first), AGAIN, reply("Good.", **second)],
    },
}
OFF: list[dict[str, Any]] = [
    *({key: value} for key in ("weight", "loss_weight", "loss_scale") for value in (0, 0.0, False)),
    *({key: False} for key in ("loss", "train", "training")),
    {"loss_mask": 0},
    {"step_loss_mask": 0},
    {"weight": "0"},
    {"weight": 1, "loss": False},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("off", OFF, ids=str)
def test_turns_of_weight_0_are_not_supervised(form: str, off: dict[str, Any]) -> None:
    assert turns(FORMS[form](off, {})) == ["Good."]
    assert turns(FORMS[form]({}, off)) == ["Bad."]
    assert turns(FORMS[form]({}, {})) == turns(FORMS[form]({"weight": 1}, {"train": True})) == ["Bad.", "Good."]


@pytest.mark.parametrize("form", FORMS)
def test_other_weights_are_refused_with_a_remedy(form: str) -> None:
    row = FORMS[form]({"weight": 0.5}, {})
    assert "weight is 0.5; use 1 = supervised or 0 = not supervised" in refused(row)
    assert "ignore: [weight]" in refused(row)
    assert turns(row, reading=Reading(ignored=frozenset({"weight"}))) == ["Bad.", "Good."]
    assert ".loss is 'no'; use 1" in refused(FORMS[form]({"loss": "no"}, {}))
    assert "weight and " in refused(FORMS[form]({"weight": 0, "train": True}, {}))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("assistant", ["Good."]),
        ("last", ["Good."]),
        (["user", "assistant"], ["Hi", "Again", "Good."]),
        ("everything", []),
    ],
)
def test_weight_0_applies_with_every_loss(loss: Any, expected: list[str]) -> None:
    parts = turns(FORMS["messages"]({"weight": 0}, {}), loss=loss)
    assert not any("Bad." in part for part in parts)
    if loss != "everything":
        assert parts == expected
    else:
        assert "Hi" in parts[0] and "Again" in parts[1] and "Good." in parts[1]


def test_turns_marked_for_training_are_supervised_in_any_role() -> None:
    row = {"messages": [{**HI, "train": True}, reply("Hello"), {**AGAIN, "weight": 1}, reply("Bye")]}
    assert turns(row) == ["Hi", "Hello", "Bye"]
    assert turns(row, loss="last") == ["Bye"]


def test_row_without_supervised_answers_is_bad() -> None:
    text = refused({"messages": [HI, reply("Bad.", weight=0)]})
    assert text.startswith("no part of it is supervised with loss 'assistant'; the row's own weights leave none;")
    assert "weight 0" not in supervised({"messages": [HI, reply("Good.")]})
    assert "no part of it is supervised" in refused(FORMS["messages"]({}, {"weight": 0}), loss="last")


@pytest.mark.parametrize("loss", ["assistant", "everything", ["assistant", "user"]])
def test_evaluation_uses_the_last_supervised_answer(loss: Any) -> None:
    """Weight 0 marks answers that are not right."""
    template = Template(tokenizer_of("smollm2"), prepare_settings(loss=loss))
    example = parse(FORMS["messages"]({}, {"weight": 0}), "messages", Reading())
    assert template.answer_index(example) == 1
    pieces = template.pieces(example)
    assert [piece.text for piece in pieces if piece.role == "assistant"] == ["Bad.<|im_end|>"]
    template = Template(tokenizer_of("smollm2"), prepare_settings(loss=loss, system="Be kind."))
    assert template.answer_index(example) == 1


def test_null_keys_change_nothing() -> None:
    """`datasets` and pandas add the keys of other messages as null."""
    answer: dict[str, Any] = {"role": "assistant", "content": "x", "tool_calls": None, "name": None, "weight": None}
    assert turns({"messages": [HI, answer], "tools": None}) == ["x"]
    mapped = [{"from": "user", "content": "Hi"}, {**answer, "role": None, "from": "assistant"}]
    assert turns({"messages": mapped}, reading=Reading({"role": "from"})) == ["x"]
    assert "role is missing" in refused({"messages": [HI, {"role": None, "from": "gpt", "content": "x"}]})
    assert "content is missing" in refused({"messages": [HI, {"role": "assistant", "content": None, "value": "x"}]})
    assert "has no message of the assistant" in refused({"messages": []})
    assert "has no message of the assistant" in refused({"messages": [], "system": "Be kind."})


# Prompt and completion


TALK = {
    "prompt": [HI, reply("Old"), {"role": "user", "content": "x"}],
    "completion": [reply("New1"), {"role": "user", "content": "y"}, reply("New2")],
}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("assistant", ["New1", "New2"]),
        ("last", ["New2"]),
        (["assistant"], ["Old", "New1", "New2"]),
        (["user"], ["Hi", "x", "y"]),
    ],
)
@pytest.mark.parametrize("system", ["", "Be kind."])
def test_prompts_are_supervised_only_by_listed_roles(loss: Any, expected: list[str], system: str) -> None:
    assert turns(TALK, loss=loss, system=system) == expected
    assert turns({**TALK, "system": "Be brief."}, loss=loss) == expected


def test_completion_needs_an_answer() -> None:
    assert "completion has no message of the assistant" in refused({**TALK, "completion": [HI]})


# Thoughts


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize(
    "row",
    [
        lambda key: {"messages": [HI, reply("4", **{key: "Two and two."})]},
        lambda key: {
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "4", key: "Two and two."}]
        },
        lambda key: {"prompt": [HI], "completion": [reply("4", **{key: "Two and two."})]},
        lambda key: {"prompt": "Hi", "completion": "4", key: "Two and two."},
        lambda key: {"instruction": "Hi", "output": "4", key: "Two and two."},
    ],
    ids=["messages", "sharegpt", "lists", "texts", "alpaca"],
)
def test_thoughts_reach_the_template_or_are_refused(key: str, row: Any) -> None:
    expected = f"{U}Hi<|im_end|>\n{A}«<think>\nTwo and two.\n</think>\n\n4<|im_end|>»"
    assert supervised(row(key), template="qwen3") == expected
    for template in ("smollm2", "gemma-4", "command-r7b"):
        text = refused(row(key), template=template)
        assert f"leaves out {key} of the assistant message" in text and f"ignore: [{key}]" in text
    assert turns(row(key), reading=Reading(ignored=frozenset({key}))) == ["4"]


@pytest.mark.parametrize("template", ["gemma-4", "command-r7b"])
def test_thoughts_after_an_empty_thought_are_refused(template: str) -> None:
    """The prompts of these templates end with a closed, empty thought."""
    row = {"messages": [HI, reply("1"), AGAIN, reply("2", reasoning_content="Two.")]}
    assert "leaves out reasoning_content of the assistant message 4" in refused(row, template=template, loss="last")
    del row["messages"][-1]["reasoning_content"]
    assert turns(row, template=template, loss="last")[0].startswith("2")


def test_dropped_thoughts_of_earlier_turns_are_refused() -> None:
    row = {"messages": [HI, reply("1", reasoning_content="One."), AGAIN, reply("2", reasoning_content="Two.")]}
    assert "leaves out reasoning_content of the assistant message 2" in refused(row, template="qwen3")
    assert turns(row, template="qwen3", loss="last") == ["<think>\nTwo.\n</think>\n\n2"]
    row["messages"][1]["weight"] = 0
    assert turns(row, template="qwen3") == ["<think>\nTwo.\n</think>\n\n2"]


def test_thoughts_get_the_templates_key() -> None:
    text = supervised({"messages": [HI, reply("4", reasoning="Two and two.")]}, template="gpt-oss")
    assert "Two and two." in text.partition("«")[2]


# System prompts, tools and context


SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.parametrize("key", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, reply("Hello")]},
        {"conversations": [HI, reply("Hello")]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": [HI], "completion": [reply("Hello")]},
        {"prompt": "Hi", "completion": "Hello"},
        {"instruction": "Hi", "output": "Hello"},
    ],
    ids=["messages", "conversations", "sharegpt", "lists", "texts", "alpaca"],
)
def test_every_form_reads_a_system_prompt(key: str, row: dict[str, Any]) -> None:
    assert supervised({**row, key: "Be brief."}) == f"{SYSTEM}{U}Hi<|im_end|>\n{A}«Hello<|im_end|>»"
    both = {**row, "system": "Be brief.", "system_prompt": "Be long."}
    assert "system and system_prompt are two texts for the same; keep one" in refused(both)


def test_two_system_prompts_are_refused() -> None:
    row: dict[str, Any] = {
        "messages": [{"role": "system", "content": "Be long."}, HI, reply("Hello")],
        "system": "Be brief.",
    }
    assert refused(row).startswith("system and messages[0] are both system prompts; keep one")
    row["messages"][0]["content"] = "Be brief."
    assert supervised(row).startswith(SYSTEM)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLING = reply("", function_call={"name": "add", "arguments": "{}"})


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, CALLING], "functions": [TOOL["function"]]},
        {"messages": [HI, CALLING], "functions": json.dumps([TOOL["function"]])},
        {"messages": [HI, CALLING], "tools": [TOOL], "functions": [TOOL["function"]]},
        {"messages": [{"role": "system", "content": "Be brief.", "tools": [TOOL]}, HI, CALLING]},
        {"messages": [{"role": "system", "content": "", "functions": [TOOL["function"]]}, HI, CALLING]},
        {"prompt": [HI], "completion": [CALLING], "functions": [TOOL["function"]]},
        {"instruction": "Hi", "output": "Hello", "tools": [TOOL]},
        {"prompt": "Hi", "completion": "Hello", "tools": [TOOL]},
        {
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}],
            "functions": [TOOL["function"]],
        },
    ],
    ids=str,
)
def test_every_form_reads_its_tools(row: dict[str, Any]) -> None:
    assert parse(row, detect(row, Reading()), Reading()).tools == [TOOL]
    assert '"name": "add"' in supervised(row, template="qwen3").partition("«")[0]


def test_unread_or_contradictory_tools_are_refused() -> None:
    (line,) = undecided({"messages": [{**HI, "tools": [TOOL]}, reply("x")]})
    assert line.startswith("rows.jsonl:1: messages[].tools is [{'type': 'function',") and "nothing reads it" in line
    with pytest.raises(BadRow, match="tools and functions are two lists of tools; keep one"):
        parse({"messages": [HI, reply("x")], "tools": [TOOL], "functions": [{"name": "f"}]}, "messages", Reading())


def test_context_is_the_input_of_an_instruction_only() -> None:
    assert turns({"instruction": "Add.", "context": "1 + 4", "output": "5"}) == ["5"]
    assert f"{U}Add.\n1 + 4<|im_end|>" in supervised({"instruction": "Add.", "context": "1 + 4", "output": "5"})
    rows = (
        {"prompt": "Add.", "completion": "5"},
        {"messages": [HI, reply("x")]},
        {"text": "x"},
        FORMS["sharegpt"]({}, {}),
    )
    for row in rows:
        for key, held in {"context": "1 + 4", "history": [["a", "b"]], "input": "1 + 4"}.items():
            (line,) = undecided({**row, key: held}, row)
            assert line.startswith(f"rows.jsonl:1: {key} is {held!r}") and f"ignore: [{key}]" in line


def test_context_under_another_name_is_read_if_mapped() -> None:
    row, history = {"q": "Add.", "a": "5"}, [["Hi", "Hello"]]
    how = {"instruction": "q", "output": "a"}
    assert turns({**row, "history": history}, reading=Reading(how)) == ["Hello", "5"]
    (line,) = undecided({**row, "chat_history": history, "passage": ""}, reading=Reading(how))
    assert "; map it in columns, as in {FIELD: chat_history}" in line
    assert turns({**row, "talk": history}, reading=Reading({**how, "history": "talk"})) == ["Hello", "5"]
    passages = [{**row, "passage": text} for text in ("A text.", "Another.")]
    (line,) = undecided(*passages, reading=Reading(how))
    assert line.startswith("rows.jsonl:2: passage is 'Another.', 'A text.' in rows.jsonl:1, and nothing reads it; map")
    assert "A text." in supervised(passages[0], reading=Reading({**how, "input": "passage"}))
    assert undecided(*passages, reading=Reading({**how, "input": "passage"})) == []
    (line,) = undecided({**passages[0], "input": "1 + 4"}, passages[1], reading=Reading({**how, "input": "passage"}))
    assert line.startswith("rows.jsonl:1: input is '1 + 4', missing in rows.jsonl:2")


# What nothing reads


SIMPLE: dict[str, dict[str, Any]] = {
    "messages": {"messages": [HI, reply("x")]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}]},
    "prompt": {"prompt": "a", "completion": "x"},
    "alpaca": {"instruction": "a", "output": "x"},
    "text": {"text": "a"},
    "tokens": {"input_ids": [1, 2]},
}
ABSENT: Any = object()
LINES = "<b>\n\ud800"
COLUMNS: dict[str, tuple[Any, Any]] = {
    # Verdicts and answers
    "label": (False, True), "kto_tag": (True, ABSENT), "labels ": ([0, 1], [0, 1]), "margin": (0.5, 1),
    "chosen": ("x", "y"), "rejected": ([reply("x")], [reply("x")]), "is_correct": (True, False),
    "quality": ("bad", None), "overall_preference": (-2, 1), "better_response_id": (0, 1),
    "summary": ("Short.", "Shorter."),
    # The question, thoughts and arguments of the template
    "documents": (["a"], ABSENT), "chat_history": ([["a", "b"]], []), "instructions": ("Be brief.", "Be long."),
    "available_tools": ([{"name": "f"}], ABSENT), "Complex_CoT": ("Two and two.", "Three."),
    "reasoning_effort": ("high", "low"), "enable_thinking": (True, False), "images": (["a.jpg"], ["a.jpg"]),
    # The loss
    "loss_mask": ([0, 1], [0, 1]), "mask": ("User", "All"), "sampleWeight": (0, 1), "do_not_train": ("yes", ABSENT),
    "seq_lengths": ([1, 1], [2]),
    # A name that says nothing
    "x7": (1, 2), LINES: ("a", "b"), "id": ("a", ABSENT),
}  # fmt: skip
"""Names of columns and the values of two rows."""


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("form", SIMPLE)
def test_columns_that_vary_are_undecided(form: str, column: str) -> None:
    """Whatever their names and the form."""
    values, row = COLUMNS[column], SIMPLE[form]
    first, second = ({**row, column: held} if held is not ABSENT else row for held in values)
    (line,) = undecided(first, second, form=form)
    name = {"labels ": '"labels "', LINES: '"<b>\\n\\U0000d800"'}.get(column, column)
    for text in ("rows.jsonl:", "and nothing reads it; map it in columns, as in {FIELD: ", f"ignore: [{name}]"):
        assert text in line
    if not isinstance(values[0], list):
        missing = values[1] in (ABSENT, None)
        assert ("missing in rows.jsonl:2" if missing else f"{values[0]!r} in rows.jsonl:1") in line
        assert f"{repr(column) if column == LINES else column} is {values[0 if missing else 1]!r}" in line
        assert "keep some rows by where: " in line
    assert undecided(first, second, form=form, reading=ignoring(column)) == []
    assert undecided({**row, column: None}, {**row, column: ""}, {**row, column: []}, form=form) == []
    assert parse(first, form, ignoring(column)) == parse(row, form, Reading())


KEYS: dict[str, tuple[Any, dict[str, str]]] = {
    "train_on_turn": (False, {"train": "train_on_turn"}),
    "calculate-loss": (False, {"train": "calculate-loss"}),
    "ignore_loss": (True, {}),
    "thought": ("Two.", {"thinking": "thought"}),
    "thinking_blocks": ([{"thinking": "Two."}], {}),
    "reward": (0, {}),
    "train_detail": ([{"begin_offset": 0}], {}),
    "image1": ("a.jpg", {}),
    "channel": ("analysis", {}),
    "deleted": (True, {}),
}
"""Names of keys, the value in one message, and what `columns` may map it to."""


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", FORMS)
def test_keys_of_some_messages_are_undecided(form: str, key: str) -> None:
    value, columns = KEYS[key]
    row = FORMS[form]({key: value}, {})
    (path,) = {"sharegpt": ["conversations"], "prompt": ["completion"]}.get(form, [form])
    (line,) = undecided(row, row)
    assert line.startswith(f"rows.jsonl:1: {path}[].{key} is {value!r}")
    assert f'ignore: ["{path}[].{key}"]' in line and f"map it in columns, as in {{FIELD: {key}}}" in line
    for name in (key, f"{path}[].{key}"):
        assert undecided(row, reading=ignoring(name)) == []
        assert turns(row, reading=ignoring(name)) == ["Bad.", "Good."]
    assert undecided(row, reading=Reading(columns)) == ([] if columns else undecided(row))
    if "train" in columns:
        assert turns(row, reading=Reading(columns)) == ["Good."]
    if "thinking" in columns:
        assert f"leaves out {key}" in refused(row, reading=Reading(columns))


@pytest.mark.parametrize("held", [1, 0.5, False, "web", "DeepSeek R1", "a b c", "true", "train_sft", "contest"])
def test_what_all_rows_or_messages_have_is_passed(held: Any) -> None:
    row = {"messages": [{**HI, "k": held}, reply("x", k=held)], "a": {"b": held}, "c": held}
    seen, unread = Seen(), Unread()
    for number in range(3):
        parse(row, "messages", Reading(), seen, unread, f"rows.jsonl:{number}")
    assert unread.end().undecided == {}
    assert {each: number for each, number in seen.items() if each[0] != "read"} == {
        ("constant", "column", "a.b"): 3,
        ("constant", "column", "c"): 3,
        ("constant", "key", "messages[].k"): 6,
    }
    for other in (1.5, "other", None, [held]):
        assert len(undecided(row, {**row, "c": other})) == 1
        assert len(undecided(row, {**row, "a": {"b": other}})) == 1
        assert len(undecided({**row, "messages": [HI, reply("x", k=other)]}, row)) == 1
    assert len(undecided({"c": held, **SIMPLE["text"]}, {"c": str(held) + "?", **SIMPLE["text"]})) == 1


@pytest.mark.parametrize(
    "held",
    [
        *("Answer like a pirate.", ["math"], "[0, 1]", '{"a": 1}', "a.jpg", "img/a", "data:x", "x" * 101),
        *("test", "Validation", "dev", "test_sft", "validation_matched", "held_out", "devtest"),
    ],
)
def test_values_that_may_mean_more_are_undecided_even_if_all_rows_have_them(held: Any) -> None:
    (line,) = undecided({"text": "a", "c": held}, {"text": "b", "c": held})
    assert line.startswith("rows.jsonl:1: c is ")
    (line,) = undecided({"messages": [{**HI, "k": held}, reply("x", k=held)]})
    assert line.startswith("rows.jsonl:1: messages[].k is ")


@pytest.mark.parametrize("column", ["split", "Split", "set", "info.subset"])
def test_rows_of_a_held_out_split_are_undecided(column: str) -> None:
    def row(held: Any) -> dict[str, Any]:
        name, _, inner = column.partition(".")
        return {**SIMPLE["messages"], name: {inner: held} if inner else held}

    for split in ("test", "Validation", "dev", "test_sft", "validation_matched", "held_out", "devtest"):
        (line,) = undecided(row(split), row(split))
        assert line.startswith(f"rows.jsonl:1: {column} is {split!r}, and nothing reads it; ")
        assert f"keep some rows by where: {{{column}: [{split}]}}" in line
        assert undecided(row(split), reading=ignoring(column)) == []
        of_split = Reading(split={"test": "test", "test_sft": "test"}.get(split))
        assert (undecided(row(split), reading=of_split) == []) == bool(of_split.split)
    for other in ("train", "all", 3, "", "train_sft", "contest"):
        assert undecided(row(other), row(other)) == []
    assert undecided({"text": "a", "is_test": True}) and not undecided({"text": "a", "is_test": False})


LONG = "Write one long poem about the sea."


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"messages": [{"role": "user", "content": LONG}, reply("x")]}, "prompt"),
        ({"messages": [HI, reply(f"Yes. {LONG}")]}, "answer"),
        ({"instruction": LONG, "output": "x"}, "question"),
        ({"text": f"Q: {LONG} A: x"}, "question"),
        ({"messages": [HI, reply("x")], "tools": []}, ""),
    ],
)
def test_a_text_that_is_read_may_be_repeated(row: dict[str, Any], column: str) -> None:
    others = [{**row, column: f" {LONG}\n"}, {**row, column: ABSENT}] if column else [row]
    others = [{name: held for name, held in each.items() if held is not ABSENT} for each in others]
    assert undecided(*others) == []
    if column:
        seen = Seen()
        parse(others[0], detect(row, Reading()), Reading(), seen, Unread())
        assert seen["redundant", "column", column] == 1
        assert len(undecided({**row, column: f"{LONG} In verse."}, row)) == 1
        assert len(undecided({**row, column: LONG[:9]}, row)) == 1  # by chance


def test_a_short_text_may_be_repeated_as_a_whole() -> None:
    for asked, lines in (("Add 1.", 0), ("Add", 1)):  # one word may be a label
        row = {"messages": [{"role": "user", "content": asked}, reply("x")], "q": asked}
        assert len(undecided(row, {**row, "q": "x"})) == 1
        assert len(undecided(row, SIMPLE["messages"])) == lines


def test_a_repeated_answer_may_be_the_verdict() -> None:
    pair = {"prompt": LONG, "chosen": "Here is a good one.", "rejected": "Here is a bad one."}
    for held, lines in ((pair["chosen"], 1), (pair["rejected"], 1), (LONG, 0)):
        assert len(undecided({**pair, "best": held}, {**pair, "best": held}, form="preference")) == lines


LEAF = st.sampled_from([ABSENT, None, 1, True, "a", "b", LONG, [1]])


@given(
    st.lists(st.tuples(LEAF, LEAF, st.lists(LEAF, min_size=1, max_size=2)), max_size=7),
    st.lists(st.integers(0, 7), max_size=3),
)
def test_chunks_of_a_file_are_judged_together(values: list[tuple[Any, Any, list[Any]]], ends: list[int]) -> None:
    """Each chunk is read by itself, maybe by another process."""

    def with_key(message: dict[str, Any], key: str, held: Any) -> dict[str, Any]:
        return message if held is ABSENT else {**message, key: held}

    rows = [
        with_key(with_key({"messages": [with_key(reply("x"), "k", held) for held in keys]}, "a", one), "b", other)
        for one, other, keys in values
    ]

    def read(part: list[dict[str, Any]]) -> Unread:
        unread = Unread()
        for row in part:
            parse(row, "messages", Reading(), unread=unread, place="rows.jsonl")
        return unread.end()

    merged = Unread()
    for start, end in itertools.pairwise([0, *sorted(ends), len(rows)]):
        merged.merge(read(rows[start:end]))
    assert {*merged.undecided} == {*read(rows).undecided}


def test_what_is_left_out_has_exact_names() -> None:
    row = {"messages": [{**HI, "id": 1}, reply("x")], "id": 2, "data": {"id": 3, "of": {"id": 4}}}
    leaves = {"messages[].id": "messages[].id", "id": "id", "data.id": "data.id", "data.of.id": "data.of.id"}
    for ignored, left in {
        (): [*leaves],
        ("id",): ["data.id", "data.of.id"],
        ("messages[].id",): ["id", "data.id", "data.of.id"],
        ("data.id",): ["messages[].id", "id", "data.of.id"],
        ("data.of",): ["messages[].id", "id", "data.id"],
        ("data", "id"): [],
        ("dat", "ta.id", "message"): [*leaves],
    }.items():
        unread = Unread()
        for each in (row, SIMPLE["messages"]):
            parse(each, "messages", ignoring(*ignored), unread=unread, place="rows.jsonl:1")
        assert sorted(unread.end().undecided) == sorted(left)
    (*_, last) = undecided(row, SIMPLE["messages"], reading=ignoring("x", "id"))
    assert last == ("2 columns or keys are undecided; to leave out all of them: ignore: [id, x, data.id, data.of.id]")


def test_pairs_can_be_learnt_explicitly() -> None:
    row = {"prompt": "Hi", "chosen": "Good.", "rejected": "Bad."}
    (line,) = undecided(row, {**row, "rejected": "Worse."}, reading=Reading({"completion": "chosen"}))
    assert line.startswith("rows.jsonl:2: rejected is 'Worse.', 'Bad.' in rows.jsonl:1, and nothing reads it")
    assert turns(row, reading=ignoring("rejected", completion="chosen")) == ["Good."]


def test_media_of_messages_are_undecided() -> None:
    for key in ("images", "image", "videos", "audio"):
        row = {"messages": [{**HI, key: ["a.jpg"]}, reply("x")]}
        (line,) = undecided(row)
        assert line.startswith(f"rows.jsonl:1: messages[].{key} is ['a.jpg'], and nothing reads it")
        assert undecided(row, reading=ignoring(key)) == [] and turns(row, reading=ignoring(key)) == ["x"]
    (line,) = undecided({"text": "A song", "audio": {"bytes": b"x", "path": None}})
    assert line.startswith("rows.jsonl:1: audio.bytes is b'x', and nothing reads it")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask is [1, 0], but must be [1, 1]"),
        ({"input_ids": [1, 2], "position_ids": [0, 0]}, "position_ids is [0, 0], but must be [0, 1]"),
    ],
)
def test_padded_and_packed_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow) as caught:
        parse(row, detect(row, Reading()), Reading())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "part",
    [
        *({"weight": 0}, {"train": False}, {"citations": ["a"]}, {"cache_control": {"type": "ephemeral"}}),
        {"annotations": [], "weight": 1, "logprobs": None},
    ],
    ids=str,
)
def test_keys_of_content_parts_are_undecided(part: dict[str, Any]) -> None:
    """Even if all have them: a turn is supervised as a whole."""
    row = {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x", **part}]}]}
    (key,) = (key for key, held in part.items() if held not in ([], None))
    (line,) = undecided(row, row)
    assert line.startswith(
        f"rows.jsonl:1: messages[].content[].{key} is {part[key]!r}, and nothing reads it; leave it out"
    )
    assert line.endswith(f'ignore: ["messages[].content[].{key}"]')
    for name in (key, f"messages[].content[].{key}"):
        assert undecided(row, reading=ignoring(name)) == [] and turns(row, reading=ignoring(name)) == ["x"]


@pytest.mark.parametrize("part", [{"type": "thinking", "thinking": "T"}, {"type": "reasoning", "text": "T"}])
def test_thoughts_in_content_parts_are_refused(part: dict[str, Any]) -> None:
    row = {"messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "x"}, part]}]}
    assert refused(row).startswith(
        "messages[1].content[1] contains thoughts; put them beside the content, as reasoning"
    )


@pytest.mark.parametrize(("one", "other"), [("human", "gpt"), ("human", "model"), ("user", "chatgpt")])
def test_speakers_of_sharegpt_in_messages(one: str, other: str) -> None:
    row = {"messages": [{"role": one, "content": "Hi"}, {"role": other, "content": "x"}]}
    assert turns(row) == ["x"]
    assert turns({"messages": [*row["messages"], {"role": "observation", "content": "3"}, reply("y")]}) == ["x", "y"]


def test_nested_columns_are_undecided_by_their_path() -> None:
    columns = {"prompt": "data.q", "completion": "data.a"}
    for name, held in {"label": False, "context": "c", "history": [["a", "b"]], "weight": 0, "cot": "Two."}.items():
        row: dict[str, Any] = {"data": {"q": "Hi", "a": "x", name: held}}
        (line,) = undecided(row, {"data": {"q": "Hi", "a": "x"}}, reading=Reading(columns))
        assert line.startswith(f"rows.jsonl:1: data.{name} is {held!r}") and f"ignore: [data.{name}]" in line
        assert undecided(row, reading=ignoring(f"data.{name}", **columns)) == []
        assert turns(row, reading=ignoring(f"data.{name}", **columns)) == ["x"]


def test_thoughts_belong_to_answers() -> None:
    for key in ("reasoning", "thinking"):
        row = {"messages": [{**HI, key: "Why?"}, reply("x")]}
        for reading in (Reading(), Reading({"reasoning_content": key})):
            (line,) = undecided(row, reading=reading)
            assert line.startswith(f"rows.jsonl:1: messages[].{key} is 'Why?', missing in other messages, and nothing")
        assert undecided(row, reading=ignoring(key)) == [] and turns(row, reading=ignoring(key)) == ["x"]
    (line,) = undecided(
        {"conversations": [{"from": "human", "value": "Hi", "reasoning": "Why?"}, {"from": "gpt", "value": "x"}]}
    )
    assert line.startswith("rows.jsonl:1: conversations[].reasoning is 'Why?'")


@pytest.mark.parametrize("begin", ["<think>", "\n<thinking>", "<thought>"])
def test_duplicate_thoughts_are_refused(begin: str) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [HI, reply(f"{begin}T</think>4", reasoning_content="T")]},
        {"prompt": "Hi", "completion": f"{begin}T</think>4", "reasoning_content": "T"},
    ]
    for row, path in zip(rows, ("messages[1].", ""), strict=True):
        expected = f"{path}reasoning_content conflicts with a content that begins with {begin.strip()}"
        assert refused(row, template="qwen3") == f"{expected}; keep one of the thoughts"


def test_mode_of_thinking_is_not_a_thought() -> None:
    """In NVIDIA's Nemotron rows; it would be supervised as a thought."""
    assert undecided({"messages": [HI, reply("x")], "reasoning": "on"}) == []
    assert len(undecided(*({"messages": [HI, reply("x")], "reasoning": mode} for mode in ("on", "off")))) == 1
    row = {"prompt": "Hi", "completion": "x", "reasoning": "Off"}
    assert refused(row, template="qwen3") == "reasoning is 'Off', which is not a thought; set ignore: [reasoning]"
    assert turns(row, reading=Reading(ignored=frozenset({"reasoning"}))) == ["x"]


def test_thoughts_beside_lists_of_messages_are_refused() -> None:
    for name in ("reasoning", "thinking", "reasoning_content"):
        text = refused({"prompt": [HI], "completion": [reply("4")], name: "Two."})
        assert text.startswith(f"{name} conflicts with lists of messages; move it into the answer it belongs to")
    row = {"messages": [HI, reply("4")], "rationale": "It is two and two."}
    (line,) = undecided(row, reading=Reading({"reasoning_content": "rationale"}))
    assert line.startswith("rows.jsonl:1: rationale is 'It is two and two.', and nothing reads it")
    row = {"prompt": "Hi", "completion": "4", "rationale": "Two."}
    assert "Two." in turns(row, reading=Reading({"reasoning_content": "rationale"}), template="qwen3")[0]


# Use of columns and keys


def test_columns_and_keys_are_counted_by_their_use() -> None:
    seen, unread = Seen(), Unread()
    for number in range(3):
        row = {
            "messages": [{**HI, "id": number}, reply("x", weight=1, refusal=None)],
            "source": "web",
            "score": None,
            "note": [],
            "label": number,
            "data": {"a": {"b": 1}, "c": LONG},
            "question": "x" * number,
        }
        parse(row, "messages", ignoring("label", "messages[].id", "data.c", "question"), seen, unread)
    assert unread.end().undecided == {}
    assert seen == {
        ("read", "column", "messages"): 3,
        ("read", "key", "role"): 6,
        ("read", "key", "content"): 6,
        ("read", "key", "weight"): 3,
        ("ignored", "key", "messages[].id"): 3,
        ("constant", "column", "source"): 3,
        ("constant", "column", "data.a.b"): 3,
        ("ignored", "column", "data.c"): 3,
        ("ignored", "column", "label"): 3,
        ("ignored", "column", "question"): 2,
    }


# Names of keys and roles


def test_keys_and_roles_of_messages_can_be_mapped() -> None:
    row = {"chat": [{"speaker": "customer", "text": "Hi"}, {"speaker": "Bot", "text": "Hello", "importance": 0}]}
    row["chat"] += [{"speaker": "customer", "text": "Again"}, {"speaker": "bot", "text": "Bye"}]
    columns = {"messages": "chat", "role": "speaker", "content": "text", "weight": "importance"}
    reading = Reading(columns, {"bot": "assistant", "customer": "user"})
    assert turns(row, reading=reading) == ["Bye"]
    assert "chat[0].speaker is 'customer'" in refused(row, reading=Reading(columns))
    assert "or roles: {customer: ...} with one of system, user, assistant, tool" in refused(
        row, reading=Reading(columns)
    )


def test_keys_of_sharegpt_can_be_mapped() -> None:
    row = {"dialog": [{"speaker": "human", "says": "Hi"}, {"speaker": "gpt", "says": "Hello"}]}
    assert turns(row, reading=Reading({"conversations": "dialog", "from": "speaker", "value": "says"})) == ["Hello"]


@pytest.mark.parametrize(("one", "other"), [("Human", "GPT"), ("USER", "Assistant"), (" human ", "ChatGPT")])
def test_role_names_ignore_case(one: str, other: str) -> None:
    assert turns({"conversations": [{"from": one, "value": "Hi"}, {"from": other, "value": "Hello"}]}) == ["Hello"]
    if one.strip().lower() == "user":
        assert turns({"messages": [{"role": one, "content": "Hi"}, {"role": other, "content": "Hello"}]}) == ["Hello"]


# Calls of tools

FIRST, SECOND = ({"name": name, "arguments": {"a": 1}} for name in ("add", "subtract"))


@pytest.mark.parametrize("name", ["function_call", "Function_Call", "tool_call"])
def test_sharegpt_calls_several_tools_behind_a_thought(name: str) -> None:
    def calls(value: Any) -> tuple[str, list[str]]:
        row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": name, "value": value}]}
        (_, message) = parse(row, "sharegpt", Reading()).messages or []
        return message["content"], [call["function"]["name"] for call in message["tool_calls"]]

    assert calls(json.dumps([FIRST, SECOND])) == ("", ["add", "subtract"])
    assert calls("<think>\nLet me add.\n</think>\n\n" + json.dumps(FIRST)) == (
        "<think>\nLet me add.\n</think>\n\n",
        ["add"],
    )
    assert calls("<think>x</think>" + json.dumps([FIRST, SECOND])) == ("<think>x</think>", ["add", "subtract"])
    assert calls(json.dumps({"name": "add", "arguments": '{"a": 1}'})) == ("", ["add"])


@pytest.mark.parametrize("role", ["tool_call", "function_call", "Tool_Call"])
def test_calls_may_be_separate_turns(role: str) -> None:
    """As in ms-swift."""
    row: dict[str, Any] = {
        "messages": [
            HI,
            {"role": role, "content": json.dumps(FIRST)},
            {"role": "tool_response", "content": "3"},
            {"role": role, "content": f"<think>T</think>{json.dumps([FIRST, SECOND])}", "loss": False},
            {"role": "tool", "content": "4"},
            reply("y"),
        ],
        "tools": [TOOL],
    }
    example = parse(row, detect(row, Reading()), Reading())
    (_, first, _, second, *_) = example.messages or []
    assert first == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": FIRST}]}
    assert [call["function"] for call in second["tool_calls"]] == [FIRST, SECOND]
    assert example.supervised == [None, None, None, False, None, None]
    assert "<tool_call>" in turns(row, template="qwen3")[0]
    row["messages"][1]["content"] = "add(1)"
    assert refused(row).startswith("messages[1].content is 'add(1)', which is not JSON")


def test_thought_before_a_call_is_supervised() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": "<think>\nAdd.\n</think>\n\n" + json.dumps([FIRST, SECOND])},
        ],
        "tools": json.dumps([TOOL]),
    }
    (text,) = turns(row, template="qwen3")
    assert text.startswith("<think>\nAdd.\n</think>\n\n<tool_call>\n") and text.count("<tool_call>") == 2


# Null below arguments and schemas

NULLS = {"city": "Oslo", "unit": None, "days": [{"a": None}]}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}


def _calling(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [SCHEMA]}


def _read(path: Path) -> list[Example]:
    return [
        parse(row, "messages", Reading(filled=chunk.kind == "parquet"))
        for chunk in chunks(path)
        for _, row in chunk.records()
    ]


def _arguments(example: Example) -> Any:
    assert example.messages
    return example.messages[1]["tool_calls"][0]["function"]["arguments"]


def test_nulls_of_json_stay_and_nulls_of_tables_go(tmp_path: Path) -> None:
    rows = [_calling(NULLS), _calling(json.dumps(NULLS))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for example in _read(tmp_path / "rows.jsonl"):
        assert _arguments(example) == NULLS
        assert example.tools == [SCHEMA]
    # JSON texts in a table stay JSON; the table's own fields are null where only other rows have a value.
    as_text = [{"messages": json.dumps(row["messages"]), "tools": json.dumps(row["tools"])} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(as_text), tmp_path / "rows.parquet")
    for example in _read(tmp_path / "rows.parquet"):
        assert _arguments(example) == NULLS
        assert example.tools == [SCHEMA]
    parquet.write_table(
        pyarrow.Table.from_pylist([_calling({"a": 1, "b": None}), _calling({"b": 2, "a": None})]),
        tmp_path / "rows.parquet",
    )
    assert [_arguments(example) for example in _read(tmp_path / "rows.parquet")] == [{"a": 1}, {"b": 2}]


def test_json_objects_in_a_table_keep_nulls(tmp_path: Path) -> None:
    """As `datasets` writes turns, arguments and tool properties whose keys differ by row."""
    row = _calling(NULLS)
    text = pyarrow.array([json.dumps(turn) for turn in row["messages"]], pyarrow.json_())
    schema = pyarrow.StructArray.from_arrays(
        [pyarrow.array([json.dumps({"default": None})], pyarrow.json_()), pyarrow.nulls(1, pyarrow.string())],
        ["parameters", "strict"],
    )
    tool = pyarrow.StructArray.from_arrays([schema, pyarrow.array(["function"])], ["function", "type"])
    table = pyarrow.table(
        {"messages": pyarrow.ListArray.from_arrays([0, 2], text), "tools": pyarrow.ListArray.from_arrays([0, 1], tool)}
    )
    parquet.write_table(table, tmp_path / "rows.parquet")
    (example,) = _read(tmp_path / "rows.parquet")
    assert _arguments(example) == NULLS
    assert example.tools == [{"function": {"parameters": {"default": None}}, "type": "function"}]


# Stanford Alpaca's prompts

BELOW = "<s>Below is an instruction that describes a task"
RESPOND = "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd."
RESPONSE = "\n\n### Response:«5</s>»"
PAIRED = f"{BELOW}, paired with an input that provides further context. {RESPOND}"
WITH_INPUT = f"{PAIRED}\n\n### Input:\n1 + 4{RESPONSE}"
WITHOUT = f"{BELOW}. {RESPOND}{RESPONSE}"


@pytest.fixture
def alpaca() -> Template:
    family = Family("llama3", "<s>", "</s>", ("<s>", "</s>"), opens=True)
    return Template(tokenizer_like(family, None), prepare_settings(template="alpaca"))


def _marked(template: Template, row: dict[str, Any], form: str = "alpaca") -> str:
    return marked(template.pieces(parse(row, form, Reading())))


def test_alpaca_matches_stanfords_prompt(alpaca: Template) -> None:
    assert _marked(alpaca, {"instruction": "Add.", "input": "1 + 4", "output": "5"}) == WITH_INPUT
    assert _marked(alpaca, {"instruction": "Add.", "context": "1 + 4", "output": "5"}) == WITH_INPUT
    assert _marked(alpaca, {"instruction": "Add.", "input": "", "output": "5"}) == WITHOUT
    asked = {"prompt": "Add.\n\n### Input:\n1 + 4", "completion": "5"}
    assert _marked(alpaca, asked, "prompt") == WITH_INPUT  # as users of the model write it


def test_alpacas_frame_matches_its_template(alpaca: Template) -> None:
    """With a frame for instruction and input (the fast path), and without."""
    row = {"instruction": " Add. ", "input": " 1 + 4\n", "output": " 5", "history": [["Hi", "Hello"]]}
    for each in (row, row | {"system": "Be brief."}, row | {"input": "### Input:\n\n### Input:\n"}):
        fast = alpaca.pieces(parse(each, "alpaca", Reading()))
        assert all(alpaca.frames.values())
        alpaca.frames = dict.fromkeys(alpaca.frames)
        assert alpaca.pieces(parse(each, "alpaca", Reading())) == fast
        alpaca.frames.clear()


def test_other_formats_join_input_by_a_line_break() -> None:
    row = {"instruction": "Add.", "input": "1 + 4", "output": "5"}
    assert supervised(row).endswith(f"{U}Add.\n1 + 4<|im_end|>\n{A}«5<|im_end|>»")
