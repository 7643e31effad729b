"""Rows of preference data: every form becomes the same pair, and what contradicts itself is refused."""

import copy
import json
import string
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import assume, given
from hypothesis import strategies as st
from test_row_meaning import ignoring, undecided

from zerolora.config.row_sections import Better
from zerolora.config.schema import Source
from zerolora.data.example import BadRow, Example
from zerolora.data.formats import FORMS, detect, parse
from zerolora.data.formats.judged_answers import transcript
from zerolora.data.formats.reading import Reading, Seen
from zerolora.data.source_files import SourceFiles, form_of, other_form
from zerolora.errors import UserError
from zerolora.types import RowKind

SYSTEM = {"role": "system", "content": "You add."}
USER = {"role": "user", "content": "Add 1 and 4."}
GOOD = {"role": "assistant", "content": "5"}
BAD = {"role": "assistant", "content": "6"}
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
FROM = {"user": "human", "assistant": "gpt", "system": "system"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 4}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def spoken(message: dict[str, Any]) -> dict[str, Any]:
    return {"from": FROM[message["role"]], "value": message["content"]}


def pair(row: dict[str, Any], reading: Reading | None = None) -> Example:
    reading = reading or Reading()
    assert detect(row, reading, "pairs") == "preference"
    return parse(row, "preference", reading, Seen())


def labelled(row: dict[str, Any], reading: Reading | None = None) -> Example:
    reading = reading or Reading()
    assert detect(row, reading, "labelled") == "labelled"
    return parse(row, "labelled", reading, Seen())


def refused(row: dict[str, Any], form: str = "preference", reading: Reading | None = None) -> str:
    with pytest.raises(BadRow) as caught:
        parse(row, form, reading or Reading())
    assert "\n" not in str(caught.value)
    return str(caught.value)


Q, TEXTS = USER["content"], {"chosen": "5", "rejected": "6"}
PLAIN = Example(messages=[USER, GOOD], rejected=[USER, BAD], prompt=1)
WITH_SYSTEM = Example(messages=[SYSTEM, USER, GOOD], rejected=[SYSTEM, USER, BAD], prompt=2)
LONGER = Example(messages=[*EARLIER, USER, GOOD], rejected=[*EARLIER, USER, BAD], prompt=3)
TALK = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Add 1 and 4.\n\nAssistant:"
PAIRS: dict[str, tuple[dict[str, Any], Example]] = {
    "TRL explicit, texts": ({"prompt": Q, **TEXTS}, PLAIN),
    "TRL explicit, messages": ({"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]}, WITH_SYSTEM),
    "TRL explicit, text and messages": ({"prompt": Q, "chosen": [GOOD], "rejected": [BAD]}, PLAIN),
    "TRL explicit, messages and texts": ({"prompt": [*EARLIER, USER], **TEXTS}, LONGER),
    "TRL implicit": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, PLAIN),
    "TRL implicit, several turns": (
        {"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]},
        LONGER,
    ),
    "TRL implicit, begins with an answer": (
        {"chosen": [EARLIER[1], USER, GOOD], "rejected": [EARLIER[1], USER, BAD]},
        Example(messages=[EARLIER[1], USER, GOOD], rejected=[EARLIER[1], USER, BAD], prompt=2),
    ),
    "hh-rlhf": ({"chosen": f"{TALK} 5", "rejected": f"{TALK} 6"}, LONGER),
    "hh-rlhf with the prompt of both": ({"prompt": TALK, "chosen": " 5", "rejected": " 6"}, Example(
        messages=[*EARLIER, USER, {**GOOD, "content": " 5"}], rejected=[*EARLIER, USER, {**BAD, "content": " 6"}],
        prompt=3,
    )),
    "ultrafeedback_binarized": (
        {
            "prompt": Q, "prompt_id": "f0e37e9f", "chosen": [USER, GOOD], "rejected": [USER, BAD],
            "messages": [USER, GOOD], "score_chosen": 8.0, "score_rejected": 6.5,
        },
        PLAIN,
    ),
    "orpo-dpo-mix": (
        {"source": "x", "chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD], "prompt": "Hi",
         "question": "Hi"},
        LONGER,
    ),
    "intel orca": ({"system": "You add.", "question": Q, **TEXTS}, WITH_SYSTEM),
    "intel orca, no system prompt": ({"system": "", "question": Q, **TEXTS}, PLAIN),
    "distilabel orca": (
        {"system": "You add.", "input": Q, **TEXTS, "rating": [9, 8], "status": "unchanged", "chosen_score": 9.0},
        WITH_SYSTEM,
    ),
    "argilla": (
        {"instruction": Q, "chosen_response": "5", "rejected_response": "6", "chosen_avg_rating": 5.0,
         "rejected_avg_rating": 2.0},
        PLAIN,
    ),
    "argilla dpo-mix": ({"dataset": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD],
                         "chosen_rating": 5, "rejected_rating": 3}, PLAIN),
    "axolotl chat_template.default": ({"messages": [SYSTEM, USER], "chosen": GOOD, "rejected": BAD}, WITH_SYSTEM),
    "nectar": (
        {
            "prompt": "\n\nHuman: Add 1 and 4.\n\nAssistant: ", "turns": 1, "num_responses": 3, "good_natured": True,
            "answers": [
                {"answer": "4", "model": "b", "rank": 2.0},
                {"answer": "6", "model": "c", "rank": 3.0},
                {"answer": "5", "model": "a", "rank": 1.0},
            ],
        },
        PLAIN,
    ),
    "LLaMA-Factory alpaca": (
        {"instruction": "Add", "input": "1 and 4.", **TEXTS, "system": "You add.", "history": [["Hi", "Hello"]]},
        Example(
            messages=[SYSTEM, *EARLIER, {**USER, "content": "Add\n1 and 4."}, GOOD],
            rejected=[SYSTEM, *EARLIER, {**USER, "content": "Add\n1 and 4."}, BAD], prompt=4, input="1 and 4.",
        ),
    ),
    "LLaMA-Factory sharegpt": (
        {
            "conversations": [spoken(each) for each in (*EARLIER, USER)], "chosen": spoken(GOOD),
            "rejected": spoken(BAD), "tools": "",
        },
        LONGER,
    ),
    "ms-swift": ({"messages": [*EARLIER, USER, GOOD], "rejected_response": "6"}, LONGER),
    "ms-swift, two conversations": (
        {"messages": [*EARLIER, USER, GOOD], "rejected_messages": [*EARLIER, USER, BAD]},
        LONGER,
    ),
    "messages that end with the chosen text": ({"messages": [USER, GOOD], **TEXTS}, PLAIN),
    "JSON in cells of CSV": (
        {"prompt": json.dumps([USER]), "chosen": json.dumps(GOOD), "rejected": json.dumps([BAD])},
        PLAIN,
    ),
    "an answer of several messages": (
        {
            "prompt": Q, "tools": [TOOL], "chosen": [CALLING, {"role": "tool", "content": "5"}, GOOD],
            "rejected": [CALLING, {"role": "tool", "content": "6"}, BAD],
        },
        Example(
            messages=[USER, CALLING, {"role": "tool", "content": "5"}, GOOD], tools=[TOOL], prompt=1,
            rejected=[USER, CALLING, {"role": "tool", "content": "6"}, BAD],
        ),
    ),
    "an answer that begins with a byte order mark": (
        {"prompt": [USER], "chosen": [{**GOOD, "content": "\ufeff5"}], "rejected": [BAD]},
        Example(messages=[USER, {**GOOD, "content": "\ufeff5"}], rejected=[USER, BAD], prompt=1),
    ),
    "cells of CSV that are empty": ({"prompt": Q, "chosen": "", "chosen_response": "5", "rejected": "6"}, PLAIN),
    "an answer that is JSON": (
        {"prompt": Q, "chosen": '{"role": "admin"}', "rejected": '{"role": "user"}'},
        Example(
            messages=[USER, {**GOOD, "content": '{"role": "admin"}'}],
            rejected=[USER, {**GOOD, "content": '{"role": "user"}'}], prompt=1,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_every_data_set(name: str) -> None:
    row, expected = PAIRS[name]
    assert pair(row) == expected


@pytest.mark.parametrize("name", PAIRS)
def test_every_field_of_a_pair_can_be_renamed(name: str) -> None:
    row, expected = PAIRS[name]
    columns = {field: f"my {field}" for field in FORMS["preference"].fields}
    renamed = {columns.get(field, field): held for field, held in row.items()}
    if name == "messages that end with the chosen text":
        assert "my chosen" in renamed
    assert pair(renamed, Reading(columns)) == expected


def test_orca_reads_the_columns_that_the_config_names() -> None:
    row = {"query": Q, "better": {"text": "5"}, "worse": "6"}
    reading = Reading({"prompt": "query", "chosen": "better.text", "rejected": "worse"})
    assert pair(row, reading) == PLAIN


KTO = Example(messages=[USER, GOOD], prompt=1, desirable=True)
LABELLED: dict[str, tuple[dict[str, Any], Example]] = {
    "TRL": ({"prompt": Q, "completion": "5", "label": True}, KTO),
    "TRL, messages": (
        {"prompt": [SYSTEM, USER], "completion": [BAD], "label": False},
        Example(messages=[SYSTEM, USER, BAD], prompt=2, desirable=False),
    ),
    "messages": (
        {"messages": [*EARLIER, USER, GOOD], "label": 1},
        Example(messages=[*EARLIER, USER, GOOD], prompt=3, desirable=True),
    ),
    "LLaMA-Factory alpaca": (
        {"instruction": "Add", "input": "1 and 4.", "output": "6", "kto_tag": False},
        Example(
            messages=[{**USER, "content": "Add\n1 and 4."}, BAD], prompt=1, input="1 and 4.", desirable=False,
        ),
    ),
    "LLaMA-Factory sharegpt": (
        {"conversations": [spoken(USER), spoken(GOOD)], "kto_tag": "true"},
        KTO,
    ),
    "LLaMA-Factory messages": ({"messages": [USER, GOOD], "kto_tag": "Desirable"}, KTO),
    "cells of CSV that are empty": ({"prompt": Q, "completion": "", "output": "5", "label": "", "kto_tag": "1"}, KTO),
    "intel orca": (
        {"system": "You add.", "question": Q, "completion": "6", "label": "undesirable"},
        Example(messages=[SYSTEM, USER, BAD], prompt=2, desirable=False),
    ),
    "argilla kto-mix": ({"completion": [USER, GOOD], "label": True, "rating": 5}, KTO),
    "with a reply that calls tools": (
        {"messages": [USER, CALLING, {"role": "tool", "content": "5"}, GOOD], "tools": [TOOL], "label": 0},
        Example(messages=[USER, CALLING, {"role": "tool", "content": "5"}, GOOD], tools=[TOOL], prompt=1,
                desirable=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_answers_of_every_data_set(name: str) -> None:
    row, expected = LABELLED[name]
    assert labelled(row) == expected
    columns = {field: f"my {field}" for field in FORMS["labelled"].fields}
    assert labelled({columns.get(field, field): held for field, held in row.items()}, Reading(columns)) == expected


CONTENT = st.text(string.printable, min_size=1, max_size=12).filter(str.strip)
ROLES = st.sampled_from(["user", "assistant"])


@st.composite
def _conversation(draw: st.DrawFn) -> list[dict[str, str]]:
    """Return messages that end with a question."""
    roles = [*draw(st.lists(ROLES, max_size=4)), "user"]
    return [{"role": role, "content": draw(CONTENT)} for role in roles]


@given(_conversation(), CONTENT, CONTENT)
def test_the_prompt_of_two_conversations_is_their_common_messages(
    prompt: list[dict[str, str]], good: str, bad: str
) -> None:
    """Never common characters: answers may begin alike, or continue each other."""
    assume(good.split() != bad.split())
    answers = [[*prompt, {"role": "assistant", "content": text}] for text in (good, bad)]
    assert pair({"chosen": answers[0], "rejected": answers[1]}) == Example(
        messages=answers[0], rejected=answers[1], prompt=len(prompt)
    )


@pytest.mark.parametrize(("good", "bad"), [("5", "5 or 6"), ("It is 5.", "It is 6."), ("A", "AB")])
def test_answers_may_begin_alike(good: str, bad: str) -> None:
    """The first characters of answers do not become part of the prompt."""
    example = pair({"chosen": f"{TALK} {good}", "rejected": f"{TALK} {bad}"})
    assert example.messages is not None and example.rejected is not None and example.prompt == 3
    assert (example.messages[3:], example.rejected[3:]) == (
        [{"role": "assistant", "content": good}],
        [{"role": "assistant", "content": bad}],
    )


SPEECH = CONTENT.filter(lambda text: not any(who in f"\n\n{text}\n\n" for who in ("\n\nHuman:", "\n\nAssistant:")))


@given(st.lists(st.tuples(ROLES, SPEECH), max_size=5), SPEECH)
def test_transcripts_are_read_turn_by_turn(turns: list[tuple[str, str]], first: str) -> None:
    turns = [("user", first), *turns]
    assume(not any(text.endswith("\n") or text.startswith("\n") for _, text in turns))
    text = "".join(f"\n\n{'Human' if role == 'user' else 'Assistant'}: {content}" for role, content in turns)
    assert [(turn.message["role"], turn.message["content"]) for turn in transcript(text, "chosen")] == turns


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": Q, "chosen": "5", "rejected": "5"}, "chosen and rejected are equal; remove the row"),
    ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "chosen and rejected are equal; remove the row"),
    ({"prompt": Q, "chosen": "a b", "rejected": "a  b\n"}, "chosen and rejected differ only in white space"),
    ({"chosen": [USER, GOOD], "rejected": [USER, {**GOOD, "content": "5 "}]}, "chosen and rejected differ only in"),
    ({"prompt": Q, "chosen": "5", "rejected": "\ufeff5\u200b"}, "chosen and rejected differ only in white space"),
    ({"prompt": Q, "chosen": "\u00a0\u3000", "rejected": "6"}, "chosen is empty"),
    ({"prompt": Q, "chosen": "\u200b \ufeff", "rejected": "6"}, "chosen is empty"),
    ({"chosen": [USER, GOOD], "rejected": [USER, {**BAD, "content": " \u200b"}]}, "rejected[1].content is empty"),
    ({"prompt": Q, "chosen": " ", "rejected": "6"}, "chosen is empty; fill it in or remove the row"),
    ({"prompt": Q, "chosen": "5", "rejected": ""}, "rejected is empty"),
    ({"prompt": Q, "chosen": [], "rejected": [BAD]}, "chosen is empty"),
    ({"chosen": [USER, {**GOOD, "content": ""}], "rejected": [USER, BAD]}, "chosen[1].content is empty"),
    ({"chosen": [USER], "rejected": [USER, BAD]}, "chosen has no answer behind the prompt"),
    ({"chosen": f"{TALK} 5", "rejected": TALK}, "rejected has no answer behind the prompt"),
    ({"prompt": Q, "chosen": "5"}, "rejected is missing"),
    ({"prompt": Q, "chosen": "5", "rejected": None}, "rejected is missing"),
    ({"prompt": Q, "chosen": 5, "rejected": "6"}, "chosen is 5; use a text"),
    (
        {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "Add 2."}, BAD]},
        "chosen and rejected begin with different messages, so they answer different prompts",
    ),
    (
        {"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, {**USER, "content": "Add 2."}, BAD]},
        "chosen has a message of the user in its answer, so it answers another prompt",
    ),
    ({"prompt": "Add 2.", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt is not the prompt that chosen and"),
    ({"prompt": [USER], "chosen": [*EARLIER, GOOD], "rejected": [BAD]}, "chosen does not begin with the prompt"),
    ({"prompt": Q, "chosen": [GOOD, USER], "rejected": [BAD]}, "chosen has a message of the user in its answer"),
    (
        {"prompt": Q, "chosen": [CALLING, {"role": "tool", "content": "5"}], "rejected": "6", "tools": [TOOL]},
        "chosen ends with a message of tool",
    ),
    ({"chosen": "It is 5.", "rejected": "It is 6."}, "chosen is a text, and the row has no prompt"),
    ({"prompt": "", **TEXTS}, "prompt is empty; fill it in or remove the row"),
    ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, "prompt is empty; fill it in"),
    ({"chosen": [GOOD], "rejected": [BAD]}, "chosen has an answer without a prompt; set columns: {prompt: ...}"),
    ({"prompt": EARLIER, "chosen": "5", "rejected": "6"}, "the prompt of chosen ends with an answer"),
    ({"prompt": Q, **TEXTS, "score_chosen": 6, "score_rejected": 8.5}, "score_rejected is 8.5, more than score_chosen"),
    ({"prompt": Q, **TEXTS, "chosen_rating": 1, "rejected_rating": 5}, "rejected_rating is 5, more than chosen_rating"),
    (
        {"prompt": Q, "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, {**GOOD, "content": "7"}]},
        "messages ends with an answer that is not chosen",
    ),
    ({"prompt": "Add 2.", "messages": [USER], **TEXTS}, "prompt is not in messages; keep one of them"),
    ({"prompt": "a", "question": "b", **TEXTS}, "prompt and question are two questions; keep one"),
    ({"prompt": Q, "input": "1 and 4", **TEXTS}, "input is '1 and 4', and the prompt and the answers are read from"),
    ({"prompt": Q, **TEXTS, "chosen_response": "5"}, "chosen and chosen_response are two answers of one kind"),
    ({"messages": [USER], "conversations": [USER], **TEXTS}, "messages and conversations are two conversations"),
    (
        {"prompt": "Write a long poem.", "chosen": "Write a long poem. A", "rejected": "Write a long poem. B"},
        "chosen and rejected begin with the prompt, which would be read twice",
    ),
    ({"prompt": Q, "chosen": [{**GOOD, "weight": 0}], "rejected": [BAD]}, "chosen has weights of turns"),
    ({"prompt": Q, "chosen": "[{'role': 'user', 'content': 'x'}]", "rejected": "6"}, "chosen is "),
    ({"prompt": Q, "answers": [{"answer": "5", "rank": 1}, {"answer": "6", "rank": 1}]}, "answers have the ranks"),
    (
        {"prompt": Q, "answers": [{"answer": "5", "rank": None}]},
        "answers[0].rank is None; give its rank, 1 = the best",
    ),
    (
        {"prompt": Q, "answers": [{"answer": "5", "rank": 1}, {"answer": "6", "rank": float("nan")}]},
        "answers[1].rank is nan; give its rank, 1 = the best",
    ),
    ({"system": "You subtract.", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, "system and the"),
    ({"chosen": "\n\nHuman: ", "rejected": "\n\nHuman: "}, "chosen is empty"),
]


@pytest.mark.parametrize(("row", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_pairs_that_contradict_themselves_are_refused(row: dict[str, Any], message: str) -> None:
    assert refused(row).startswith(message)


@pytest.mark.parametrize("key", ["input", "score_chosen"])
def test_a_refused_column_can_be_ignored(key: str) -> None:
    row = {"prompt": Q, **TEXTS, "score_rejected": 9, "score_chosen": 9, key: "x" if key == "input" else 0}
    assert f"ignore: [{key}" in refused(row)
    assert pair(row, ignoring(key)) == PLAIN


UNREAD: dict[str, tuple[Any, Any]] = {
    **{"margin": (0.5, 1), "label": (0, 1), "weight": (0.5, 1), "images": (["a.png"], ["b.png"])},
    **{"reasoning": ("One and four.", "Five."), "overall_preference": (-2, 1), "winner": ("model_a", "model_b")},
    **{"score_0": (0.5, 1), "best_answer": ("5", "6"), "chosen_model": ("a", "b"), "rating": ([5, 3], [5, 4])},
}


@pytest.mark.parametrize("key", UNREAD)
@pytest.mark.parametrize(
    ("form", "row"), [("preference", {"prompt": Q, **TEXTS}), ("labelled", {"messages": [USER, GOOD], "kto_tag": 1})]
)
def test_columns_that_no_judged_row_reads_are_undecided(form: str, row: dict[str, Any], key: str) -> None:
    """Any of them may say which answer is better."""
    row, (one, other) = {name: held for name, held in row.items() if name != key}, UNREAD[key]
    if key in FORMS[form].fields:
        return
    (line,) = undecided({**row, key: one}, {**row, key: other}, form=form)
    assert f": {key} is " in line and f"ignore: [{key}]" in line
    assert f"order the pairs by better: {{column: {key}, ...}}" in line or form == "labelled" or isinstance(one, list)
    assert undecided({**row, key: one}, {**row, key: other}, form=form, reading=ignoring(key)) == []
    assert parse({**row, key: one}, form, ignoring(key)) == parse(row, form, Reading())


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": Q, **TEXTS, "score_chosen": 8, "score_rejected": 6.5}, {}),
        ({"prompt": Q, **TEXTS, "chosen_avg_rating": "5.0", "rejected_avg_rating": "2.0"}, {}),
        (
            {"prompt": Q, "response_a": "5", "response_b": "6", "rating_a": 5, "rating_b": 5},
            {"chosen": "response_a", "rejected": "response_b"},
        ),
    ],
    ids=str,
)
def test_scores_of_both_answers_are_read(row: dict[str, Any], columns: dict[str, str]) -> None:
    better, worse = (name for name in row if "score" in name or "rating" in name)
    other = {**row, better: 9}
    assert undecided(row, other, form="preference", reading=Reading(columns)) == []
    swapped = {**row, worse: 10}
    assert refused(swapped, reading=Reading(columns)).startswith(f"{worse} is 10, more than {better} with ")
    assert pair(swapped, ignoring(better, worse, **columns)) == PLAIN
    del other[worse]
    (line,) = undecided(other, {**other, better: 8}, form="preference", reading=Reading(columns))
    assert f": {better} is " in line


REFUSED_LABELS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": Q, "completion": "5"}, "label is missing"),
    ({"prompt": Q, "completion": "5", "label": None}, "label is missing"),
    ({"prompt": Q, "completion": "5", "label": "maybe"}, "label is 'maybe'; use true (1, desirable) or false"),
    ({"prompt": Q, "completion": "5", "label": 0.5}, "label is 0.5; use true"),
    ({"prompt": Q, "completion": "5", "label": -1}, "label is -1; use true"),
    ({"prompt": Q, "completion": "5", "label": True, "kto_tag": False}, "label and kto_tag contradict each other"),
    ({"prompt": Q, "completion": " ", "label": True}, "completion is empty"),
    ({"completion": "5", "label": True}, "completion has an answer without a prompt"),
    ({"prompt": Q, "label": True}, "completion is missing"),
    ({"prompt": " ", "completion": "5", "label": True}, "prompt is empty; fill it in or remove the row"),
    ({"prompt": Q, "completion": "5", "label": ""}, "label is ''; use true (1, desirable)"),
    ({"messages": [USER, GOOD, USER], "label": True}, "messages has no answer behind the prompt"),
    ({"prompt": "Add 2.", "completion": [USER, GOOD], "label": True}, "prompt is not the prompt that completion"),
    (
        {"prompt": Q, "completion": "5", "output": "6", "label": True},
        "completion and output are two answers of one kind",
    ),
]


@pytest.mark.parametrize(("row", "message"), REFUSED_LABELS, ids=[message for _, message in REFUSED_LABELS])
def test_labelled_answers_that_contradict_themselves_are_refused(row: dict[str, Any], message: str) -> None:
    assert refused(row, "labelled").startswith(message)


WORDS = [
    "user",
    "assistant",
    "text",
    "[1]",
    "{}",
    "\ud800",
    "",
    " ",
    "\n\nHuman: x",
    "\n\nHuman:",
    '[{"role": "user"}]',
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.sampled_from(WORDS) | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "answer", "rank", "tool_calls"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@st.composite
def _spoilt(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return a row of a data set with a random value in a random position."""
    form, rows = draw(st.sampled_from([("preference", PAIRS), ("labelled", LABELLED)]))
    row = copy.deepcopy(draw(st.sampled_from(list(rows.values())))[0])
    inside: Any = row
    while True:
        key = draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
        if not (isinstance(inside[key], dict | list) and inside[key] and draw(st.booleans())):
            inside[key] = draw(VALUES)
            return form, row
        inside = inside[key]


@given(_spoilt())
def test_any_judged_row_is_parsed_or_bad(case: tuple[str, dict[str, Any]]) -> None:
    form, row = case
    try:
        detect(row, Reading(), FORMS[form].rows)
        example = parse(row, form, Reading())
    except BadRow as error:
        assert "\n" not in str(error)
        str(error).encode()
        return
    both = [example.messages, *([example.rejected] if form == "preference" else ())]
    for messages in both:
        assert messages is not None and messages[-1]["role"] == "assistant"
        assert messages[: example.prompt] == both[0][: example.prompt]
        assert 0 < example.prompt < len(messages)
        assert "user" not in [message["role"] for message in messages[example.prompt :]]
    assert (example.desirable is None) == (form == "preference")


# Rows of another kind


@pytest.mark.parametrize(
    ("rows", "row", "message"),
    [
        ("texts", {"prompt": Q, **TEXTS}, "set train.objective: dpo, or format: prompt, columns: {comp"),
        ("texts", {"prompt": Q, "answers": [{"answer": "5", "rank": 1}]}, "set train.objective: dpo, or format: pro"),
        (
            "texts",
            {"completion": [USER, GOOD], "label": True},
            "set train.objective: kto, or format: prompt and ignore: [label]",
        ),
        ("pairs", {"prompt": Q, "completion": "5"}, "of the form prompt, which has texts to learn"),
        ("pairs", {"prompt": Q, "completion": "5", "label": True}, "set train.objective: kto"),
        ("labelled", {"prompt": Q, **TEXTS}, "set train.objective: dpo"),
        ("labelled", {"text": "x"}, "set train.objective: sft"),
        ("labelled", {"a": "x"}, "columns: {prompt: question, completion: answer, label: good}"),
        ("pairs", {"prompt": Q, "chosen": "5"}, "columns: {prompt: question, chosen: better, rejected: worse}"),
    ],
)
def test_rows_of_another_kind_are_refused_with_the_remedy(rows: RowKind, row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow) as caught:
        detect(row, Reading(), rows)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_sft_on_judged_rows_is_undecided() -> None:
    """Of which another column is a conversation, or a question and its answer."""
    row = {"prompt": Q, "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD]}
    rows = [{**row, "prompt_id": number} for number in (1, 2)]
    assert detect(row, Reading()) == "messages"
    lines = undecided(*rows)
    leaves = [line.split(" is ")[0].partition(":1: ")[2] or line for line in lines]
    assert leaves[:2] == ["chosen", "rejected"] and lines[2].startswith("rows.jsonl:2: prompt_id is 2, 1 in rows.jsonl")
    assert lines[3].endswith("; to leave out all of them: ignore: [chosen, rejected, prompt_id]")
    assert undecided(*rows, reading=ignoring("chosen", "rejected", "prompt_id")) == []
    labels = [{"prompt": Q, "completion": "5", "label": label} for label in (True, False)]
    (line,) = undecided(*labels)
    assert line.startswith("rows.jsonl:2: label is False, True in rows.jsonl:1, and nothing reads it")
    assert "keep some rows by where: {label: [false]}" in line


@pytest.mark.parametrize(
    ("column", "values"),
    [
        *(("better_response_id", (0, 1)), ("safer_response_id", (1, 0)), ("winner", ("model_a", "model_b"))),
        *(("winner_model_a", (1, 0)), ("preference", (2, -1)), ("which", ("b", "tie"))),
    ],
)
def test_answers_whose_order_another_column_says_are_undecided(column: str, values: tuple[Any, Any]) -> None:
    """Naming the two columns as chosen and rejected would exchange the answers of some rows."""
    rows = [{"prompt": Q, "response_0": "5", "response_1": "6", column: value} for value in values]
    with pytest.raises(BadRow, match="columns: {prompt: question, chosen: better, rejected: worse}"):
        detect(rows[0], Reading(), "pairs")
    mapped = {"chosen": "response_0", "rejected": "response_1"}
    (line,) = undecided(*rows, form="preference", reading=Reading(mapped))
    assert line.startswith(f"rows.jsonl:2: {column} is {values[1]!r}, {values[0]!r} in rows.jsonl:1, and nothing reads")
    assert f"order the pairs by better: {{column: {column}, ...}}" in line
    better = Better(column=column, first=[values[0]], second=[values[1]])
    assert undecided(*rows, form="preference", reading=Reading(mapped, better=better)) == []


def test_answers_under_other_names_are_named() -> None:
    row = {"prompt": Q, "preferred": "It is 5.", "dispreferred": "It is 6."}
    with pytest.raises(
        BadRow, match=r"\(prompt, preferred, dispreferred\) fit none .* columns: {prompt: question, cho"
    ):
        detect(row, Reading(), "pairs")


@pytest.mark.parametrize("name", ["prompt", "question", "instruction"])
def test_chosen_conversations_are_learnt_with_their_question(name: str) -> None:
    """One beside an answer alone would be lost in the form messages; the form prompt reads both."""
    question = {**USER, "content": "Add one and four, and then two."}
    reading = ignoring("rejected", messages="chosen")
    whole = {name: question["content"], "chosen": [question, GOOD], "rejected": [question, BAD]}
    assert parse(whole, "messages", reading) == Example(messages=[question, GOOD])
    assert undecided(whole, form="messages", reading=reading) == []  # the question is part of the conversation
    alone = {name: [question], "chosen": [GOOD], "rejected": [BAD]}
    for row in (alone, {**alone, name: question["content"]}):
        (line,) = undecided(row, form="messages", reading=reading)
        assert line.startswith(f"rows.jsonl:1: {name} is ") and f"as in {{FIELD: {name}}}" in line
    reading = ignoring("rejected", prompt=name, completion="chosen")
    assert parse(alone, "prompt", reading) == Example(messages=[question, GOOD], prompt=1)
    assert undecided(alone, form="prompt", reading=reading) == []


def test_detection_reads_only_forms_of_the_objective(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": Q, **TEXTS}) + "\n")
    source = SourceFiles("rows.jsonl", [file], Source(), file)
    assert form_of(source, tmp_path, "pairs") == ("preference", f"{file}:1")
    with pytest.raises(UserError, match="set train.objective: dpo"):
        form_of(source, tmp_path, "labelled")
    named = source._replace(settings=Source(format="preference"))
    assert form_of(named, tmp_path, "pairs") == ("preference", "")
    with pytest.raises(UserError) as caught:
        form_of(named, tmp_path)
    assert str(caught.value) == (
        "prepare: format of rows.jsonl is preference, which has pairs of answers, for train.objective: dpo, ipo, simpo "
        "or orpo, but the runs of this data set read texts to learn, for train.objective: sft or distill; set "
        "train.objective: dpo, or format: prompt, columns: {completion: chosen} and ignore: [rejected] to learn the "
        "chosen answers (of conversations format: messages and columns: {messages: chosen})"
    )
    with pytest.raises(UserError, match=r"^prepare: format of rows.jsonl is prompt, which has texts.*objective: sft"):
        form_of(source._replace(settings=Source(format="prompt")), tmp_path, "pairs")
    assert other_form({"prompt": Q, **TEXTS}, "other", Reading(), "pairs") == "preference"
    assert other_form({"prompt": Q, **TEXTS}, "prompt", Reading()) == ""


def test_the_docs_name_every_data_set_that_is_read() -> None:
    text = (ROOT / "docs/data.md").read_text().split("\n### Preference data\n")[1].split("\n## ")[0]
    for field in (*FORMS["preference"].fields, *FORMS["labelled"].fields):
        assert f"`{field}`" in text, field
