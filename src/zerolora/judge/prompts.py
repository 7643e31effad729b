"""Questions of two turns, and the judge's prompts: single grading, and comparisons in both orders, of each turn."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.errors import UserError, shown
from zerolora.files import canonical

CATEGORY = re.compile(r"[a-z0-9][a-z0-9_-]*")
TURNS = 2
BASE, TUNED = "base", "tuned"
MODELS = (BASE, TUNED)
SINGLE, PAIR = "single", "pair"
REFERENCE_CATEGORIES = ("math", "reasoning", "coding")
"""Categories whose answers are compared with a reference: NEED_REF_CATS of FastChat's llm_judge/common.py."""
FILE = Path(__file__).with_name("prompts.jsonl")

Answers = Mapping[str, Mapping[str, tuple[str, str]]]
"""By model and question id: the answers to both turns."""


class JudgeQuestion(NamedTuple):
    """A question: the user's first turn, and the one after the model's answer."""

    id: str
    category: str
    turns: tuple[str, str]
    reference: tuple[str, str] | None
    """Reference answers to both turns, if any."""


def read_questions(path: Path) -> list[JudgeQuestion]:
    """Return the questions of a file, in MT-bench's form: one JSON object a line.

    Raises UserError, with file and line, if a line is not a question or repeats an id, or if the file is empty.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028, which JSON allows in a text
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; give the path of one in judge.questions") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    questions: dict[str, JudgeQuestion] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        question = _question(f"{path}:{number}", line)
        if question.id in questions:
            raise UserError(f"{path}:{number}: question_id {shown(question.id)} occurs twice; give each its own")
        questions[question.id] = question
    if not questions:
        raise UserError(f"{path}: has no question; write one a line, as in config/judge/questions.jsonl")
    return list(questions.values())


def _question(where: str, line: str) -> JudgeQuestion:
    try:
        value = json.loads(line)
        line.encode()
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate, as in "\ud800", cannot be written to a file
    except (ValueError, RecursionError):
        raise UserError(f"{where}: {shown(line)} is not JSON; write one object a line") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: {shown(value)} is not an object; write question_id, category and turns")
    identity, category = value.get("question_id"), value.get("category")
    if isinstance(identity, bool) or not isinstance(identity, int | str) or identity == "":
        raise UserError(f"{where}: question_id: {shown(identity)} is not valid; use a number or a name")
    if not isinstance(category, str) or not CATEGORY.fullmatch(category):
        raise UserError(f"{where}: category: {shown(category)} is not valid; use a word in lower case, as in writing")
    turns = _texts(where, "turns", value.get("turns"))
    reference = value.get("reference")
    return JudgeQuestion(
        str(identity), category, turns, None if reference is None else _texts(where, "reference", reference)
    )


def _texts(where: str, key: str, value: Any) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != TURNS or not all(isinstance(each, str) and each for each in value):
        raise UserError(f"{where}: {key}: {shown(value)} is not valid; use a list of two texts, one for each turn")
    return value[0], value[1]


class JudgeRequest(NamedTuple):
    """One request to the judge."""

    question: JudgeQuestion
    turn: int
    """1 or 2."""
    kind: str
    """SINGLE or PAIR."""
    models: tuple[str, ...]
    """The judged models, in the order of their answers in the prompt: assistant A first."""
    prompt: str
    """Name of the prompt in prompts.jsonl."""
    messages: list[dict[str, str]]

    @property
    def role(self) -> str:
        """Unique among the requests of a question, turn and kind."""
        return self.models[0] if self.kind == SINGLE else f"{self.models[0]}_first"

    def key(self, **asked: Any) -> str:
        """Return a hash of the request and of `asked`, its other parameters: a verdict with the same key answers it."""
        what = [self.question.id, self.turn, self.kind, self.role, self.prompt, self.messages, asked]
        return hashlib.sha256(canonical(what).encode()).hexdigest()


def requests(questions: list[JudgeQuestion], answers: Answers) -> list[JudgeRequest]:
    """Return all requests, by question and turn: a grade for each model, and the comparison in both orders."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    prompts = {prompt["name"]: prompt for prompt in map(json.loads, lines)}
    orders = [(SINGLE, (BASE,)), (SINGLE, (TUNED,)), (PAIR, (BASE, TUNED)), (PAIR, (TUNED, BASE))]
    return [
        _request(prompts, question, turn, kind, models, answers)
        for question in questions
        for turn in range(1, TURNS + 1)
        for kind, models in orders
    ]


def _request(
    prompts: dict[str, Any], question: JudgeQuestion, turn: int, kind: str, models: tuple[str, ...], answers: Answers
) -> JudgeRequest:
    reference = question.reference if question.category in REFERENCE_CATEGORIES else None
    name = {SINGLE: ("single-v1", "single-math-v1"), PAIR: ("pair-v2", "pair-math-v1")}[kind][reference is not None]
    if turn == TURNS:
        name += "-multi-turn"
    prompt = prompts[name]
    # Field names of FastChat's prompts: answer_1 of a single answer, answer_a_1 of a pair.
    fields = {"question": question.turns[0], "question_1": question.turns[0], "question_2": question.turns[1]}
    for index, model in enumerate(models):
        head = "answer" if kind == SINGLE else f"answer_{'ab'[index]}"
        first, second = answers[model][question.id]
        fields |= {head: first, f"{head}_1": first, f"{head}_2": second}
    if reference:
        fields |= {"ref_answer_1": reference[0], "ref_answer_2": reference[1]}
    messages = [
        {"role": "system", "content": prompt["system_prompt"]},
        {"role": "user", "content": prompt["prompt_template"].format(**fields)},
    ]
    return JudgeRequest(question, turn, kind, models, name, messages)
