"""Reads questions of two turns, in MT-bench's form: one JSON object a line."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.errors import UserError, shown

CATEGORY = re.compile(r"[a-z0-9][a-z0-9_-]*")
TURNS = 2


class JudgeQuestion(NamedTuple):
    """A question: what the user says first, and after the model's answer."""

    id: str
    category: str
    turns: tuple[str, str]
    reference: tuple[str, str] | None
    """Right answers to both turns; None if the file has none."""


def read_questions(path: Path) -> list[JudgeQuestion]:
    """Return the questions of a file, in its order.

    Raises UserError, with file and line, if a line is not a question or repeats an id, or if the file has none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028, which JSON allows in a text
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; write the path of one in judge.questions") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    questions: dict[str, JudgeQuestion] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        question = _question(f"{path}:{number}", line)
        if question.id in questions:
            raise UserError(f"{path}:{number}: question_id {shown(question.id)} occurs twice; write another one")
        questions[question.id] = question
    if not questions:
        raise UserError(f"{path}: has no question; write one a line, as in config/judge/questions.jsonl")
    return list(questions.values())


def _question(where: str, line: str) -> JudgeQuestion:
    try:
        value = json.loads(line)
        line.encode()
        json.dumps(value, ensure_ascii=False).encode()  # half a character, as in "\ud800", is in no file
    except (ValueError, RecursionError):
        raise UserError(f"{where}: {shown(line)} is not JSON; write one object a line") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: {shown(value)} is not an object; write question_id, category and turns")
    identity, category = value.get("question_id"), value.get("category")
    if isinstance(identity, bool) or not isinstance(identity, int | str) or identity == "":
        raise UserError(f"{where}: question_id: {shown(identity)} is not valid; write a number or a name")
    if not isinstance(category, str) or not CATEGORY.fullmatch(category):
        raise UserError(f"{where}: category: {shown(category)} is not valid; write a word in lower case, as in writing")
    turns = _texts(where, "turns", value.get("turns"))
    reference = value.get("reference")
    return JudgeQuestion(
        str(identity), category, turns, None if reference is None else _texts(where, "reference", reference)
    )


def _texts(where: str, key: str, value: Any) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != TURNS or not all(isinstance(each, str) and each for each in value):
        raise UserError(f"{where}: {key}: {shown(value)} is not valid; write a list of two texts, one for each turn")
    return value[0], value[1]
