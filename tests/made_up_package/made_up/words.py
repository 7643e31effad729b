"""words: the answer has all words of the row's output, in any order."""

from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample


def _judge(row: Row, answer: str) -> Judgement:
    expected = set(row["expected"].lower().split())
    share = len(expected & set(answer.lower().split())) / max(len(expected), 1)
    return Judgement(format=bool(answer), right=share == 1, scores={"word_share": share})


TASK = Task(
    name="words",
    rule="it has all words of the row's output",
    judge=_judge,
    example=TaskExample(question="Who wrote it?", expected="Ada Lovelace", right="It was Ada Lovelace", wrong="Ada"),
)
