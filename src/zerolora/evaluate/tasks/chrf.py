"""chrf: sacrebleu's chrF, of each answer and of all answers together."""

from zerolora.evaluate.tasks.bleu import corpus_of, judge_of
from zerolora.evaluate.tasks.task import Task, TaskExample

TASK = Task(
    name="chrf",
    rule="it equals the row's output; `chrf` is sacrebleu's score of all answers, from 0 to 100",
    judge=judge_of("chrf"),
    corpus=corpus_of("chrf"),
    example=TaskExample(question="Le chat?", expected="The cat sat there.", right="The cat sat there.", wrong="A dog."),
)
