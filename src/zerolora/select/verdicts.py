"""The verdicts on sampled answers: by an evaluation task, or by the model of the section `judge`.

The judge rates one answer at a time, from 1 to 10, by MT-bench's prompt for single answers (arXiv 2306.05685). A rating
is kept in a work file and never asked for twice. Since ratings may cost money, they are asked for on request alone.
"""

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from zerolora.config.settings import SelectSettings
from zerolora.errors import UserError, shown
from zerolora.evaluate.tasks import task_of
from zerolora.evaluate.tasks.task import Judgement, Task
from zerolora.judge.asking import ask_all, judge_endpoint, most_of, price
from zerolora.judge.metrics import rating
from zerolora.judge.prompts import FILE, SINGLE, JudgeQuestion, JudgeRequest
from zerolora.judge.work_file import VERDICTS, WorkFile
from zerolora.select.asked_prompts import SampledPrompt
from zerolora.select.kept_answers import SampledAnswer, usable
from zerolora.units import counted

TEMPLATE = "single-v1"
"""The prompt of MT-bench for a single answer without a reference."""


def task_with_prompts(settings: SelectSettings, name: str, prompts: Sequence[SampledPrompt]) -> Task:
    """Return the task that checks the answers. Raises UserError if it judges no generated answer, or asks none of the
    prompts."""
    task = task_of(settings.check, settings.check_settings, settings.check_source)
    if task.ask != "generate":
        raise UserError(f"selections.{name}.check: {settings.check} checks no generated answer; choose another check")
    if not any(is_asked(task, prompt) for prompt in prompts):
        raise UserError(
            f"selections.{name}.check: {settings.check} asks none of the {counted(len(prompts), 'prompt')}; choose "
            "another check, or other samples"
        )
    return task


def is_asked(task: Task, prompt: SampledPrompt) -> bool:
    """Return whether a task checks the answers to a prompt: with an answer given that they can be compared with."""
    return bool(prompt.given) and task.asks(prompt.row)


def by_task(
    settings: SelectSettings, name: str, task: Task, prompt: SampledPrompt, answers: Sequence[SampledAnswer]
) -> list[SampledAnswer]:
    """Return the answers to a prompt with their verdicts: an answer is right if it is so by one of the answers given to
    the prompt, and its score is the highest by any. Raises UserError if the task has no such score, or says neither
    right nor wrong."""
    result = []
    for answer in answers:
        verdicts = [
            _verdict(settings, name, task.judge({**prompt.row, "expected": expected}, answer.text.strip()))
            for expected in prompt.given
        ]
        scores = [score for _, score in verdicts if score is not None]
        result.append(answer._replace(right=any(right for right, _ in verdicts), score=max(scores, default=None)))
    return result


def _verdict(settings: SelectSettings, name: str, verdict: Judgement) -> tuple[bool, float | None]:
    """Return whether an answer is right, and its score, None if it is no finite number."""
    right: Any = verdict.right
    score: Any = right
    if not isinstance(right, bool | np.bool_):
        raise UserError(
            f"selections.{name}.check: {settings.check} says that an answer is right with {shown(right)}, which is "
            "neither true nor false; correct the task"
        )
    if settings.score is not None:
        if settings.score not in verdict.scores:
            known = ", ".join(verdict.scores) or "none"
            raise UserError(
                f"selections.{name}.score: {shown(settings.score)} is no score of {settings.check}, which has "
                f"{known}; correct it, or remove score"
            )
        score = verdict.scores[settings.score]
    number = float(score) if isinstance(score, Real | np.bool_) and math.isfinite(score) else None
    if settings.least is not None:
        right = number is not None and number >= settings.least
    return bool(right), number


def by_judge(
    settings: SelectSettings,
    name: str,
    groups: Sequence[tuple[SampledPrompt, list[SampledAnswer]]],
    work: Path,
    environment: Mapping[str, str] | None,
) -> list[list[SampledAnswer]]:
    """Return the answers to each prompt with their ratings, from the file of finished requests in the directory `work`.

    With an `environment`, missing ratings are asked for first, within the price that the section `judge` allows;
    without one, a missing rating is a UserError, which says what the ratings may cost. Answers that cannot become rows
    are not rated, and count as wrong.
    """
    judge = settings.judge
    assert judge is not None, "check: judge comes with the settings of the judge"
    kept, asked = WorkFile(work / VERDICTS), {"endpoint": judge.endpoint, "model": judge.model}
    template = next(each for each in map(json.loads, FILE.read_text("utf-8").splitlines()) if each["name"] == TEMPLATE)
    keys: dict[tuple[int, int], str] = {}
    requests: dict[str, JudgeRequest] = {}
    for prompt, answers in groups:
        for answer in usable(settings, answers):
            request = _request(template, prompt.as_text, answer.text.strip())
            key = request.key(**asked, judge_tokens=judge.judge_tokens)
            keys[answer.row, answer.sample] = key
            requests[key] = request
    missing = [request for key, request in requests.items() if key not in kept.pieces]
    if missing and environment is None:
        most = price(*most_of(missing, judge), judge)
        cost = "an unknown price" if most is None else f"at most {most:,.4f}"
        raise UserError(
            f"selections.{name}: {len(missing):,} of {counted(len(requests), 'answer')} have no rating yet, "
            f"which may cost money ({cost}); `zerolora stage select {name} --ask-judge true` asks for them once"
        )
    if missing:
        assert environment is not None
        with judge_endpoint(judge, environment) as endpoint:
            ask_all(list(requests.values()), endpoint, judge, kept)
    return [[_rated(settings, each, keys, kept) for each in answers] for _, answers in groups]


def _rated(
    settings: SelectSettings, answer: SampledAnswer, keys: Mapping[tuple[int, int], str], kept: WorkFile
) -> SampledAnswer:
    key = keys.get((answer.row, answer.sample))
    score = rating(kept.pieces[key]["answer"]) if key else None
    right = None if settings.least is None else score is not None and score >= settings.least
    return answer._replace(right=right, score=score)


def _request(template: Mapping[str, str], question: str, answer: str) -> JudgeRequest:
    """Return the request for the rating of an answer; equal ones have one key, whatever sample they are of."""
    messages = [
        {"role": "system", "content": template["system_prompt"]},
        {"role": "user", "content": template["prompt_template"].format(question=question, answer=answer)},
    ]
    return JudgeRequest(JudgeQuestion("", "sampled", (question, ""), None), 1, SINGLE, (SINGLE,), TEMPLATE, messages)
