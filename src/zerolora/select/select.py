"""Stage select: sampled answers become rows to train on. No model is loaded.

    zerolora stage select SELECTION

Writes rows.jsonl (the rows, each with its provenance, as `prepare` reads them), metrics.json (pass@k, coverage and what
selection changed), select.html (the same as a page, with ten answers) and manifest.json.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolora.config.settings import SelectSettings
from zerolora.config.values import JUDGE
from zerolora.data.example import SAMPLED
from zerolora.data.sampled_rows import KINDS, PROMPT, ROWS
from zerolora.errors import UserError
from zerolora.files import MANIFEST, canonical, describe, sha256, staged_directory, write_json, write_text
from zerolora.log import LOGGER, result
from zerolora.model import foreign
from zerolora.model.manifest import check_intact
from zerolora.select.asked_prompts import SampledPrompt, read_prompts
from zerolora.select.held_out import held_out_prompts
from zerolora.select.kept_answers import KeptRow, SampledAnswer, chosen, read_answers
from zerolora.select.page import page_of
from zerolora.select.selection_figures import PromptResult, metrics, pass_rates
from zerolora.select.verdicts import by_judge, by_task, is_asked, task_with_prompts
from zerolora.units import counted

ANSWERS = "answers.jsonl"
BY_RATING = "the judge rates it {least:g} or more of 10"


def select(
    settings: SelectSettings,
    name: str,
    data: Path,
    samples: Path,
    questions: Path,
    work: Path,
    output: Path,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Write the rows that the selection `name` keeps of the answers in `samples` to directory `output`.

    `data` is the prepared data set whose prompts were sampled. A prompt like one in a file of directory `questions`
    that settings.held_out names becomes no row. Finished requests to a judge are in directory `work`, and missing ones
    are made only with an `environment`, whose variables may have a key.
    Raises UserError, before anything is written, if an earlier stage's file is missing or of other prompts, the check
    asks none of them, ratings are missing, or no row is left.
    """
    check_intact(samples, "zerolora stage sample")
    manifest = foreign.manifest(samples / MANIFEST, "zerolora stage sample", "prompts", "model", "settings")
    if manifest["prompts"] != sha256(data / "prompts.arrow"):
        raise UserError(f"{samples}: has answers to other prompts than {data} has; run `zerolora stage sample` again")
    prompts = read_prompts(data)
    names = [each for each in settings.held_out if each != settings.not_asked]
    found = held_out_prompts(questions, names, [prompt.texts for prompt in prompts])
    like = {*itertools.chain.from_iterable(found.values())}
    if len(like) == len(prompts):
        raise UserError(
            f"selections.{name}: all {counted(len(prompts), 'prompt')} are equal or near to questions of "
            f"{', '.join(each for each in found if found[each])}, with which runs are evaluated; sample other prompts"
        )
    answers_of = enumerate(zip(prompts, read_answers(samples / ANSWERS, len(prompts)), strict=True))
    groups = [group for number, group in answers_of if number not in like]
    if settings.max_answer_length and any(each.tokens is None for _, answers in groups for each in answers):
        raise UserError(
            f"selections.{name}.max_answer_length: the server of {settings.samples} did not count the tokens of its "
            "answers; remove it"
        )
    if settings.check == JUDGE:
        judged = by_judge(settings, name, groups, work, environment)
        rule = BY_RATING.format(least=settings.least) if settings.least is not None else "nothing: no rating is"
    else:
        task = task_with_prompts(settings, name, [prompt for prompt, _ in groups])
        groups = [(prompt, answers) for prompt, answers in groups if is_asked(task, prompt)]
        judged = [by_task(settings, name, task, prompt, answers) for prompt, answers in groups]
        rule = task.rule if settings.least is None else f"its {settings.score} is {settings.least:g} or more"
    left_out: Counter[str] = Counter()
    results = [
        PromptResult(prompt, answers, chosen(settings, answers, left_out))
        for (prompt, _), answers in zip(groups, judged, strict=True)
    ]
    _check_some(settings, name, results, left_out)
    lines = [canonical(_row(settings, result.prompt, row, manifest)) for result in results for row in result.rows]
    not_asked = {each: len(numbers) for each, numbers in found.items()}
    values = metrics(results, left_out) | {
        "held_out_prompts": len(like),
        **{f"held_out_prompts_{each}": count for each, count in not_asked.items()},
    }
    # Both engines compare the directory: no data set or task of an earlier config may stay in it.
    for path in questions.glob("*.jsonl"):
        if path.stem not in settings.held_out:
            path.unlink(missing_ok=True)
    with staged_directory(output) as staged:
        write_text(staged / ROWS, "".join(f"{line}\n" for line in lines))
        origin = {"samples_manifest_sha256": sha256(samples / MANIFEST), "prompts": manifest["prompts"]}
        # Not of the figures: another task to compare with is no reason to prepare the same rows again.
        write_json(staged / MANIFEST, {**origin, "rows": KINDS[settings.keep], "files": describe(staged)})
        write_json(staged / "metrics.json", values)
        write_text(staged / "select.html", page_of(f"Selection {name}", results, left_out, rule, not_asked))
    if like:
        LOGGER.info(
            f"select: {counted(len(like), 'prompt')} left out, equal or near to a question that runs are evaluated with"
        )
    _report(results, len(lines))


def _report(results: Sequence[PromptResult], rows: int) -> None:
    pass_at = ""
    if results[0].answers[0].right is not None:
        rates = pass_rates(results)
        pass_at = "".join(f", pass@{k} {rates[k][0]:.3f}" for k in dict.fromkeys([1, len(results[0].answers)]))
    result(f"{counted(rows, 'row')} of {counted(len(results), 'prompt')}{pass_at}")


def _check_some(
    settings: SelectSettings, name: str, results: Sequence[PromptResult], left_out: Mapping[str, int]
) -> None:
    """Raise UserError if no row is left, with the reason."""
    if any(result.rows for result in results):
        return
    answers = sum(len(result.answers) for result in results)
    right = sum(result.right for result in results)
    of = f"the {counted(answers, 'answer')} to {counted(len(results), 'prompt')}"
    here, check = f"selections.{name}", f"samples.{settings.samples}"
    if left_out.get("not_ended") == answers:
        raise UserError(f"{here}: none of {of} ended within max_new_tokens; raise {check}.max_new_tokens")
    if not right and settings.score is None and settings.check != JUDGE:
        raise UserError(
            f"{here}: none of {of} is right by {settings.check}; raise {check}.n, sample a better model, or choose "
            "another check"
        )
    reasons = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in left_out.items() if number)
    why = f" (left out: {reasons})" if reasons else ""
    if settings.keep == "pairs":
        differ = (
            "a right and a wrong answer"
            if settings.score is None and settings.check != JUDGE
            else (f"two answers whose scores differ by more than {settings.margin:g}")
        )
        raise UserError(
            f"{here}: no prompt has {differ} of different texts among {of}{why}; raise {check}.n or temperature"
        )
    raise UserError(f"{here}: no row is left of {of}, of which {right:,} are right{why}; loosen the selection")


def _row(settings: SelectSettings, prompt: SampledPrompt, row: KeptRow, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as `prepare` reads it, with its provenance."""
    origin: dict[str, Any] = {
        "samples": settings.samples,
        "model": manifest["model"],
        "seed": manifest["settings"].get("seed"),
        "row": row.answer.row,
        PROMPT: prompt.hash,
        "answer": _verdict(row.answer),
    }
    columns = prompt.conversation
    asked = {"prompt": columns.pop("messages")}
    if row.rejected:
        origin["rejected"] = _verdict(row.rejected)
        answers = {"chosen": _turn(row.answer), "rejected": _turn(row.rejected)}
    else:
        answers = {"completion": _turn(row.answer)}
    label = {"label": row.answer.right} if settings.keep == "labelled" else {}
    return {**asked, **columns, **answers, **label, SAMPLED: origin}


def _turn(answer: SampledAnswer) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer.text}]


def _verdict(answer: SampledAnswer) -> dict[str, Any]:
    return {"sample": answer.sample, "right": answer.right, "score": answer.score}
