"""perplexity: by token, word and byte of the rows' texts, and bits per byte, as in lm-evaluation-harness."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zerolora.evaluate.tasks.task import Judgement, Likelihood, Row, Task, TaskExample


def _judge(row: Row, answer: Likelihood) -> Judgement:
    # re.split as in the harness: an empty text is one word.
    sizes = {"token": answer.tokens, "word": len(re.split(r"\s+", answer.text)), "byte": len(answer.text.encode())}
    return Judgement(format=True, right=False, material=(answer.logarithm, sizes))


def _corpus(rows: Sequence[tuple[float, dict[str, int]]]) -> Mapping[str, float]:
    total = sum(logarithm for logarithm, _ in rows)
    rates = {unit: -total / max(1, sum(sizes[unit] for _, sizes in rows)) for unit in ("token", "word", "byte")}
    # A double ends at exp(709).
    perplexities = {unit: math.exp(rate) if rate < 700 else math.inf for unit, rate in rates.items()}
    return {
        **{f"{unit}_perplexity": value for unit, value in perplexities.items()},
        "bits_per_byte": rates["byte"] / math.log(2),
    }


_EXAMPLE: Any = Likelihood("Paris is a city.", -12.0, 5)
TASK = Task(
    name="perplexity",
    rule="none is: it measures how likely the model holds the rows' texts",
    judge=_judge,
    ask="loss",
    corpus=_corpus,
    example=TaskExample(question="", expected="", right=_EXAMPLE, wrong=_EXAMPLE),
)
