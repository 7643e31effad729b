"""The bound on what a server's clients send: no more tokens than the model takes.

A prompt beyond the model's context would occupy the model for minutes, and the event loop, on which transformers
tokenizes, for seconds: others wait. So each request is measured beside the event loop before transformers reads it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from zerolora.compat.transformers_server import add_bounds
from zerolora.model.architecture import config_of, tokenizer_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

UNLIMITED = 1 << 15
"""Tokens of context of a model whose positions have no end, as in Mamba and ALiBi."""
ESCAPED = 6
"""The most bytes of JSON for a byte of text, as in \\u0041."""
ADDRESS = "url"
"""Key of an image in a message's content, whose value may be the image itself."""
STRUCTURE = 1 << 20
"""Bytes of JSON beside the texts."""


def bound_prompts(directory: Path) -> None:
    """Refuse, in transformers' server of this process, what the model of a served directory cannot take."""
    tokenizer = tokenizer_of(directory)
    context = getattr(config_of(directory).get_text_config(), "max_position_embeddings", None) or UNLIMITED
    add_bounds(lambda app: BoundedRequests(app, tokenizer, context), context)


class BoundedRequests:
    """An ASGI application that answers 400 for a request with more tokens than the context, in one line, and hands the
    others to `app`."""

    def __init__(self, app: Application, tokenizer: Any, context: int) -> None:
        self.app, self.tokenizer, self.context = app, tokenizer, context
        longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        self.most_bytes = context * longest * ESCAPED + STRUCTURE
        self._tokens([""])  # sets it up, which threads may not do at once

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return None
            part = message.get("body", b"")
            size += len(part)
            if size <= self.most_bytes:  # the rest is read, since a client reads no answer before, and forgotten
                body += part
            more = message.get("more_body", False)
        if size > self.most_bytes:
            return await _refuse(send, f"the request has {size:,} bytes; {self._most()}")
        if reason := await asyncio.to_thread(self._refusal, bytes(body)):
            return await _refuse(send, reason)
        read = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def again() -> Message:
            return next(read, None) or await receive()

        return await self.app(scope, again, send)

    def _refusal(self, body: bytes) -> str | None:
        """Return why the model cannot take a request, None if it may. transformers answers what is no JSON."""
        if len(body) <= self.context:  # no token has less than a byte
            return None
        try:
            texts = list(_texts(json.loads(body)))
        except (ValueError, RecursionError):
            return None
        tokens = self._tokens(texts)
        return f"the request has {tokens:,} tokens; {self._most()}" if tokens > self.context else None

    def _tokens(self, texts: list[str]) -> int:
        return sum(map(len, self.tokenizer(texts, add_special_tokens=False)["input_ids"])) if texts else 0

    def _most(self) -> str:
        return f"the model takes {self.context:,} with its answer: send a shorter prompt"


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value but for addresses, which may hold an image and are no part of a prompt."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name != ADDRESS:
                yield from _texts(part)


async def _refuse(send: Send, reason: str) -> None:
    """Answer 400, in the form of transformers' own refusals."""
    content = json.dumps({"detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": content})
