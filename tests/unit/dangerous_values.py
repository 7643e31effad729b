"""Kinds of values of a column that nothing reads, for tests of rows with such a column.

DANGEROUS are kinds with which training may be wrong if the column is ignored, HARMLESS kinds with which it is not.
"""

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """Values of one column: `usual(row)` in ordinary rows, `odd(row)` in the row where the value matters.

    Both depend on the row number only, and are JSON values. `usual` may be the same value in all rows.
    """

    name: str
    usual: Callable[[int], Any]
    odd: Callable[[int], Any]


def prompt(row: int) -> str:
    """Return the prompt of a row: the text of which the kind `copy of the prompt` is a copy."""
    return f"What is {row} plus {row + 1}?"


def answer(row: int) -> str:
    """Return the answer of a row, the chosen one of a pair."""
    return f"It is {2 * row + 1}."


def second_answer(row: int) -> str:
    """Return another answer of a row, the rejected one of a pair."""
    return f"I think that it is {2 * row + 3}."


def always(value: Any) -> Callable[[int], Any]:
    """Return a function that gives `value` for each row."""
    return lambda row: value


def in_turn(*values: Any) -> Callable[[int], Any]:
    """Return a function that gives the values in turn, row after row."""
    return lambda row: values[row % len(values)]


def number(row: int) -> str:
    """Return the id of a row."""
    return f"row-{row:05d}"


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
LONG_SYSTEM = " ".join(f"Rule {rule}: use whole sentences and no lists." for rule in range(1, 40))


def tools(*names: str) -> list[dict[str, Any]]:
    """Return definitions of tools with these names."""
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


JUDGED = [
    Kind("verdict as a boolean", always(True), always(False)),
    Kind("verdict as a number", always(1), always(0)),
    Kind("verdict as good or bad", always("good"), always("bad")),
    Kind("verdict as yes or no", always("yes"), always("no")),
    Kind("preferred letter", always("A"), always("B")),
    Kind("name of the winner", always("model_a"), always("model_b")),
    Kind("tie among winners", in_turn("model_a", "model_b"), always("tie (bothbad)")),
    Kind("rank", in_turn(1, 2, 3), always(4)),
    Kind("score as an integer", in_turn(4, 5, 3, 5), always(1)),
    Kind("score as a float", lambda row: round(0.8 + row % 7 / 50, 3), always(0.05)),
    Kind("score as text", in_turn("4.5", "5.0", "4.0"), always("1.0")),
    Kind("signed preference", in_turn(1, 2, 3), always(-3)),
    Kind("margin", lambda row: 0.5 + row % 5, always(-0.7)),
    Kind("review result", always("accepted"), always("rejected")),
    Kind("quality", in_turn("high", "medium"), always("low")),
    Kind("toxicity", lambda row: round(0.001 + row % 9 / 1000, 4), always(0.964)),
    Kind("spam", always("ham"), always("spam")),
    Kind("deleted", always(False), always(True)),
]
USE_OF_A_ROW = [
    Kind("weight", in_turn(1.0, 0.5), always(0.0)),
    Kind("loss mask", always([1, 1, 1, 1]), always([0, 0, 0, 1])),
    Kind("switch as text", always("true"), always("false")),
    Kind("split train or test", always("train"), always("test")),
    Kind("split validation", always("train_sft"), in_turn("val", "dev", "eval")),
    Kind("split held out", always("Training"), in_turn("heldout", "held-out")),
    Kind("is test", always(False), always(True)),
    Kind("fold", in_turn(0, 1, 2, 3), always(4)),
    Kind("class as an integer", in_turn(0, 1, 2), always(3)),
    Kind("class as text", in_turn("billing", "delivery", "refund"), always("complaint")),
    Kind("language of the answer", always("en"), always("fr")),
    Kind("do-not-train note", always(""), always("do not train on this row")),
    Kind("permission of the author", always("granted"), always("withdrawn")),
]
TEXTS = [
    Kind("target beside text", lambda row: f"The sum is {2 * row + 1}.", lambda row: f"Nobody knows {row}."),
    Kind("second answer", second_answer, lambda row: f"Ask {row} friends."),
    Kind("summary", lambda row: f"Adds two numbers, the first is {row}.", lambda row: f"Refuses to add {row}."),
    Kind("rationale", lambda row: f"{row} and one more than it.", lambda row: f"<think>Not {row}.</think>"),
    Kind("system prompt that varies", lambda row: f"You teach class {row}.", lambda row: f"You sell {row} cars."),
    Kind("short system prompt", always("Be brief."), always("Be rude.")),
    Kind("long system prompt", always(LONG_SYSTEM), always(LONG_SYSTEM.replace("no lists", "lists only"))),
    Kind("context passage", lambda row: f"In town {row} sums are taught.", lambda row: f"Town {row} bans sums."),
    Kind("corrected answer", answer, lambda row: f"It is {2 * row + 1}, of course."),
    Kind("instruction suffix", always(""), always("Answer in French.")),
    Kind("persona", always("a teacher"), always("a pirate")),
]
STRUCTURES = [
    Kind("history", always([]), lambda row: [["Hello.", f"Hello, number {row}."]]),
    Kind("choices", lambda row: [str(row), str(2 * row + 1)], lambda row: ["none of these", str(row)]),
    Kind("tools", always(tools("add")), always(tools("add", "delete_file"))),
    Kind("function as JSON text", always(json.dumps(tools("add")[0])), always(json.dumps(tools("delete_file")[0]))),
    Kind("template arguments", lambda row: {"name": "Ann", "age": row}, lambda row: {"name": "Ben", "age": row}),
    Kind(
        "struct of versions",
        lambda row: {"v1": answer(row), "v2": second_answer(row)},
        lambda row: {"v1": second_answer(row), "v2": answer(row)},
    ),
    Kind(
        "list of structs",
        lambda row: [{"text": answer(row), "good": True}],
        lambda row: [{"text": answer(row), "good": True}, {"text": second_answer(row), "good": False}],
    ),
    Kind("token ids", lambda row: [1, 300 + row, 2], lambda row: [1, 900 + row, 17, 2]),
    Kind("segment offsets", always([[0, 4]]), always([[5, 9]])),
]
MEDIA = [
    Kind("path of an image", lambda row: f"images/{row:04d}.png", lambda row: f"audio/{row:04d}.wav"),
    Kind("address of an image", lambda row: f"https://img.example.org/{row}.jpg", always("https://example.org/a.mp4")),
    Kind("bytes of an image", always({"bytes": PNG, "path": None}), lambda row: {"bytes": PNG, "path": f"{row}.png"}),
    Kind("data address", always(f"data:image/png;base64,{PNG}"), always("data:audio/wav;base64,UklGRgAAAABXQVZF")),
    Kind("list of images", lambda row: [f"{row}.png"], lambda row: [f"{row}.png", f"{row}-b.png"]),
]
REFERENCES = [
    Kind("parent row", always(None), lambda row: number(max(row - 1, 0))),
    Kind("duplicate of a row", always(None), always(number(0))),
    Kind("role of a message", always("assistant"), always("user")),
    Kind("name of another column", always("response_a"), always("response_b")),
    Kind("equal to one of several columns", answer, second_answer),
]
SETTINGS = [
    Kind("mode of thinking", always("no_think"), always("think")),
    Kind("temperature", always(0.7), always(1.9)),
    Kind("code language", always("python"), always("cobol")),
    Kind("number of turns to use", always(2), always(1)),
    Kind("start of the answer", always(0), always(17)),
]
DANGEROUS: list[Kind] = [*JUDGED, *USE_OF_A_ROW, *TEXTS, *STRUCTURES, *MEDIA, *REFERENCES, *SETTINGS]


def harmless(name: str, value: Callable[[int], Any]) -> Kind:
    """Return a kind without an odd row: the last row has a value of the same sort."""
    return Kind(name, value, value)


HARMLESS: list[Kind] = [
    harmless("unique id", number),
    harmless("unique number", lambda row: 104729 + 7919 * row),
    harmless("row number", lambda row: row),
    harmless("uuid", lambda row: str(uuid.uuid5(uuid.NAMESPACE_URL, str(row)))),
    harmless("digest of the prompt", lambda row: hashlib.sha256(prompt(row).encode()).hexdigest()),
    harmless("copy of the prompt", prompt),
    harmless("constant licence", always("cc-by-4.0")),
    harmless("constant source", always("handbook of sums")),
    harmless("constant version", always(3)),
    harmless("constant date", always("2024-05-01")),
    harmless("constant struct", always({"name": "sums", "release": "1.2"})),
    harmless("blank text", always("")),
    harmless("white space", always("  \n")),
    harmless("null", always(None)),
    harmless("empty list", always([])),
]
