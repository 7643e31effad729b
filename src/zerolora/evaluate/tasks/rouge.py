"""rouge: ROUGE-1, ROUGE-2 and ROUGE-L of a summary by google's rouge-score, with stemming."""

from functools import cache
from typing import Any

from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample

MEASURES = ("rouge1", "rouge2", "rougeL")


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(MEASURES, use_stemmer=True)


def _judge(row: Row, answer: str) -> Judgement:
    result = _scorer().score(row["expected"], answer)
    scores = {name: float(result[name].fmeasure) for name in MEASURES}
    return Judgement(format=bool(answer), right=answer == row["expected"].strip(), scores=scores)


TASK = Task(
    name="rouge",
    rule="it equals the row's output; `rouge1`, `rouge2`, `rougeL` are F-measures from 0 to 1",
    judge=_judge,
    example=TaskExample(question="Summarize.", expected="The cat sat.", right="The cat sat.", wrong="A dog ran."),
)
