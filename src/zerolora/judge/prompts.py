"""What the judge is asked: single grading and comparisons in both orders, for each question and turn."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.files import canonical
from zerolora.judge.questions import TURNS, JudgeQuestion

BASE, TUNED = "base", "tuned"
MODELS = (BASE, TUNED)
SINGLE, PAIR = "single", "pair"
REFERENCE_CATEGORIES = ("math", "reasoning", "coding")
"""Categories whose answers are compared with a reference: NEED_REF_CATS of FastChat's llm_judge/common.py."""
FILE = Path(__file__).with_name("prompts.jsonl")

Answers = Mapping[str, Mapping[str, tuple[str, str]]]
"""By model and question id: the answers to both turns."""


class JudgeRequest(NamedTuple):
    """One request to the judge."""

    question: JudgeQuestion
    turn: int
    """1 or 2."""
    kind: str
    """SINGLE or PAIR."""
    models: tuple[str, ...]
    """The models that are judged, in the order in which the judge sees their answers: assistant A first."""
    prompt: str
    """Name of the prompt in prompts.jsonl."""
    messages: list[dict[str, str]]

    @property
    def role(self) -> str:
        """Return what tells the request from others of its question, turn and kind."""
        return self.models[0] if self.kind == SINGLE else f"{self.models[0]}_first"

    def key(self, **asked: Any) -> str:
        """Return a hash of the request and of how it is asked: a verdict with the same key answers it."""
        what = [self.question.id, self.turn, self.kind, self.role, self.prompt, self.messages, asked]
        return hashlib.sha256(canonical(what).encode()).hexdigest()


def requests(questions: list[JudgeQuestion], answers: Answers) -> list[JudgeRequest]:
    """Return all requests, by question and turn: a grade for each model, and the comparison in both orders."""
    prompts = _prompts()
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
    # The names of the fields are those of FastChat's prompts: answer_1 of a single answer, answer_a_1 of a pair.
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


def _prompts() -> dict[str, Any]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return {prompt["name"]: prompt for prompt in map(json.loads, lines)}
