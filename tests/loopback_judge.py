"""A judge on 127.0.0.1: the part of an OpenAI-compatible endpoint that `zerolora stage judge` uses, and failures."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Messages = list[dict[str, str]]
Failure = tuple[int, dict[str, str]]


def fair(messages: Messages) -> str:
    """Prefer the answer with the word good in any position; tie if both or neither contain it."""
    text = messages[1]["content"]
    if "Assistant B" not in text:
        return f"Rating: [[{9 if 'good' in text else 4}]]"
    a, b = ("good" in each for each in text.split("Assistant B", 1))
    return "It is [[C]]" if a == b else f"It is [[{'A' if a else 'B'}]]"


class Judge(http.server.ThreadingHTTPServer):
    """Answers chat completions with `verdict`.

    failures: of the next requests, in order: a status with headers, or "break" (no answer). body: content of failures,
    or an answer instead of a chat completion. usage: report 100 and 10 tokens a request. asked: the bodies of all
    requests. keys: their Authorization headers. before: called with the number of requests before each answer.
    """

    daemon_threads = True

    def __init__(self, verdict: Callable[[Messages], str | None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.verdict = verdict
        self.failures: list[Failure | str] = []
        self.usage = True
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.before: Callable[[int], None] = lambda number: None
        self.body: Any = None

    @property
    def endpoint(self) -> str:
        """The value of judge.endpoint."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    server: Judge

    def do_POST(self) -> None:
        """Answer a chat completion, or fail."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append({"path": self.path, **body})
        self.server.keys.append(self.headers["authorization"])
        self.server.before(len(self.server.asked))
        failure = self.server.failures.pop(0) if self.server.failures else None
        if failure == "break":
            self.close_connection = True
            return
        if isinstance(failure, tuple):
            self._send(failure[0], self.server.body, failure[1])
            return
        message = {"role": "assistant", "content": self.server.verdict(body["messages"])}
        answer = {
            "model": "judge-2026-01",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            **({"usage": {"prompt_tokens": 100, "completion_tokens": 10}} if self.server.usage else {}),
        }
        self._send(200, answer if self.server.body is None else self.server.body, {})

    def _send(self, status: int, value: Any, headers: dict[str, str]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"content-type": "application/json", "content-length": str(len(content)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def judging(verdict: Callable[[Messages], str | None] = fair) -> Iterator[Judge]:
    """Yield a judge that answers in a thread."""
    with Judge(verdict) as judge:
        thread = threading.Thread(target=judge.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield judge
        finally:
            judge.shutdown()
            thread.join()
