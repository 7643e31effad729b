"""Requests the missing verdicts from the judge, within the price that the settings allow.

Before a request its tokens are estimated; afterwards the endpoint's own counts replace the estimate.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from zerolora.config.settings import JudgeSettings
from zerolora.errors import UserError
from zerolora.judge.endpoint import Endpoint, Reply, Service
from zerolora.judge.prompts import JudgeRequest
from zerolora.judge.work_file import WorkFile
from zerolora.log import LOGGER
from zerolora.progress import Progress

BYTES_PER_TOKEN = 3
"""Common tokenizers have about 4 for English, so the estimate is rather too high."""
MESSAGE_TOKENS = 8
"""Tokens that a chat template adds to a message."""
MILLION = 1_000_000


def judge_endpoint(settings: JudgeSettings, environment: Mapping[str, str], **more: Any) -> Endpoint:
    """Return the connection to the judge. Raises UserError as Endpoint does."""
    where = settings.endpoint, settings.model, settings.key_variable
    service = Service("judge", "endpoint", *where, page="docs/evaluation.md")
    return Endpoint(service, {"temperature": 0, "max_tokens": settings.judge_tokens}, environment, **more)


def ask_all(
    requests: list[JudgeRequest], endpoint: Endpoint, settings: JudgeSettings, kept: WorkFile
) -> list[dict[str, Any]]:
    """Return the record of each request, in order: the request, the judge's answer, and its tokens.

    Requests with a record in `kept` are not sent again; new records are added to it one by one. The maximum cost is
    logged first. Raises UserError if it, or the next request on top of the tokens spent, would exceed `max_price`.
    """
    asked = {"endpoint": settings.endpoint, "model": settings.model, "judge_tokens": settings.judge_tokens}
    keys = [request.key(**asked) for request in requests]
    rest = [(key, request) for key, request in zip(keys, requests, strict=True) if key not in kept.pieces]
    done = [kept.pieces[key] for key in keys if key in kept.pieces]
    spent = sum(each["prompt_tokens"] for each in done), sum(each["completion_tokens"] for each in done)
    left = most_of([request for _, request in rest], settings)
    cost = price(*left, settings)
    LOGGER.warning(
        "judge: %d requests to %s, %d verdicts already present; about %s prompt tokens and up to %s completion "
        "tokens, %s",
        len(rest),
        settings.model,
        len(done),
        f"{left[0]:,}",
        f"{left[1]:,}",
        "price unknown (judge.prompt_price, judge.completion_price)" if cost is None else f"at most {cost:,.4f}",
    )
    check(spent, left, settings, "the remaining requests")
    with Progress("verdict", len(requests), len(done)) as bar:
        for key, request in rest:
            what = f"the next request (rerun to resume from {kept.path})"
            check(spent, most_of([request], settings), settings, what)
            record = {"key": key, **_record(request, endpoint.ask(request.messages), settings)}
            kept.add(record)
            spent = spent[0] + record["prompt_tokens"], spent[1] + record["completion_tokens"]
            bar.update()
    return [kept.pieces[key] for key in keys]


def most_of(requests: list[JudgeRequest], settings: JudgeSettings) -> tuple[int, int]:
    """Return the estimated prompt tokens of requests and the maximum completion tokens."""
    texts = (message["content"] for request in requests for message in request.messages)
    return tokens_of(texts), len(requests) * settings.judge_tokens


def tokens_of(texts: Iterable[str]) -> int:
    """Return the estimated tokens of messages; the judge's tokenizer is not available here."""
    return sum(math.ceil(len(text.encode()) / BYTES_PER_TOKEN) + MESSAGE_TOKENS for text in texts)


def price(prompt_tokens: int, completion_tokens: int, settings: JudgeSettings) -> float | None:
    """Return the price of tokens in the settings' currency; None without prices."""
    if settings.prompt_price is None or settings.completion_price is None:
        return None
    return (prompt_tokens * settings.prompt_price + completion_tokens * settings.completion_price) / MILLION


def check(spent: tuple[int, int], more: tuple[int, int], settings: JudgeSettings, what: str) -> None:
    """Raise UserError if the tokens spent and `more`, the maximum for `what`, exceed max_price."""
    if settings.max_price is None:
        return
    before, total = price(*spent, settings), price(spent[0] + more[0], spent[1] + more[1], settings)
    if before is None or total is None:
        raise UserError("judge.max_price: needs prices to compare with; set judge.prompt_price and completion_price")
    if total > settings.max_price and more != (0, 0):
        raise UserError(
            f"judge.max_price: {settings.max_price:g} is less than {total:,.4f}, the maximum price of {what} including "
            f"the {before:,.4f} spent; raise it, lower judge.judge_tokens, or ask fewer questions"
        )


def _record(request: JudgeRequest, reply: Reply, settings: JudgeSettings) -> dict[str, Any]:
    counted = reply.prompt_tokens is not None and reply.completion_tokens is not None
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
        "prompt_tokens": reply.prompt_tokens if counted else most_of([request], settings)[0],
        "completion_tokens": reply.completion_tokens if counted else tokens_of([reply.text]),
        "tokens_counted_by_endpoint": counted,
    }
