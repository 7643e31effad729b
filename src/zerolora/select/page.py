"""The page of a selection: pass@k, coverage, what selection changed, and ten answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from zerolora.pages import environment
from zerolora.select.kept_answers import LEFT_OUT, SampledAnswer
from zerolora.select.selection_figures import EASY, PromptResult, changes, coverage, is_judged, pass_rates

SHOWN = 10
"""Answers on the page."""
WHY = {
    "not_ended": "not ended within max_new_tokens",
    "not_whole": "with a special token or a part of a character, which a text does not have",
    "blank": "without text",
    "too_long": "longer than max_answer_length",
    "without_score": "without a score that could be read",
    "not_mixed": "of prompts that are always or never right",
    "duplicates": "equal to an earlier one but for case, white space and punctuation",
    "beyond_most": "beyond the most rows of a prompt",
}
CHANGED = {
    "prompt_tokens": "tokens of a prompt",
    "answer_tokens": "tokens of an answer",
    "pass_rate": "share of right answers to the same prompt",
    "easy_share": f"share of easy prompts: more than {EASY:.0%} of the answers are right",
}
assert {*WHY} == {*LEFT_OUT}


class ShownAnswer(NamedTuple):
    """An answer on the page."""

    row: int
    sample: int
    question: str
    expected: str
    text: str
    verdict: str
    kept: str


def page_of(
    title: str, results: Sequence[PromptResult], left_out: Mapping[str, int], rule: str, held_out: Mapping[str, int]
) -> str:
    """Return the page. `rule`: when an answer is right, in a few words. `held_out`: by name of what runs are evaluated
    with, how many prompts are equal or near to a question of it."""
    judged = is_judged(results)
    template = environment(Path(__file__).parent).get_template("page.html")
    text: str = template.render(
        title=title,
        rule=rule,
        results=results,
        samples=len(results[0].answers),
        rows=sum(len(result.rows) for result in results),
        rates=pass_rates(results) if judged else {},
        groups=coverage(results, judged),
        changes={CHANGED[name]: values for name, values in changes(results, judged).items()},
        left_out={WHY[name]: left_out[name] for name in LEFT_OUT if left_out.get(name)},
        held_out=held_out,
        answers=[*_shown(results)],
    )
    return text


def _shown(results: Sequence[PromptResult]) -> list[ShownAnswer]:
    """Return answers at even distances in the order of prompts and samples."""
    flat = [(result, answer) for result in results for answer in result.answers]
    step = max(1, len(flat) / SHOWN)
    return [_answer(*flat[int(number * step)]) for number in range(min(SHOWN, len(flat)))]


def _answer(result: PromptResult, answer: SampledAnswer) -> ShownAnswer:
    question, given = str(result.prompt.row["question"]), " | ".join(result.prompt.given)
    kept = "no row"
    for each in result.rows:
        if answer in (each.answer, each.rejected):
            kept = "rejected in a pair" if answer == each.rejected else "chosen in a pair" if each.rejected else "a row"
    word = {True: "right", False: "wrong", None: "not judged"}[answer.right]
    score = f", score {answer.score:.3g}" if answer.score is not None else ""
    return ShownAnswer(
        answer.row,
        answer.sample,
        question,
        given,
        answer.text,
        f"{word}{score}",
        kept,
    )
