"""exact: the answer equals the row's output."""

from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample


def _judge(row: Row, answer: str) -> Judgement:
    return Judgement(format=bool(answer), right=answer == row["expected"].strip())


TASK = Task(
    name="exact",
    rule="it equals the row's output",
    judge=_judge,
    example=TaskExample(question="capital of France?", expected="Paris", right="Paris", wrong="paris"),
)
