"""Rows to tokens, on all cores, in the order of the files.

Chunks of a file go to worker processes; what comes back is taken in their order, so the number of workers changes
no byte.
"""

import collections
import concurrent.futures
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.data.encode import Encoded, Encoder, Span
from zerolora.data.example import BadRow, Example
from zerolora.data.formats import parse
from zerolora.data.records import Chunk
from zerolora.data.rows import FIELDS, IGNORED, schema
from zerolora.data.template import Piece, Template
from zerolora.errors import UserError


class Job(NamedTuple):
    """A chunk of rows: the number of its source, the form of its rows, their columns by field."""

    source: int
    format: str
    columns: dict[str, str]
    chunk: Chunk


class Dropped(NamedTuple):
    """A row that is not used: where it stands, why (bad_row or too_long, and the reason), and the row."""

    source: int
    place: str
    kind: str
    reason: str
    row: Any


class Result(NamedTuple):
    """What became of a chunk.

    batch: an Arrow record batch of `rows.schema(held_out=True)`, in the bytes of Arrow's IPC. hashes: of each row and
    of its prompt, uint64 [rows, 2]. counts: rows that were cut, turns and learned tokens by role, stop tokens.
    progress: bytes of the file that the chunk stands for.
    """

    batch: bytes
    hashes: Any
    source: int
    read: int
    dropped: list[Dropped]
    counts: dict[str, int]
    progress: int


def tokenize(jobs: Iterable[Job], model: Path, settings: dict[str, Any], workers: int) -> Iterator[Result]:
    """Yield the result of every job, in the order of the jobs, from `workers` processes.

    Raises UserError if the model's tokenizer does not fit the settings, or a worker dies.
    """
    # Workers share out the rows; threads inside each would only get into each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    work = Work(model, settings)
    jobs = iter(jobs)
    first = list(itertools.islice(jobs, 2))
    jobs = itertools.chain(first, jobs)
    if workers == 1 or len(first) < 2:
        yield from map(work, jobs)
        return
    # Workers are forked, so that each has the tokenizer without loading it again.
    _WORK[:] = [work]
    context = multiprocessing.get_context("fork")
    # Frozen, since collecting garbage would look through all that was loaded, again and again.
    with concurrent.futures.ProcessPoolExecutor(workers, context, gc.freeze) as pool:
        waiting: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(_run, job))
                if len(waiting) > 2 * workers:  # no more than the workers can chew: memory stays flat
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "a tokenizing process died, most likely for lack of memory; give the machine or the job more, "
                "or fewer cores"
            ) from None
        finally:
            for future in waiting:
                future.cancel()


_WORK: list["Work"] = []


def _run(job: Job) -> Result:
    return _WORK[0](job)


class Work:
    """Turns a chunk of rows into a Result."""

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.max_length, self.too_long = settings["max_length"], settings["too_long"]
        self.template = Template(tokenizer, settings, model)
        self.encoder = Encoder(tokenizer)
        self.vocabulary = len(tokenizer)
        # Some tokenizers name a BOS that they never put before a text.
        self.bos = tokenizer.bos_token_id if self.template.bos else None

    def __call__(self, job: Job) -> Result:
        """Return a chunk's rows as tokens."""
        import numpy as np

        counts: collections.Counter[str] = collections.Counter()
        read: list[tuple[str, Any, Example, list[Piece] | BadRow]] = []  # no pieces: the row came as tokens
        for place, value in job.chunk.records():
            try:
                if isinstance(value, BadRow):
                    raise value
                if job.columns:
                    counts.update(f"column.{field}" for field, column in job.columns.items() if _holds(value, column))
                example = parse(value, job.format, job.columns)
                read.append((place, value, example, [] if example.tokens else self.template.pieces(example)))
            except BadRow as error:
                read.append((place, value, Example(), error))
        encoded = iter(self.encoder.encode([pieces for *_, pieces in read if isinstance(pieces, list) and pieces]))
        rows: list[Encoded] = []
        texts: list[tuple[str, str]] = []
        hashes: list[int] = []
        dropped: list[Dropped] = []
        for place, value, example, pieces in read:
            if isinstance(pieces, BadRow):
                dropped.append(Dropped(job.source, place, "bad_row", str(pieces), value))
                continue
            found: Encoded | BadRow = next(encoded) if pieces else self._given(example)
            if isinstance(found, BadRow):
                dropped.append(Dropped(job.source, place, "bad_row", str(found), value))
                continue
            parts = fitted(found, self.max_length, self.too_long, self.bos)
            if not parts:
                reason = (
                    f"has {len(found.input_ids)} tokens, max_length is {self.max_length}; shorten it, raise "
                    "max_length, or say too_long: drop, truncate_left, truncate_right or split"
                )
                dropped.append(Dropped(job.source, place, "too_long", reason, value))
                continue
            rows += parts
            texts += [_texts(example)] * len(parts)
            row, prompt = _hashes(found, pieces)
            # The parts of a row that was cut are no duplicates of each other.
            for part in range(len(parts)):
                hashes += ((row + part) % 2**64, (prompt + part) % 2**64)
            self._count(counts, example, pieces, parts)
            if parts != [found]:
                counts["rows.split" if self.too_long == "split" else "rows.truncated"] += 1
        numbers = np.array(hashes, dtype=np.uint64).reshape(-1, 2)
        return Result(
            _batch(rows, texts, job.source), numbers, job.source, len(read), dropped, dict(counts), job.chunk.progress
        )

    def _given(self, example: Example) -> Encoded | BadRow:
        """Return a row that came as tokens."""
        assert example.tokens is not None and example.labels is not None
        largest = max(example.tokens)
        if largest >= self.vocabulary:
            return BadRow(
                f"input_ids holds {largest}, but the model's tokenizer knows {self.vocabulary} tokens only; "
                "tokenize it with this model's tokenizer"
            )
        spans: list[Span] = []
        for place, label in enumerate(example.labels[1:], 1):
            if label == IGNORED:
                continue
            if spans and spans[-1].end == place:
                spans[-1] = spans[-1]._replace(end=place + 1)
            else:
                spans.append(Span(place, place + 1, "tokens"))
        if not spans:
            return BadRow("it has no token that the loss would see; remove it")
        return Encoded(example.tokens, spans, spans[-1].start)

    def _count(
        self, counts: collections.Counter[str], example: Example, pieces: list[Piece], parts: list[Encoded]
    ) -> None:
        """Count a row's turns, and the learned tokens and stop tokens of its parts."""
        for message in example.messages or ():
            counts[f"turns.{message['role']}"] += 1
        for text, role, learned in pieces:
            if learned and role:
                counts[f"learned_turns.{role}"] += 1
                for stop in self.template.stops:
                    if text.endswith(stop):
                        counts[f"stop.{stop}"] += 1
                        break
        for part in parts:
            for start, end, role in part.spans:
                counts[f"learned_tokens.{role}"] += end - start


def fitted(row: Encoded, longest: int, policy: str, bos: int | None) -> list[Encoded]:
    """Return a row as rows of at most `longest` tokens, by the policy too_long; those that teach nothing are left out.

    truncate_left keeps BOS. A row that is cut can no longer be asked if its prompt was cut.
    """
    if len(row.input_ids) <= longest:
        return [row]
    ids = row.input_ids
    match policy:
        case "truncate_right":
            parts = [_part(row, 0, longest)._replace(prompt=row.prompt if row.prompt < longest else 0)]
        case "truncate_left" if bos is not None and ids[0] == bos and longest > 1:
            part = _part(row, len(ids) - longest + 1, len(ids))
            parts = [Encoded([bos, *part.input_ids], [span.moved(1) for span in part.spans], 0)]
        case "truncate_left":
            parts = [_part(row, len(ids) - longest, len(ids))]
        case "split":
            parts = [_part(row, start, start + longest) for start in range(0, len(ids), longest)]
        case _:
            return []
    return [part for part in parts if part.spans]


def _part(row: Encoded, start: int, end: int) -> Encoded:
    """Return the tokens from `start` to before `end` as a row, the first with nothing before it to be learned from."""
    spans = [
        Span(max(span.start - start, 1), min(span.end, end) - start, span.role)
        for span in row.spans
        if span.start < end and span.end > start + 1
    ]
    return Encoded(row.input_ids[start:end], spans, 0)


def _holds(value: Any, column: str) -> bool:
    """Tell whether a row has a column, a.b being a column inside a column."""
    for name in [column] if isinstance(value, dict) and column in value else column.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def _texts(example: Example) -> tuple[str, str]:
    """Return the last question of a conversation and the answer to it."""
    messages = example.messages or []
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return "", ""
    questions = [message for message in messages[: answers[-1]] if message["role"] == "user"]
    question, answer = questions[-1].get("content") if questions else "", messages[answers[-1]]
    return question or "", answer.get("content") or json.dumps(answer.get("tool_calls"), ensure_ascii=False)


def _hashes(row: Encoded, pieces: list[Piece]) -> tuple[int, int]:
    """Return a 64-bit hash of the row and one of what comes before its last answer (of the row if nothing does)."""
    if pieces:
        last = max((place for place, piece in enumerate(pieces) if piece.role == "assistant"), default=0)
        before = "".join(piece.text for piece in pieces[:last]).encode()
        behind = "".join(piece.text for piece in pieces[last:]).encode()
    else:
        before = repr(row.input_ids[: row.prompt]).encode() if row.prompt > 1 else b""
        behind = repr((row.input_ids[row.prompt :], row.spans)).encode()
    whole = hashlib.blake2b(before, digest_size=8)
    prompt = whole.copy() if before else None
    whole.update(b"\0" + behind)
    number = int.from_bytes(whole.digest())
    return number, int.from_bytes(prompt.digest()) if prompt else number


def _batch(rows: list[Encoded], texts: list[tuple[str, str]], source: int) -> bytes:
    """Return rows in the bytes of Arrow's IPC, as Result describes them."""
    import numpy as np
    import pyarrow

    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int32)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    ids = np.array(list(itertools.chain.from_iterable(row.input_ids for row in rows)), dtype=np.int32)
    bounds = [(number, start, end) for number, row in enumerate(rows) for start, end, _ in row.spans]
    which, starts, ends = np.array(bounds, dtype=np.int64).reshape(-1, 3).T
    begin = offsets[which]
    # One more where learned tokens begin, one less where they end: the sum so far is 1 on learned tokens only.
    steps = np.bincount(begin + starts, minlength=len(ids) + 1) - np.bincount(begin + ends, minlength=len(ids) + 1)
    labels = np.where(np.cumsum(steps)[:-1] == 1, ids, np.int32(IGNORED))
    columns: dict[str, Any] = {
        "input_ids": pyarrow.ListArray.from_arrays(offsets, ids),
        "labels": pyarrow.ListArray.from_arrays(offsets, labels),
        "length": lengths,
        "supervised": np.bincount(which, ends - starts, len(rows)).astype(np.int32),
        "source": np.full(len(rows), source, np.int16),
        "prompt": np.array([row.prompt for row in rows], dtype=np.int32),
        **{field: [pair[number] for pair in texts] for number, field in enumerate(FIELDS)},
    }
    kind = schema(held_out=True)
    arrays = [pyarrow.array(columns[field.name], field.type) for field in kind]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=kind).serialize().to_pybytes()
