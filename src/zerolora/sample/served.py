"""Asks a served model for the answers of a sample, and never twice for the same.

Each answer is kept with the address, the name that the server gives for its model, and the time, in a file of work/ to
which answers are only added. A request carries a seed; a server may draw other answers from the same one.
"""

import concurrent.futures
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zerolora.config.sample_sections import Served
from zerolora.config.settings import SampleSettings
from zerolora.data.formats.template_arguments import KEYWORDS
from zerolora.data.prepared_rows import PROMPTS, ROW, open_table
from zerolora.errors import UserError, shown
from zerolora.files import canonical
from zerolora.judge.endpoint import Endpoint, NoSeedError, Service
from zerolora.judge.work_file import SERVED, WorkFile
from zerolora.log import LOGGER
from zerolora.model.answer_text import UNFINISHED
from zerolora.progress import Progress
from zerolora.sample.draws import seed_of
from zerolora.sample.kept_samples import Answers, Sampled
from zerolora.sample.prompt_batches import AskedPrompt
from zerolora.units import counted

STOPPED, LENGTH = "stop", "length"
"""The values of finish_reason for an answer that ended, and for one that the limit cut."""
AT_ONCE = 8
"""Requests at a time, with batch: auto."""


def ask_served(
    settings: SampleSettings,
    name: str,
    data: Path,
    prompts: Sequence[AskedPrompt],
    work: Path,
    environment: Mapping[str, str],
) -> tuple[Answers, dict[str, Any]]:
    """Return the answers of the served model to all prompts, and what is known of it. `name` is the sample's, for
    messages.

    Raises UserError if the server cannot be reached or refuses, for prompts that it cannot be asked.
    """
    served = settings.of.served
    assert served is not None
    requests = _requests(settings, served, data, prompts, name)
    kept = WorkFile(work / SERVED)
    left = [key for key in requests if key not in kept.pieces]
    if left:
        where = served.address, served.model, served.key_variable
        service = Service(f"samples.{name}.of.served", "address", *where, page="docs/sampling.md")
        with Endpoint(service, {}, environment) as endpoint:
            _ask(endpoint, requests, left, kept, settings, service.section)
    answers = {}
    for key, (prompt, sample, _) in requests.items():
        piece = kept.pieces[key]
        text = piece["answer"]
        whole = not piece["calls_tools"] and UNFINISHED not in text
        answers[prompt, sample] = Sampled(text, piece["tokens"], piece["finish_reason"] == STOPPED, whole)
    pieces = [kept.pieces[key] for key in requests]
    reasons = Counter(piece["finish_reason"] for piece in pieces if piece["finish_reason"] not in (STOPPED, LENGTH))
    for reason, count in sorted(reasons.items()):
        LOGGER.warning("sample: finish_reason is %s in %s: not ended", shown(reason), counted(count, "answer"))
    times = sorted(piece["asked"] for piece in pieces)
    known = {
        "address": served.address,
        "model": served.model,
        "reported": sorted({piece["reported"] for piece in pieces}),
        "first_asked": times[0],
        "last_asked": times[-1],
        "seeded": all(piece["seeded"] for piece in pieces),
    }
    return answers, known


Requests = dict[str, tuple[str, int, dict[str, Any]]]
"""By the key of a request: the prompt's key, the answer's number, and the body."""


def _requests(
    settings: SampleSettings, served: Served, data: Path, prompts: Sequence[AskedPrompt], name: str
) -> Requests:
    common = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_new_tokens,
        **({"stop": settings.stop} if settings.stop else {}),
    }
    result: Requests = {}
    rows = open_table(data, PROMPTS)[ROW].to_pylist()
    for number, (prompt, text) in enumerate(zip(prompts, rows, strict=True)):
        row = json.loads(text)
        if KEYWORDS in row or any(not isinstance(turn.get("content"), str) for turn in row["messages"]):
            what = KEYWORDS if KEYWORDS in row else "a message that is no text"
            raise UserError(
                f"samples.{name}.of.served: prompt {number} of {data / PROMPTS}.arrow has {what}, which a server is "
                "not asked; take its rows out of the data set, or sample from a model of this project"
            )
        tools = {"tools": row["tools"]} if row.get("tools") else {}
        # Of what the server sees: the tokens of this project's tokenizer are none of its concern.
        asked = hashlib.sha256(canonical([row["messages"], tools]).encode()).digest()
        for sample in range(settings.n):
            seed = seed_of(settings.seed, asked, sample)
            body = {**common, **tools, "messages": row["messages"], "seed": seed}
            key = hashlib.sha256(canonical([served.address, served.model, sample, body]).encode()).hexdigest()
            result[key] = prompt.key.hex(), sample, body
    return result


def _ask(
    endpoint: Endpoint, requests: Requests, left: list[str], kept: WorkFile, settings: SampleSettings, name: str
) -> None:
    """Ask for the answers that are left, several at a time, and keep each when it arrives."""
    seeded = True

    def ask(key: str) -> dict[str, Any]:
        body = {name: value for name, value in requests[key][2].items() if seeded or name != "seed"}
        asked = datetime.now(UTC).isoformat(timespec="seconds")
        reply = endpoint.ask(**body)
        if reply.had_key:
            raise UserError(
                f"{name}.key_variable: an answer contains the text of the key, which is written nowhere; remove "
                "key_variable if the server needs no key, otherwise give it a key that no answer has"
            )
        return {
            "key": key,
            "address": endpoint.address,
            "model": endpoint.model,
            "reported": reply.model,
            "asked": asked,
            "seeded": "seed" in body,
            "messages": body["messages"],
            "answer": reply.text,
            "tokens": reply.completion_tokens,
            "finish_reason": reply.finish_reason,
            "calls_tools": reply.calls_tools,
        }

    with Progress("answer", len(requests), len(requests) - len(left)) as bar:
        try:
            first = ask(left[0])
        except NoSeedError:
            LOGGER.warning("sample: %s takes no seed; it draws its answers without one", endpoint.model)
            seeded = False
            first = ask(left[0])
        kept.add(first)
        bar.update()
        at_once = AT_ONCE if isinstance(settings.batch, str) else settings.batch
        with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
            asked = [threads.submit(ask, key) for key in left[1:]]
            try:
                for each in concurrent.futures.as_completed(asked):
                    kept.add(each.result())
                    bar.update(1, f"{bar.rate(1):.1f} answers/s")
            except BaseException:
                # Those that are under way are kept too, if they arrive: they may have been paid for.
                threads.shutdown(cancel_futures=True)
                for each in asked:
                    if each.done() and not each.cancelled() and not each.exception():
                        piece = each.result()
                        if piece["key"] not in kept.pieces:
                            kept.add(piece)
                raise
