"""f1: SQuAD's exact match and F1 of words, after its normalization (arXiv 1606.05250, evaluate-v1.1.py)."""

import re
import string
from collections import Counter

from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated white space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def word_f1(answer: str, expected: str) -> float:
    """Return the harmonic mean of precision and recall of the answer's words, each counted as often as it occurs."""
    given, wanted = normalized(answer).split(), normalized(expected).split()
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def _judge(row: Row, answer: str) -> Judgement:
    right = normalized(answer) == normalized(row["expected"])
    return Judgement(format=bool(answer), right=right, scores={"f1": word_f1(answer, row["expected"])})


TASK = Task(
    name="f1",
    rule="it equals the row's output without case, punctuation and articles; `f1` is the overlap of their words",
    judge=_judge,
    example=TaskExample(
        question="Who wrote it?",
        expected="The Countess of Lovelace",
        right="countess of Lovelace.",
        wrong="the Countess",
    ),
)
