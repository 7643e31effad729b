"""Asks the judge all requests that have no verdict yet, within the price that the settings allow."""

from typing import Any

from zerolora.config.settings import JudgeSettings
from zerolora.errors import UserError
from zerolora.judge.endpoint import Endpoint, Reply
from zerolora.judge.price import most, price, tokens_of
from zerolora.judge.prompts import JudgeRequest
from zerolora.judge.work_file import WorkFile
from zerolora.log import LOGGER
from zerolora.progress import Progress


def ask_all(
    requests: list[JudgeRequest], endpoint: Endpoint, settings: JudgeSettings, kept: WorkFile
) -> list[dict[str, Any]]:
    """Return the record of each request, in their order: what was asked, what the judge said, and its tokens.

    Records in `kept` are not asked again; new ones are added to it, one by one. The most that the rest may cost is told
    before. Raises UserError if that, or with what was spent the next request, would exceed `max_price`.
    """
    keys = [_key(request, settings) for request in requests]
    rest = [(key, request) for key, request in zip(keys, requests, strict=True) if key not in kept.pieces]
    spent = sum_of([kept.pieces[key] for key in keys if key in kept.pieces])
    left = most_of([request for _, request in rest], settings)
    tell(len(rest), len(requests) - len(rest), left, settings)
    check(spent, left, settings, "the requests that are left")
    with Progress("verdict", len(requests), len(requests) - len(rest)) as bar:
        for key, request in rest:
            check(
                spent,
                most(request.messages, settings),
                settings,
                f"the next request, with {kept.path} to continue from,",
            )
            record = {"key": key, **_record(request, endpoint.ask(request.messages), settings)}
            kept.add(record)
            spent = sum_of([record], spent)
            bar.update()
    return [kept.pieces[key] for key in keys]


def most_of(requests: list[JudgeRequest], settings: JudgeSettings) -> tuple[int, int]:
    """Return the estimated prompt tokens of requests and the most completion tokens."""
    result = [most(request.messages, settings) for request in requests]
    return sum(prompt for prompt, _ in result), sum(completion for _, completion in result)


def sum_of(records: list[dict[str, Any]], start: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return the prompt and completion tokens of records, added to `start`."""
    return (
        start[0] + sum(record["prompt_tokens"] for record in records),
        start[1] + sum(record["completion_tokens"] for record in records),
    )


def tell(rest: int, done: int, tokens: tuple[int, int], settings: JudgeSettings) -> None:
    """Tell the user what the rest of the requests costs at most."""
    cost = price(*tokens, settings)
    LOGGER.warning(
        "judge: %d requests to %s, %d verdicts are there already; about %s prompt tokens and up to %s completion "
        "tokens, %s",
        rest,
        settings.model,
        done,
        f"{tokens[0]:,}",
        f"{tokens[1]:,}",
        "price unknown (judge.prompt_price, judge.completion_price)" if cost is None else f"at most {cost:,.4f}",
    )


def check(spent: tuple[int, int], more: tuple[int, int], settings: JudgeSettings, what: str) -> None:
    """Raise UserError if what was spent and `more`, which `what` may need, exceeds max_price."""
    if settings.max_price is None:
        return
    before, total = price(*spent, settings), price(spent[0] + more[0], spent[1] + more[1], settings)
    if before is None or total is None:
        raise UserError("judge.max_price: needs prices to compare with; write judge.prompt_price and completion_price")
    if total > settings.max_price and more != (0, 0):
        raise UserError(
            f"judge.max_price: {settings.max_price:g} is less than {total:,.4f}, which is what {what} may cost with "
            f"the {before:,.4f} spent; raise it, lower judge.judge_tokens, or ask fewer questions"
        )


def _key(request: JudgeRequest, settings: JudgeSettings) -> str:
    return request.key(endpoint=settings.endpoint, model=settings.model, judge_tokens=settings.judge_tokens)


def _record(request: JudgeRequest, reply: Reply, settings: JudgeSettings) -> dict[str, Any]:
    counted = reply.prompt_tokens is not None and reply.completion_tokens is not None
    estimated = most(request.messages, settings)[0], tokens_of([reply.text])
    return {
        "question_id": request.question.id,
        "category": request.question.category,
        "turn": request.turn,
        "kind": request.kind,
        "role": request.role,
        "prompt": request.prompt,
        "messages": request.messages,
        "judge": settings.model,
        "judge_reported": reply.model,
        "answer": reply.text,
        "finish_reason": reply.finish_reason,
        "prompt_tokens": reply.prompt_tokens if counted else estimated[0],
        "completion_tokens": reply.completion_tokens if counted else estimated[1],
        "tokens_counted_by_endpoint": counted,
    }
