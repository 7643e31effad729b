"""bleu: sacrebleu's BLEU of each answer, and of all answers together with a 95 % interval."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample

RESAMPLES = 1000


@cache
def _metric(kind: str, of_sentences: bool) -> Any:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    # For a sentence without a match of four words, BLEU is 0 unless it counts fewer (sacrebleu's advice).
    return CHRF() if kind == "chrf" else BLEU(effective_order=of_sentences)


def judge_of(kind: str) -> Callable[[Row, str], Judgement]:
    """Return the judge of a metric, `bleu` or `chrf`: sentence_<kind> of each answer, from 0 to 100."""

    def judge(row: Row, answer: str) -> Judgement:
        expected = row["expected"].strip()
        score = float(_metric(kind, True).sentence_score(answer, [expected]).score)
        return Judgement(bool(answer), answer == expected, {f"sentence_{kind}": score}, (answer, expected))

    return judge


def corpus_of(kind: str) -> Callable[[Sequence[Any]], Mapping[str, float]]:
    """Return the corpus metric: its value, and its 95 % interval over RESAMPLES resamples of the answers."""

    def corpus(pairs: Sequence[tuple[str, str]]) -> Mapping[str, float]:
        answers, expected = ([pair[number] for pair in pairs] for number in (0, 1))
        if len(pairs) == 1:  # nothing to resample
            value = float(_metric(kind, False).corpus_score(answers, [expected]).score)
            return {kind: value, f"{kind}_low": value, f"{kind}_high": value}
        result = _metric(kind, False).corpus_score(answers, [expected], n_bootstrap=RESAMPLES)
        middle, half = float(result._mean), float(result._ci)
        return {kind: float(result.score), f"{kind}_low": middle - half, f"{kind}_high": middle + half}

    return corpus


TASK = Task(
    name="bleu",
    rule="it equals the row's output; `bleu` is sacrebleu's score of all answers, from 0 to 100",
    judge=judge_of("bleu"),
    corpus=corpus_of("bleu"),
    example=TaskExample(question="Le chat?", expected="The cat sat there.", right="The cat sat there.", wrong="A dog."),
)
