"""bleu: sacrebleu's BLEU, of each answer and of all answers together."""

from zerolora.evaluate.tasks.corpus_scores import corpus_of, judge_of
from zerolora.evaluate.tasks.task import Task, TaskExample

TASK = Task(
    name="bleu",
    rule="it equals the row's output; `bleu` is sacrebleu's score of all answers, from 0 to 100",
    judge=judge_of("bleu"),
    corpus=corpus_of("bleu"),
    example=TaskExample(question="Le chat?", expected="The cat sat there.", right="The cat sat there.", wrong="A dog."),
)
