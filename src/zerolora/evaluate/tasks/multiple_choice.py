"""multiple_choice: the right choice is the most likely one for the model, as in lm-evaluation-harness."""

from collections.abc import Callable, Sequence

from zerolora.evaluate.tasks.task import Judgement, Likelihood, Row, Task, TaskExample


def _judge(row: Row, answer: Sequence[Likelihood]) -> Judgement:
    def best(length: Callable[[str], int]) -> int:
        # The first of equal maxima, like numpy's argmax.
        return max(range(len(answer)), key=lambda number: answer[number].logarithm / length(answer[number].text))

    right = best(lambda text: 1) == row["expected"]
    scores = {
        "accuracy_norm": float(best(len) == row["expected"]),
        "accuracy_bytes": float(best(lambda text: len(text.encode())) == row["expected"]),
    }
    return Judgement(format=True, right=right, scores=scores)


TASK = Task(
    name="multiple_choice",
    rule="of the row's choices, the model holds the right one most likely; `accuracy_norm` divides the logarithm of "
    "its probability by its characters, `accuracy_bytes` by its bytes",
    judge=_judge,
    ask="choices",
    example=TaskExample(
        question="capital of France?",
        expected=1,
        right=[Likelihood("Rome", -3.0, 1), Likelihood("Paris", -2.0, 1)],
        wrong=[Likelihood("Rome", -1.0, 1), Likelihood("Paris", -2.0, 1)],
    ),
)
