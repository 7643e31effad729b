"""A model behind an OpenAI-compatible endpoint, such as the judge: one chat completion at a time, with retries.

The key goes into the header of each request and nowhere else: redirects are not followed, answers are cleared of it,
and errors of the HTTP library whose text could contain it are not shown.
"""

import contextlib
import email.utils
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import httpx2

from zerolora.config.values import is_loopback
from zerolora.errors import UserError, shown
from zerolora.judge.work_file import NEVER
from zerolora.log import LOGGER

ATTEMPTS = 8
"""Of one request. The waits between them sum to two minutes, unless the endpoint sets others."""
LONGEST_WAIT = 600.0
"""Seconds; if the endpoint asks for a longer wait, the command stops."""
TIMEOUT = 300.0
"""Seconds without a byte of an answer. Answers are not streamed."""
BUSY = 429


OF_SEED = re.compile(r"\bseed\b", re.IGNORECASE)
"""What an endpoint says that takes no seed."""


class NoSeedError(UserError):
    """The endpoint does not accept a request because of its seed."""


class Service(NamedTuple):
    """An endpoint, and where the config has it."""

    section: str
    """Section of the config, in messages."""
    key: str
    """Key of the address in it."""
    address: str | None
    model: str | None
    key_variable: str | None
    page: str
    """Page of the docs."""


class Reply(NamedTuple):
    """An answer of a model."""

    text: str
    model: str
    """The model's name according to the endpoint; may be empty."""
    prompt_tokens: int | None
    completion_tokens: int | None
    """None if the endpoint does not report usage."""
    finish_reason: str
    calls_tools: bool
    """Whether the message has calls of tools, which its text does not have."""
    had_key: bool
    """Whether the text of the key was in it, which is not in `text`."""


class Endpoint:
    """The connection to a model. Use as a context manager. Threads may share it."""

    def __init__(
        self,
        service: Service,
        body: Mapping[str, Any],
        environment: Mapping[str, str],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """body: further keys of each request. Raises UserError if address or model are not set, or the key's variable
        contains no key, or nothing may be asked (NEVER)."""
        if environment.get(NEVER):
            raise UserError(
                f"{service.section}: would ask {service.address} again, which a rebuild never does; pass --rows with "
                "the file of all that it replied then"
            )
        for name, value in ((service.key, service.address), ("model", service.model)):
            if value is None:
                raise UserError(
                    f"config/config.yaml: {service.section}.{name} is not set; set it, as {service.page} shows"
                )
        self.address, self.model = str(service.address), str(service.model)
        self._service, self._here = service, f"{service.section}.{service.key}: {self.address}"
        self._name = service.section.partition(".")[0]
        self._body = {"model": self.model, **body}
        self._key = _key(service, environment)
        self._sleep = sleep
        self._reached = False
        # A proxy of the environment would read the key on its way to a loopback address.
        self._client = httpx2.Client(timeout=TIMEOUT, follow_redirects=False, trust_env=not is_loopback(self.address))

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, messages: list[dict[str, Any]], **body: Any) -> Reply:
        """Return the model's answer to a conversation; `body` has further keys of the request.

        Retries after 429, 5xx, timeouts and broken connections, in 1, 2, 4 … seconds or after Retry-After. Raises
        NoSeedError for a seed that it does not take, and UserError for any other error, and after ATTEMPTS.
        """
        for attempt in range(1, ATTEMPTS + 1):
            wait: float | None = None
            try:
                headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
                content = {**self._body, **body, "messages": messages}
                response = self._client.post(f"{self.address}/chat/completions", json=content, headers=headers)
            except httpx2.RequestError as error:
                if isinstance(error, httpx2.ConnectError) and not self._reached:
                    raise UserError(
                        f"{self._here}: no connection ({self._clear(str(error))}); correct the "
                        "address, or start the server"
                    ) from None
                problem = type(error).__name__  # its text may quote the header with the key
            else:
                self._reached = True
                if response.status_code != BUSY and response.status_code < 500:
                    return self._reply(response)
                problem, wait = f"status {response.status_code}", _retry_after(response)
            wait = min(2.0 ** (attempt - 1), LONGEST_WAIT) if wait is None else wait
            if attempt == ATTEMPTS or wait > LONGEST_WAIT:
                raise UserError(
                    f"{self._here}: {problem} at attempt {attempt} of {ATTEMPTS}, and asks to wait "
                    f"{wait:,.0f} s; run it again later to resume"
                )
            LOGGER.info("%s: %s at attempt %d of %d; again in %.0f s", self._name, problem, attempt, ATTEMPTS, wait)
            self._sleep(wait)
        raise AssertionError

    def _reply(self, response: httpx2.Response) -> Reply:
        status = response.status_code
        if status in (401, 403):
            raise UserError(
                f"{self._here}: refuses access (status {status}); put a valid key into the environment variable that "
                f"{self._service.section}.key_variable names"
            )
        try:
            value = response.json()
        except ValueError:
            value = None
        if status != 200:
            kind = NoSeedError if OF_SEED.search(_said(value)) else UserError
            raise kind(f"{self._here}: {self._refusal(status, value)}")
        try:
            choice = value["choices"][0]
            text = choice["message"]["content"] or ""
            usage = value.get("usage") or {}
            tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        except (AttributeError, IndexError, KeyError, TypeError):
            text, choice, tokens = None, {}, []
        if not isinstance(text, str):
            raise UserError(
                f"{self._here}: the answer is not a chat completion; give the address of an "
                "OpenAI-compatible endpoint, as in https://judge.example/v1"
            )
        prompt_tokens, completion_tokens = (
            each if isinstance(each, int) and not isinstance(each, bool) and each >= 0 else None for each in tokens
        )
        model, finish_reason = (
            self._clear(str(each or "")) for each in (value.get("model"), choice.get("finish_reason"))
        )
        calls = bool(choice["message"].get("tool_calls"))
        had_key = self._key is not None and self._key in text
        return Reply(self._clear(text), model, prompt_tokens, completion_tokens, finish_reason, calls, had_key)

    def _refusal(self, status: int, value: Any) -> str:
        """Return the error of an answer with a status other than 200, and the remedy."""
        if 300 <= status < 400:
            return "redirects to another address, which the key is not sent to; use that address"
        said = self._clear(_said(value))
        reason = f"status {status}" + (f", {shown(said)}" if said else "")
        if status == 404:
            remedy = f"correct {self._service.section}.model"
            return f"has no model {shown(self.model)} or no /chat/completions ({reason}); {remedy}"
        return f"refuses the request ({reason}); correct the section {self._name} of config/config.yaml"

    def _clear(self, text: str) -> str:
        """Return a text without the key and without lone surrogates, which cannot be written to a file."""
        text = text.encode("utf-8", "replace").decode()
        return text.replace(self._key, "[key]") if self._key else text


def _said(value: Any) -> str:
    """Return the message of an error's body; "" without one."""
    error = value.get("error", value) if isinstance(value, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return said if isinstance(said, str) else ""


def _key(service: Service, environment: Mapping[str, str]) -> str | None:
    """Return the key in an environment variable; no message contains it."""
    if (variable := service.key_variable) is None:
        return None
    here = f"{service.section}.key_variable"
    key = environment.get(variable, "").strip()
    if not key:
        raise UserError(f"{here}: the environment variable {variable} is not set; put the model's key there")
    if not all("!" <= each <= "~" for each in key):
        raise UserError(f"{here}: {variable} contains characters that no key has; put the model's key there")
    return key


def _retry_after(response: httpx2.Response) -> float | None:
    """Return the seconds of the header Retry-After, a number or a date (RFC 9110, 10.2.3)."""
    value = response.headers.get("retry-after", "")
    with contextlib.suppress(ValueError):
        if value.isascii() and value.isdigit():
            return float(value)
        then = email.utils.parsedate_to_datetime(value)
        return max(0.0, (then.replace(tzinfo=then.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return None
