"""sum: the reference task, with a fixed prefix and two numbers that sum to the question's as the answer."""

import re

from zerolora.data.reference import PREFIX
from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample

_ANSWER = re.compile(re.escape(PREFIX) + r"(\d+) \+ (\d+)")


def _judge(row: Row, answer: str) -> Judgement:
    match = _ANSWER.fullmatch(answer)
    asked = row["question"].rstrip("=")
    right = match is not None and asked.isdecimal() and int(match[1]) + int(match[2]) == int(asked)
    return Judgement(format=bool(match), right=right)


TASK = Task(
    name="sum",
    rule="it names two numbers that sum to the number of the question, in the reference task's form",
    judge=_judge,
    example=TaskExample(question="5=", expected="", right=f"{PREFIX}1 + 4", wrong=f"{PREFIX}1 + 5"),
)
