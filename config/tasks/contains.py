"""The answer has the row's output in it, whatever is around it: an example of a task of your own (docs/tasks.md)."""

from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample


def judge(row: Row, answer: str) -> Judgement:
    """Judge an answer, whose surrounding white space has been removed."""
    return Judgement(format=bool(answer), right=row["expected"].strip().lower() in answer.lower())


TASK = Task(
    name="contains",
    rule="it has the row's output in it",
    judge=judge,
    example=TaskExample(question="Capital of France?", expected="Paris", right="It is Paris.", wrong="It is Rome."),
)
