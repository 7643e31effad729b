"""A row keeps its meaning: its own loss settings apply, and unread keys are counted or refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from goldens import marked, prepare_settings
from pyarrow import parquet
from tokenizers_of import Family, tokenizer_like, tokenizer_of

from zerolora.data.example import BadRow, Example
from zerolora.data.formats import detect, parse
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
    assert "weight is 0.5; write 1 = supervised or 0 = not supervised" in refused(row)
    assert "ignore: [weight]" in refused(row)
    assert turns(row, reading=Reading(ignored=frozenset({"weight"}))) == ["Bad.", "Good."]
    assert ".loss is 'no'; write 1" in refused(FORMS[form]({"loss": "no"}, {}))
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
    with pytest.raises(BadRow, match=r"messages\[0\].tools is a list of tools, which only a row or its system message"):
        parse({"messages": [{**HI, "tools": [TOOL]}, reply("x")]}, "messages", Reading())
    with pytest.raises(BadRow, match="tools and functions are two lists of tools; keep one"):
        parse({"messages": [HI, reply("x")], "tools": [TOOL], "functions": [{"name": "f"}]}, "messages", Reading())


def test_context_is_the_input_of_an_instruction_only() -> None:
    assert turns({"instruction": "Add.", "context": "1 + 4", "output": "5"}) == ["5"]
    assert f"{U}Add.\n1 + 4<|im_end|>" in supervised({"instruction": "Add.", "context": "1 + 4", "output": "5"})
    for row in ({"prompt": "Add.", "completion": "5"}, {"messages": [HI, reply("x")]}, FORMS["sharegpt"]({}, {})):
        for key in ("context", "history"):
            text = refused({**row, key: "1 + 4"})
            assert text.startswith(
                f"{key} changes what is asked, and this form does not read it; put it into the question"
            )
            assert ("write format: alpaca, with columns for instruction and output and input: " in text) == (
                "prompt" in row
            )
    assert "put it into the prompt" in refused({"prompt": "Add.", "input": "1 + 4", "completion": "5"})
    assert parse({"text": "x", "context": "y"}, "text", Reading()).text == "x"


def test_context_of_a_question_is_read_or_refused() -> None:
    row, how = {"q": "Add.", "a": "5"}, {"prompt": "q", "completion": "a"}
    for name, held in {"passage": "A text.", "options": ["a", "b"], "choices": "a or b"}.items():
        assert refused({**row, name: held}, reading=Reading(how)).startswith(f"{name} changes what is asked")
    history = [["Hi", "Hello"]]
    text = refused({**row, "history": history}, reading=Reading(how))
    assert "or write format: alpaca, with columns for instruction and output and history: history" in text
    how = {"instruction": "q", "output": "a"}
    assert turns({**row, "history": history}, reading=Reading(how)) == ["Hello", "5"]
    text = refused({**row, "chat_history": history, "passage": ""}, reading=Reading(how))
    assert "; write columns: {history: chat_history}, or put it into the question" in text
    assert turns({**row, "talk": history}, reading=Reading({**how, "history": "talk"})) == ["Hello", "5"]
    text = refused({**row, "passage": "A text."}, reading=Reading(how))
    assert "; write columns: {input: passage}, or put it into the question" in text
    assert "A text." in supervised({**row, "passage": "A text."}, reading=Reading({**how, "input": "passage"}))
    text = refused({**row, "passage": "A text.", "input": "1 + 4"}, reading=Reading({**how, "input": "passage"}))
    assert text.startswith("input changes what is asked")


# Judged rows, media, and other keys that change the loss


JUDGED = {
    "label": False, "chosen": "x", "rejected": [reply("x")], "rejected_response": "x", "kto_tag": True,
    "margin": 0.5, "labels": [0], "rejected_messages": [HI],
}  # fmt: skip


@pytest.mark.parametrize("key", JUDGED)
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, reply("x")]},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "output": "b"},
        {"text": "a"},
    ],
    ids=["messages", "prompt", "alpaca", "text"],
)
def test_judged_rows_are_refused(key: str, row: dict[str, Any]) -> None:
    row = {**row, key: JUDGED[key]}
    text = refused(row)
    assert text.startswith(f"{key} judges or compares answers") and f"ignore: [{key}]" in text
    assert turns(row, reading=Reading(ignored=frozenset({key})))
    assert turns({**row, key: None}) == turns({**row, key: ""})


def test_judged_rows_can_be_ignored_explicitly() -> None:
    row = {"prompt": "Hi", "chosen": "Good.", "rejected": "Bad."}
    reading = Reading({"completion": "chosen"})
    assert "rejected judges or compares answers" in refused(row, reading=reading)
    assert turns(row, reading=Reading({"completion": "chosen"}, ignored=frozenset({"rejected"}))) == ["Good."]


@pytest.mark.parametrize("key", ["images", "image", "videos", "audio"])
def test_media_are_refused(key: str) -> None:
    for row in ({"messages": [HI, reply("x")], key: ["a.jpg"]}, {"messages": [{**HI, key: ["a.jpg"]}, reply("x")]}):
        assert f"{key} holds " in refused(row)
        assert "bad_row" not in refused(row)  # prepare adds it if it is not set
        assert turns(row, reading=Reading(ignored=frozenset({key}))) == ["x"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [HI, reply("x", train_detail=[{"begin_offset": 0}])]}, "messages[1].train_detail selects"),
        ({"messages": [HI, reply("x", rejected=True)]}, "messages[1].rejected judges or compares answers"),
        ({"text": "a", "weight": 0}, "weight weighs a whole row, and rows have no weight"),
        ({"text": "a", "weight": "0.5"}, "weight weighs a whole row"),
        ({"messages": [HI, reply("x")], "train": False}, "train weighs a whole row"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, "completion_mask selects which tokens are in the loss;"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask is [1, 0], but only [1, 1] is supported"),
        ({"input_ids": [1, 2], "position_ids": [0, 0]}, "position_ids is [0, 0], but only [0, 1] is supported"),
    ],
)  # fmt: skip
def test_keys_that_change_the_loss_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow) as caught:
        parse(row, detect(row, Reading()), Reading())
    assert str(caught.value).startswith(message)


SWITCHED = "seems to select turns for the loss, and is not a key that is read; write columns: {train: KEY} if true"
PARTS = "selects which turns or tokens are in the loss; write train: true or false in each turn, or labels"
THOUGHT = "contains thoughts of an answer, and is not a key that is read; write columns: {reasoning_content: KEY}"
COMPARES = "judges or compares answers, and every answer would be supervised"
OF_TURNS = {
    **dict.fromkeys(
        ("train_on_turn", "mask", "masked", "compute_loss", "trainOnTurn", "is_trained", "trainable"), SWITCHED
    ),
    **dict.fromkeys(("train_on_input", "ignore_loss", "supervised", "Loss_Mask", "calculate-loss"), SWITCHED),
    **dict.fromkeys(("thought", "thoughts", "chain_of_thought", "cot", "thinking_blocks", "reasoningText"), THOUGHT),
    **dict.fromkeys(("reward", "preference", "is_chosen", "rejected_answer"), COMPARES),
    **dict.fromkeys(("imagePaths", "image1", "img_url", "photos"), "holds images, which are not supported"),
    **dict.fromkeys(("video_path", "speech_file", "audio_bytes"), "which are not supported"),
    "channel": "marks a turn as no answer to the user",
}


@pytest.mark.parametrize("key", OF_TURNS)
@pytest.mark.parametrize("form", FORMS)
def test_synonyms_in_turns_are_refused(form: str, key: str) -> None:
    """Names of other tools are refused, and each remedy works."""
    message = OF_TURNS[key]
    value: Any = {SWITCHED: False, COMPARES: 0}.get(message, "Two and two." if message == THOUGHT else "analysis")
    row = FORMS[form]({key: value}, {})
    assert f"1].{key} " in (text := refused(row)) or f"0].{key} " in text
    assert message.replace("KEY", key) in text and f"ignore: [{key}]" in text
    assert turns(row, reading=Reading(ignored=frozenset({key}))) == ["Bad.", "Good."]
    if message == SWITCHED:
        assert turns(row, reading=Reading({"train": key})) == ["Good."]
    if message == THOUGHT:
        assert f"leaves out {key}" in refused(row, reading=Reading({"thinking": key}))


SOME_THOUGHTS = (
    *("Complex_CoT", "deepseek_reasoning", "model_reasoning", "inner_thoughts", "ModelCoT", "expert_rationale"),
    *("reasoning_path", "thinking_trajectory", "cot_response", "rationales", "CoT"),
)
SWITCHED_OFF = [
    *((name, True) for name in ("ignore_loss", "skip_train", "do_not_train", "exclude_from_training", "loss_masked")),
    *(("no_loss", 1), ("skip_training", "yes"), ("train", "no"), ("training", "Off"), ("is_trained", "no")),
]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("loss_mask", [0, 1], PARTS),
        ("weights", [0, 1], PARTS),
        ("mask", "User", PARTS),
        ("assistantMask", [0, 1], PARTS),
        ("sampleWeight", 0, "weighs a whole row"),
        ("row_weight", 0.5, "weighs a whole row"),
        ("reasoning", "Two.", "contains thoughts, which belong to one of the answers; move it into that turn"),
        ("chain_of_thought", "Two.", "contains thoughts, which belong to one of the answers; move it into that turn"),
        (
            "system_message",
            "Be kind.",
            "is a system prompt, and no column that is read; write columns: {system: system_m",
        ),
        ("sysPrompt", "Be kind.", "is a system prompt"),
        (
            "available_tools",
            [{"name": "f"}],
            "is a list of tools, and no column that is read; write columns: {tools: av",
        ),
        ("tool_list", '[{"name": "f"}]', "is a list of tools"),
        ("documents", ["a"], "changes what is asked"),
        ("preferred_answer", "x", COMPARES),
        (
            "kto_tag",
            False,
            f"{COMPARES}: train.objective is sft; keep the rows of good answers alone, or write train.objective: kto",
        ),
        ("image_paths", ["a.jpg"], "holds images"),
        *((name, "Two and two.", "contains thoughts, which belong to one of the answers") for name in SOME_THOUGHTS),
        ("thinking_trajectories", ["First, two."], "contains thoughts"),
        ("instructions", "Be brief.", "is a system prompt, and no column that is read; write columns: {system: ins"),
        ("preamble", "Be brief.", "is a system prompt"),
        ("chat_history", [["a", "b"]], "changes what is asked"),
        ("conversation_history", "User: Hi", "changes what is asked"),
        ("retrieved_context", "A text.", "changes what is asked"),
        *((name, held, "weighs a whole row") for name, held in SWITCHED_OFF),
        ("loss_mask", "[0, 1]", PARTS),
        ("label", "bad", COMPARES),
        ("labels", "[0, 1]", COMPARES),
    ],
)
def test_synonyms_in_columns_are_refused(column: str, value: Any, message: str) -> None:
    row = {"messages": [HI, {"role": "assistant", "content": "x"}], column: value}
    assert (text := refused(row)).startswith(f"{column} {message}") and f"ignore: [{column}]" in text
    assert turns(row, reading=Reading(ignored=frozenset({column}))) == ["x"]


def test_similar_names_are_only_counted() -> None:
    names = {
        **{"train_id": 5, "weight_kg": 70, "training": "v2", "mask_token": "<mask>", "loss": "low", "is_train": True},
        **{
            "thinking": True,
            "reasoning_tokens": 12,
            "reasoning_effort": "high",
            "image_count": 3,
            "image_caption": "a",
        },
        **{
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "function": "f",
            "score": 0.1,
            "system_fingerprint": "a",
        },
        **{"split": "train", "audio": None, "images": [], "tools_used": ["f"], "model": "m", "channel": "analysis"},
        **{"reasoning_model": "DeepSeek R1", "reasoning_type": "of two steps", "requires_reasoning": "yes"},
        **{"model_reasoning": "deepseek-r1", "ignore_loss": False, "no_train": 0, "loss_masked": "no", "train_on": 1},
        **{
            "document": "a b",
            "options": ["a"],
            "context_id": "a b",
            "browser_history": ["a"],
            "instructions": "ifeval",
        },
        **{"label": {"ability": ["math"]}, "labels": ["math", "art"], "kto_tag": "a tag", "dataset.label": "math"},
    }
    seen = Seen()
    parse({"messages": [HI, reply("x")], **names}, "messages", Reading(), seen)
    unread = {name for status, where, name in seen if (status, where) == ("unread", "column")}
    assert unread == names.keys() - {"audio", "images"}


@pytest.mark.parametrize("column", ["split", "Split", "data_split"])
def test_row_of_a_held_out_split_is_refused(column: str) -> None:
    row = {"messages": [HI, reply("x")]}
    for split in ("test", "Validation", "dev", "test_sft", "validation_matched", "held_out", "devtest"):
        assert refused({**row, column: split}).startswith(f"{column} says that a row is held out of training; put rows")
    for other in ("train", "all", 3, "", "train_sft", "contest"):
        assert turns({**row, column: other}) == ["x"]
    assert turns({**row, column: "test"}, reading=Reading(ignored=frozenset({column}))) == ["x"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"weight": 0}, "messages[1].content[0].weight is of a part, and a turn is supervised as a whole"),
        ({"train": False}, "content[0].train is of a part"),
        ({"masked": True}, "content[0].masked is of a part"),
        (
            {"type": "thinking", "thinking": "T"},
            "content[0] contains thoughts; write them beside the content, as reasoning",
        ),
        ({"type": "reasoning"}, "content[0] contains thoughts"),
        ({"cache_control": {"type": "ephemeral"}, "weight": None}, ""),
    ],
)
def test_keys_of_content_parts_are_refused(part: dict[str, Any], message: str) -> None:
    row = {"messages": [HI, {"role": "assistant", "content": [{"type": "text", "text": "x", **part}]}]}
    assert message in refused(row) if message else turns(row) == ["x"]
    if "of a part" in message:
        (key,) = part
        assert refused(row).endswith(f"write it beside content, or ignore: [{key}]")
        assert turns(row, reading=Reading(ignored=frozenset({key}))) == ["x"]


@pytest.mark.parametrize(("one", "other"), [("human", "gpt"), ("human", "model"), ("user", "chatgpt")])
def test_speakers_of_sharegpt_in_messages(one: str, other: str) -> None:
    row = {"messages": [{"role": one, "content": "Hi"}, {"role": other, "content": "x"}]}
    assert turns(row) == ["x"]
    assert turns({"messages": [*row["messages"], {"role": "observation", "content": "3"}, reply("y")]}) == ["x", "y"]


def test_token_rows_allow_only_labels() -> None:
    for name, held in {"loss_mask": [0, 1], "weights": [0, 1], "mask": [0, 1], "prompt_length": 1}.items():
        with pytest.raises(BadRow, match=f"{name} selects which tokens are in the loss; write labels, with -100"):
            parse({"input_ids": [1, 2], name: held}, "tokens", Reading())
    with pytest.raises(
        BadRow, match="cu_seqlens says that several rows are packed into one, which would see each other"
    ):
        parse({"input_ids": [1, 2], "cu_seqlens": [0, 1, 2]}, "tokens", Reading())
    assert parse({"input_ids": [1, 2], "length": 2, "weight": 1}, "tokens", Reading()).tokens == [1, 2]


def test_nested_keys_are_judged_by_their_name() -> None:
    reading = Reading({"prompt": "data.q", "completion": "data.a"})
    for name, held in (
        *{
            "label": False,
            "kto_tag": True,
            "margin": 0.5,
            "rejected": "x",
            "context": "c",
            "history": [["a", "b"]],
        }.items(),
        *{"input": "1", "split": "test", "documents": ["a"], "weight": 0, "images": ["a.jpg"], "cot": "Two."}.items(),
    ):
        row = {"data": {"q": "Hi", "a": "x", name: held}}
        text = refused(row, reading=reading)
        assert text.startswith(f"data.{name} ") and f"ignore: [data.{name}]" in text
        assert turns(row, reading=Reading(dict(reading.columns), ignored=frozenset({f"data.{name}"}))) == ["x"]


def test_thoughts_belong_to_answers() -> None:
    for key in ("reasoning", "thinking"):
        row = {"messages": [{**HI, key: "Why?"}, reply("x")]}
        text = refused(row)
        assert text == (
            f"messages[0].{key} is in a message of user, and thoughts belong to an answer; move it there, or write "
            f"ignore: [{key}]"
        )
        assert refused(row, reading=Reading({"reasoning_content": key})) == text
        assert turns(row, reading=Reading(ignored=frozenset({key}))) == ["x"]
        assert turns({"messages": [{**HI, key: "off"}, reply("x")]}) == ["x"]
    text = refused({"conversations": [{"from": "human", "value": "Hi", "reasoning": "Why?"}]})
    assert text.startswith("conversations[0].reasoning is in a message of user")


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
    assert turns({"messages": [HI, reply("x")], "reasoning": "on"}) == ["x"]
    row = {"prompt": "Hi", "completion": "x", "reasoning": "Off"}
    assert refused(row, template="qwen3") == "reasoning is 'Off', which is not a thought; write ignore: [reasoning]"
    assert turns(row, reading=Reading(ignored=frozenset({"reasoning"}))) == ["x"]
    assert turns({"messages": [HI, reply("x")], "reward_model": "some/model", "instruct_reward": 1.5}) == ["x"]


def test_thoughts_beside_lists_of_messages_are_refused() -> None:
    for name in ("reasoning", "thinking", "reasoning_content"):
        text = refused({"prompt": [HI], "completion": [reply("4")], name: "Two."})
        assert text.startswith(f"{name} conflicts with lists of messages; move it into the answer it belongs to")
    row = {"messages": [HI, reply("4")], "rationale": "Two."}
    assert "rationale contains thoughts" in refused(row, reading=Reading({"reasoning_content": "rationale"}))
    row = {"prompt": "Hi", "completion": "4", "rationale": "Two."}
    assert "write columns: {reasoning_content: rationale}" in refused(row)
    assert "Two." in turns(row, reading=Reading({"reasoning_content": "rationale"}), template="qwen3")[0]


def test_harmless_weights_are_accepted() -> None:
    for weight in (1, 1.0, True, "1", "70 kg"):
        assert parse({"text": "a", "weight": weight}, "text", Reading()).text == "a"


# Unread keys


def test_unread_keys_are_counted_by_name() -> None:
    seen = Seen()
    for number in range(3):
        row = {
            "messages": [{**HI, "id": number}, reply("x", weight=1, refusal=None)],
            "source": "web",
            "score": None,
            "note": [],
            "label": 1,
        }
        parse(row, "messages", Reading(ignored=frozenset({"label"})), seen)
    assert seen == {
        ("read", "column", "messages"): 3,
        ("read", "key", "role"): 6,
        ("read", "key", "content"): 6,
        ("read", "key", "weight"): 3,
        ("unread", "key", "id"): 3,
        ("unread", "column", "source"): 3,
        ("ignored", "column", "label"): 3,
    }


def test_unread_nested_keys_are_counted() -> None:
    seen = Seen()
    row = {"data": {"q": "Hi", "a": {"text": "Hello", "score": 1}, "id": 5}}
    parse(row, "prompt", Reading({"prompt": "data.q", "completion": "data.a.text"}), seen)
    unread = {name for status, _, name in seen if status == "unread"}
    assert unread == {"data.a.score", "data.id"}


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
