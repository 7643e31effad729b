"""Judge a run by MT-bench's protocol (arXiv 2306.05685): base and tuned model answer, another model compares them.

    zerolora judge --settings JSON --data results/data/NAME --base resources/weights/MODEL.json
                   --tuned results/RUN/merged/manifest.json --work work/judge/RUN --output results/RUN/judge

Writes judge.json (metrics), answers.jsonl (both turns of both models) and verdicts.jsonl (every request, with prompt,
answer, tokens and verdict). Costs money where the endpoint does: it runs only when it is asked for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.config.settings import JudgeSettings
from zerolora.errors import UserError
from zerolora.files import canonical, sha256, staged_directory, write_json, write_text
from zerolora.judge.answers import Contender, answer_all
from zerolora.judge.asking import ask_all, check, most_of
from zerolora.judge.endpoint import Endpoint
from zerolora.judge.metrics import metrics, read
from zerolora.judge.price import price
from zerolora.judge.prompts import BASE, MODELS, TUNED, Answers, requests
from zerolora.judge.questions import JudgeQuestion, read_questions
from zerolora.judge.work_file import WorkFile
from zerolora.log import LOGGER, result
from zerolora.model.base_identity import check_same_base
from zerolora.model.manifest import is_merged, located
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

    Where the manifest says that nothing was merged, the tuned model is the base model with `adapter`.

    Answers and verdicts are kept in directory `work`, so that a killed command continues from them. Raises UserError if
    the endpoint is not set, not reached or refuses, if a question is wrong, or if it would cost more than `max_price`.
    """
    with Endpoint(settings, environment) as endpoint:
        questions = read_questions(Path(settings.questions))
        unanswered = {model: {question.id: ("", "") for question in questions} for model in MODELS}
        # Before the models answer, which takes long: with empty answers it costs less than it will.
        check((0, 0), most_of(requests(questions, unanswered), settings), settings, "judging even empty answers")
        if is_merged(tuned):
            adapter, weights = None, located(tuned)
        elif adapter is not None:
            check_same_base(adapter, base)
            weights = located(base)
        else:
            raise UserError(f"{tuned}: names no merged weights; add --adapter, the directory of the run's adapter")
        contenders = [
            Contender(BASE, located(base), None, sha256(base), device),
            Contender(TUNED, weights, adapter, sha256(tuned) + _identity(adapter), device),
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
    """Write metrics, answers and verdicts to directory `output`, and tell what was found and spent."""
    values = metrics(records, settings.seed)
    spent = price(int(values["prompt_tokens"] or 0), int(values["completion_tokens"] or 0), settings)
    asked = [
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
        _write_lines(directory / ANSWERS, asked)
        _write_lines(directory / VERDICTS, [{**record, "verdict": read(record)} for record in records])
    if values["unparsable"]:
        LOGGER.warning(
            "judge: %d of %d verdicts could not be read and are left out", values["unparsable"], len(records)
        )
    rates = ", ".join(f"{name} {_shown(values[f'{name}_rate'])}" for name in ("win", "tie", "loss"))
    scores = ", ".join(f"{model} {_shown(values[f'score_{model}'])}" for model in MODELS)
    cost = "price unknown" if spent is None else f"price {spent:,.4f}"
    result(f"{scores} of 10, {rates} on {counted(len(questions), 'question')}, {cost}")


def _identity(adapter: Path | None) -> str:
    """Return what tells an adapter from others."""
    return "" if adapter is None else "".join(sha256(path) for path in sorted(adapter.glob("adapter*")))


def _write_lines(path: Path, values: list[dict[str, Any]]) -> None:
    write_text(path, "".join(f"{canonical(value)}\n" for value in values))


def _shown(value: float | int | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
