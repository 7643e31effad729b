"""Judge a run by MT-bench's protocol (arXiv 2306.05685): base and tuned model answer, and another model compares them.

    zerolora stage judge RUN

Writes judge.json (metrics), answers.jsonl (both turns of both models) and verdicts.jsonl (every request, with prompt,
answer, tokens and verdict). Runs only on request, since the endpoint may cost money.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.config.settings import JudgeSettings
from zerolora.errors import UserError
from zerolora.files import canonical, sha256, staged_directory, write_json, write_text
from zerolora.judge.answers import Contender, answer_all
from zerolora.judge.asking import ask_all, check, judge_endpoint, most_of, price
from zerolora.judge.metrics import metrics, read
from zerolora.judge.prompts import BASE, MODELS, TUNED, Answers, JudgeQuestion, read_questions, requests
from zerolora.judge.work_file import WorkFile
from zerolora.log import LOGGER, result
from zerolora.model.manifest import check_same_base, is_merged, located
from zerolora.types import Device
from zerolora.units import counted

ANSWERS, VERDICTS = "answers.jsonl", "verdicts.jsonl"


def judge(
    settings: JudgeSettings,
    data: Path,
    base: Path,
    tuned: Path,
    adapter: Path | None,
    work: Path,
    output: Path,
    environment: Mapping[str, str],
    device: Device = "cpu",
) -> None:
    """Judge the merged model of the manifest `tuned` against the model of the stamp `base`, both answering on `device`.

    If the manifest has no merged weights, the tuned model is the base model with `adapter`. A killed command resumes
    from the answers and verdicts in directory `work`. Raises UserError if the endpoint is not set, cannot be reached or
    refuses, if a question is invalid, or if the price would exceed `max_price`.
    """
    with judge_endpoint(settings, environment) as endpoint:
        questions = read_questions(Path(settings.questions))
        unanswered = {model: {question.id: ("", "") for question in questions} for model in MODELS}
        # Before the slow generation of answers: a lower bound of the price, with empty answers.
        check((0, 0), most_of(requests(questions, unanswered), settings), settings, "judging even empty answers")
        if is_merged(tuned):
            adapter, weights = None, located(tuned)
        elif adapter is not None:
            check_same_base(adapter, base)
            weights = located(base)
        else:
            raise UserError(f"{tuned}: names no merged weights; add --adapter, the directory of the run's adapter")
        files = sorted(adapter.glob("adapter*")) if adapter else []
        contenders = [
            Contender(BASE, located(base), None, sha256(base), device),
            Contender(TUNED, weights, adapter, sha256(tuned) + "".join(map(sha256, files)), device),
        ]
        answers = answer_all(questions, contenders, data, settings.max_new_tokens, WorkFile(work / ANSWERS))
        records = ask_all(requests(questions, answers), endpoint, settings, WorkFile(work / VERDICTS))
    publish(settings, questions, answers, records, output)


def publish(
    settings: JudgeSettings,
    questions: list[JudgeQuestion],
    answers: Answers,
    records: list[dict[str, Any]],
    output: Path,
) -> None:
    """Write metrics, answers and verdicts to directory `output`, and report scores and price."""
    values = metrics(records, settings.seed)
    spent = price(int(values["prompt_tokens"] or 0), int(values["completion_tokens"] or 0), settings)
    answered = [
        {
            "question_id": question.id,
            "category": question.category,
            "turns": question.turns,
            **{model: answers[model][question.id] for model in MODELS},
        }
        for question in questions
    ]
    with staged_directory(output) as directory:
        write_json(directory / "judge.json", {**values, "price": spent})
        judged = [{**record, "verdict": read(record)} for record in records]
        for name, lines in ((ANSWERS, answered), (VERDICTS, judged)):
            write_text(directory / name, "".join(f"{canonical(line)}\n" for line in lines))
    if values["unparsable"]:
        LOGGER.warning(
            "judge: %d of %d verdicts could not be read and are left out", values["unparsable"], len(records)
        )
    rates = ", ".join(f"{name} {_shown(values[f'{name}_rate'])}" for name in ("win", "tie", "loss"))
    scores = ", ".join(f"{model} {_shown(values[f'score_{model}'])}" for model in MODELS)
    cost = "price unknown" if spent is None else f"price {spent:,.4f}"
    result(f"{scores} of 10, {rates} on {counted(len(questions), 'question')}, {cost}")


def _shown(value: float | int | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
