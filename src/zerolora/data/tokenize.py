"""Tokenizes rows on all cores. Results are collected in the order of the files, whatever the number of workers."""

import collections
import concurrent.futures
import gc
import hashlib
import itertools
import json
import mmap
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerolora.config.settings import PrepareSettings
from zerolora.data.answer_tokens import Answers, fitted_answers, hashes, parted, prompts_of
from zerolora.data.encode import CONTEXT, NOTHING, Encoder, Piece, Tokens, last_answer
from zerolora.data.example import BadRow, Example
from zerolora.data.formats import parse
from zerolora.data.formats.leaves import Unread
from zerolora.data.formats.reading import Reading, Seen
from zerolora.data.formats.selection import better_answer, selected
from zerolora.data.formats.template_arguments import KEYWORDS
from zerolora.data.normal_form import normal_form
from zerolora.data.prepared_rows import FIELDS, HASHES, IGNORED, ROW, SPLITS, schema
from zerolora.data.ragged import Ragged
from zerolora.data.records import Chunk
from zerolora.data.sampled_prompts import prompt_key
from zerolora.data.sampled_rows import CUT_SAMPLED, NOT_SAMPLED_FROM, prompt_hash
from zerolora.data.source_files import other_form
from zerolora.data.special_tokens import embedding_rows
from zerolora.data.template import Template
from zerolora.data.truncation import NO_LIMITS, Limits, Parts, fitted, long_enough
from zerolora.errors import UserError, shown
from zerolora.files import canonical
from zerolora.machine.parents import end_at_parents_death
from zerolora.model.added_tokens import extend
from zerolora.model.architecture import tokenizer_of
from zerolora.model.bounded_tokenizer import in_worker, shared_message, text_of
from zerolora.types import RowKind

# Characters of a row. Tokenizing takes about 65 bytes of memory for each, measured on a row of 200 MB.
LONGEST = 2**31 - 1  # tokens of a row
STAND_IN = "."
"""An answer, where any would do."""
LONGEST_TEXT = 1 << 24
WITHOUT_PARTS = BadRow(
    "has no answer behind a prompt, whose tokens max_prompt_length and max_answer_length limit; remove the row or these"
    " keys"
)


class Job(NamedTuple):
    """A chunk of rows, with the index of its source and the form of its rows.

    most: only the first `most` rows are read; None for all. seen: a row of that form, as in rows.jsonl:12; "" if the
    config sets the form.
    """

    source: int
    format: str
    reading: Reading
    chunk: Chunk
    most: int | None = None
    seen: str = ""


class Dropped(NamedTuple):
    """A dropped row: its place in the file, the policy (bad_row or too_long), the reason, and the row as JSON, since a
    deeply nested value cannot be pickled. form: another form in which it would be valid."""

    place: str
    kind: str
    reason: str
    row: str
    form: str = ""


class Result(NamedTuple):
    """The result of a chunk.

    file: its rows, an Arrow record batch of `prepared_rows.schema(held_out=True)`. hashes: of each row, of its prompt,
    and of the normal form (normal_form.py) of the prompt's own turns, whatever system prompt the settings add (the
    prompt's again if no rows are held out), and of preference data also of the row that would contradict it, uint64
    [rows, 3 or 4]. continued: the indices of rows that are further parts of the row before, cut by too_long. origin:
    the data file. counts: truncated rows, turns and supervised tokens by role, stop tokens. seen: use of the rows'
    columns and their messages' keys. unread: what nothing reads. progress: bytes of the file.
    """

    file: Path
    hashes: Any
    continued: Any
    source: int
    origin: str
    read: int
    dropped: list[Dropped]
    counts: dict[str, int]
    seen: Seen
    unread: Unread
    progress: int


def tokenize(jobs: Iterable[Job], work: "ChunkTokenizer", workers: int, folder: Path) -> Generator[Result, None, None]:
    """Yield the result of every job, in order, from `workers` processes that write to `folder`.

    Close the generator before removing `folder`; closing waits for the processes. Raises UserError if a worker dies.
    """
    files = (folder / f"{number}.arrow" for number in itertools.count())
    tasks: Iterator[tuple[Job, Path]] = zip(jobs, files, strict=False)
    first = list(itertools.islice(tasks, 2))
    tasks = itertools.chain(first, tasks)
    if workers == 1 or len(first) < 2:
        yield from itertools.starmap(work, tasks)
        return
    # Forked workers share the loaded tokenizer.
    _WORK[:] = [work]
    message = shared_message()
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(workers, context, _start, (message,)) as pool:
        waiting: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
        try:
            for job, file in tasks:
                waiting.append(pool.submit(_run, job, file))
                if len(waiting) > 2 * workers:  # limits the chunks in memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                text_of(message)
                or "a tokenizing process died, most likely for lack of memory; give the machine or the job more, "
                "or fewer cores"
            ) from None
        finally:
            for future in waiting:
                future.cancel()


_WORK: list["ChunkTokenizer"] = []


def _start(message: mmap.mmap) -> None:
    in_worker(message)
    end_at_parents_death()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent handles it
    # Each garbage collection would traverse all loaded objects; ten chunks leave little garbage.
    gc.freeze()
    gc.disable()


def _run(job: Job, file: Path) -> Result:
    if file.stem.endswith("0"):
        gc.collect()
    return _WORK[0](job, file)


class ChunkTokenizer:
    """Tokenizes a chunk of rows into a Result. Raises UserError if the model does not support the settings."""

    def __init__(self, model: Path, settings: PrepareSettings) -> None:
        # Each worker process uses one core; the tokenizer's own threads would only compete with them.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        tokenizer = tokenizer_of(model)
        self.added = extend(tokenizer, settings.add_special_tokens, settings.add_tokens)
        if self.added and not (model / "tokenizer.json").is_file():
            raise UserError(
                f"prepare: add_tokens and add_special_tokens: {model} has no tokenizer.json for merge to write them "
                "to; save the model's tokenizer there with transformers' save_pretrained"
            )
        self.max_length, self.too_long, self.kind = settings.max_length, settings.too_long, settings.rows
        if settings.concatenate and self.too_long == "split":
            self.max_length = LONGEST  # cut where they are concatenated alone
        self.min_length, self.end = settings.min_length, settings.append_token or ""
        self.prompts = settings.prompts
        self.without_system = settings.drop_system
        self.limits = Limits(settings.max_prompt_length, settings.max_answer_length)
        self.template = Template(tokenizer, settings, model)
        self.encoder = Encoder(tokenizer)
        self.tokenizer, self.rows = tokenizer, embedding_rows(model, tokenizer, settings)
        self.vocabulary = len(tokenizer) if self.rows is None else min(len(tokenizer), self.rows)
        # Two prompts are compared by it only if one of them is held out.
        self.normal = settings.held_out is not None or any(settings.holds_out(split) for split in SPLITS[1:])
        # Some tokenizers define a BOS token that they never add to a text.
        self.bos = tokenizer.bos_token_id if self.template.bos else None

    def __call__(self, job: Job, file: Path) -> Result:
        """Tokenize a chunk's rows and write them to `file`."""
        counts: collections.Counter[str] = collections.Counter()
        seen, unread = Seen(), Unread()
        job = job._replace(reading=replace(job.reading, arguments=self.template.variables))
        columns = job.reading.columns
        read: list[tuple[str, Any]] = []
        rows: list[_Row] = []
        bad: dict[int, tuple[str, str]] = {}  # policy and reason, by index of the record
        others: dict[int, str] = {}  # other form, by index of the record
        for number, (place, value) in enumerate(itertools.islice(job.chunk.records(), job.most)):
            read.append((place, value))
            try:
                if isinstance(value, BadRow):
                    raise value
                if columns:
                    counts.update(f"column.{field}" for field, column in columns.items() if _holds(value, column))
                if (reading := self._reading(value, job.reading, counts)) is None:
                    continue
                try:
                    example = parse(value, job.format, reading, seen, unread, place)
                except BadRow:
                    if form := other_form(value, job.format, job.reading, self.kind):
                        others[number] = form
                        raise _of_other_form(job, form) from None
                    raise
                if self.without_system:
                    example = example.without_system()
                if (length := _characters(example)) > LONGEST_TEXT:
                    kind = "too_long" if self.too_long in ("fail", "drop") else "bad_row"
                    most = f"more than the {LONGEST_TEXT:,} that are read at once"
                    bad[number] = kind, f"has {length:,} characters, {most}; split it up"
                    continue
                pieces = [] if example.tokens else self._pieces(example)
                rejected = self._pieces(other) if (other := _rejected(example)) else []
                rows.append(_Row(number, example, pieces, rejected, prompt_hash(value)))
            except BadRow as error:
                bad[number] = "bad_row", str(error)
            except RecursionError:
                bad[number] = "bad_row", "is nested too deep to be read; flatten or remove it"
        write = self._write_texts if self.kind == "texts" else self._write_answers
        batch, hashes_of_rows, continued = write(job, rows, counts, bad)
        file.write_bytes(batch)
        return Result(
            file,
            hashes_of_rows,
            continued,
            job.source,
            job.chunk.file,
            len(read),
            [
                Dropped(read[number][0], *bad[number], _as_text(read[number][1]), others.get(number, ""))
                for number in sorted(bad)
            ],
            dict(+counts),
            seen,
            unread.end(),
            job.chunk.progress,
        )

    def _reading(self, value: dict[str, Any], reading: Reading, counts: collections.Counter[str]) -> Reading | None:
        """Return how to read a row, with its better answer as the chosen one; None, and count it, for a row that the
        config excludes."""
        if reading.where and not selected(value, reading):
            counts["rows.excluded"] += 1
            return None
        if reading.better:
            verdict = better_answer(value, reading.better)
            if verdict == "tie":
                counts["rows.tied"] += 1
                return None
            if verdict == "second":
                counts["rows.swapped"] += 1
                return reading.swapped
        return reading

    def _pieces(self, example: Example) -> list[Piece]:
        """Return the pieces of a row, which end with `append_token`."""
        pieces = self.template.pieces(example)
        if self.end and not pieces[-1].text.endswith(self.end):
            pieces[-1] = pieces[-1]._replace(text=pieces[-1].text + self.end)
        return pieces

    def _write_texts(
        self, job: Job, rows: list["_Row"], counts: collections.Counter[str], bad: dict[int, tuple[str, str]]
    ) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return a chunk's rows as an Arrow record batch, their hashes, and which are further parts of a row (Result).
        Updates counts and bad rows."""
        tokens = self._checked(rows) if job.format == "tokens" else self.encoder.encode([row.pieces for row in rows])
        self._check_vocabulary(tokens)
        self._check_prompts(rows, tokens, tokens.prompt)
        partless = [] if self.limits == NO_LIMITS else np.flatnonzero(tokens.prompt == 0).tolist()
        tokens.wrong.update(dict.fromkeys(partless, WITHOUT_PARTS))
        bad |= {rows[number].number: ("bad_row", str(error)) for number, error in tokens.wrong.items()}
        parts = fitted(tokens, self.max_length, self.too_long, self.bos, self.limits)
        fitting_rows = set(parts.row.tolist())
        parts = long_enough(parts, tokens.ids.lengths, self.min_length)
        used = set(parts.row.tolist())
        counts["rows.excluded"] += len(fitting_rows) - len(used)
        self._count(counts, [row for number, row in enumerate(rows) if number in used])
        for number, row in enumerate(rows):
            if number not in fitting_rows and number not in tokens.wrong:
                bad[row.number] = "too_long", self._too_long(tokens, number)
        _count_roles(counts, parts.tokens)
        cut = "rows.split" if self.too_long == "split" else "rows.truncated"
        long = self._long(tokens)
        counts[cut] += int(long[list(used)].sum())
        further = np.concatenate([[False], parts.row[1:] == parts.row[:-1]])[: len(parts.row)]
        texts = []
        conversations = []
        for number, again, prompt in zip(parts.row.tolist(), further.tolist(), parts.tokens.prompt, strict=True):
            # A part of a row is not asked for, so it needs no answer. Its first has the question, to find it elsewhere.
            question, expected = "", ""
            if not again:
                example = rows[number].example
                question, expected = _texts(example, self.template.answer_index(example))
            texts.append((question, "" if long[number] and self.too_long == "split" else expected))
            conversations.append(self._before_answer(rows[number]) if self.prompts and prompt else "")
        hashes_of_rows = self._hashes(parts, rows, tokens)
        batch = _batch(parts.tokens, texts, job.source, hashes_of_rows, conversations if self.prompts else None)
        return batch, hashes_of_rows, np.flatnonzero(further)

    def _write_answers(
        self, job: Job, rows: list["_Row"], counts: collections.Counter[str], bad: dict[int, tuple[str, str]]
    ) -> tuple[Any, np.ndarray, np.ndarray]:
        """Do the same for rows of preference data, which are never cut into parts."""
        texts = [[row.pieces for row in rows], *([[row.rejected for row in rows]] if self.kind == "pairs" else [])]
        sequences = [self.encoder.encode(pieces) for pieces in texts]
        for tokens in sequences:
            self._check_vocabulary(tokens)
        prompts = prompts_of(sequences)
        self._check_prompts(rows, sequences[0], prompts)
        for tokens in reversed(sequences):
            bad |= {rows[number].number: ("bad_row", str(error)) for number, error in tokens.wrong.items()}
        fitting = fitted_answers(sequences, prompts, self.max_length, self.too_long, self.bos, self.limits)
        bad |= {rows[number].number: ("too_long", reason) for number, reason in fitting.too_long.items()}
        used = [rows[number] for number in fitting.row.tolist()]
        self._count(counts, [*used, *(row.other for row in used if row.rejected)])
        for tokens in fitting.sequences:
            _count_roles(counts, tokens)
        counts["rows.truncated"] += fitting.shortened
        hashes_of_rows = np.zeros((len(used), 4), np.uint64)
        for number, (_, example, pieces, rejected, _) in enumerate(used):
            parts = [parted(each) for each in (pieces, rejected) if each]
            row, prompt, contrary = hashes(parts[0][0], [answer for _, answer in parts], example.desirable)
            asked_for = _asked(example, example.prompt or self.template.answer_index(example))
            normal = _normal_hash(asked_for or _joined(parts[0][0])) if self.normal else prompt
            hashes_of_rows[number] = row, prompt, normal, contrary
        asked = [_texts(row.example, self.template.answer_index(row.example)) for row in used]
        whole = fitting.prompt == prompts[fitting.row]
        conversations = [self._before_answer(row) if kept else "" for row, kept in zip(used, whole, strict=True)]
        asked_again = conversations if self.prompts else None
        batch = _batch_of_answers(fitting, used, asked, job.source, hashes_of_rows, asked_again)
        return batch, hashes_of_rows, np.zeros(0, np.int64)

    def _before_answer(self, row: "_Row") -> str:
        """Return the conversation before a row's last answer as the JSON of a row. Read again, with another answer, it
        begins with the same text, whatever that answer is; "" if it would not, or if there is none."""
        messages, index = row.example.messages, self.template.answer_index(row.example)
        if not self.prompts or messages is None or not index:
            return ""
        value: dict[str, Any] = {"messages": messages[:index]}
        if row.example.tools:
            value["tools"] = row.example.tools
        if row.example.arguments:
            value[KEYWORDS] = row.example.arguments
        text = json.dumps(value, ensure_ascii=False)
        answered = json.loads(text)
        answered["messages"].append({"role": "assistant", "content": STAND_IN})
        try:
            again = self._pieces(parse(answered, "messages", Reading(arguments=self.template.variables)))
        except BadRow:
            return ""
        before = row.pieces[: last_answer(row.pieces)] if self.kind == "texts" else parted(row.pieces)[0]
        same = _joined(before) == _joined(again[: last_answer(again)])
        return text if same else ""

    def _hashes(self, parts: Parts, rows: list["_Row"], tokens: Tokens) -> np.ndarray:
        """Return 64-bit hashes of each part's whole row, of its prompt, and of the prompt's normal form; of a row
        without a prompt those of the row again, and without `self.normal` that of the prompt."""
        values = [(0, 0, 0)] * len(rows)
        for number in set(parts.row.tolist()):
            pieces = rows[number].pieces
            text: str | None = None
            if pieces:
                last = last_answer(pieces)
                text = _joined(pieces[:last] or pieces)
                before = text.encode() if last else b""
                after = _joined(pieces[last:]).encode()
                if rows[number].example.supervised or rows[number].example.prompt:  # rows of the same text may differ
                    after += repr(_supervised_ranges(pieces)).encode()
            else:
                ids, prompt = tokens.ids[number], tokens.prompt[number]
                supervised = tokens.supervised_role[tokens.ids.offsets[number] : tokens.ids.offsets[number + 1]]
                before = ids[:prompt].tobytes() if prompt > 1 else b""
                after = ids[prompt:].tobytes() + supervised.tobytes()
            whole = hashlib.blake2b(before, digest_size=8)
            first = whole.copy() if before else None
            whole.update(b"\0" + after)
            row = int.from_bytes(whole.digest())
            own = int.from_bytes(first.digest()) if first else row
            normal = own
            if text is not None and self.normal:
                example = rows[number].example
                normal = _normal_hash(_asked(example, self.template.answer_index(example)) or text)
            values[number] = row, own, normal
        result: np.ndarray = np.array(values, np.uint64).reshape(-1, 3)[parts.row]
        return result

    def _check_prompts(self, rows: list["_Row"], tokens: Tokens, prompts: np.ndarray) -> None:
        """Make the rows wrong whose answers were sampled from other prompts than these, or would be if they were cut:
        [rows]. Policies that drop rows are left to them."""
        cut = self.too_long not in ("fail", "drop")
        for number, row in enumerate(rows):
            if row.sampled_from is None or number in tokens.wrong:
                continue
            if prompt_key(tokens.ids[number][: prompts[number]]).hex() != row.sampled_from:
                tokens.wrong[number] = NOT_SAMPLED_FROM
            elif cut and self._long(tokens)[number]:
                tokens.wrong[number] = CUT_SAMPLED

    def _check_vocabulary(self, tokens: Tokens) -> None:
        """Raise UserError if the tokenizer writes a token for which the model has no embedding."""
        largest = int(tokens.ids.values.max(initial=0))
        if self.rows is not None and largest >= self.rows:
            raise UserError(
                f"the tokenizer writes {shown(self.tokenizer.convert_ids_to_tokens(largest))} as token {largest}, but "
                f"the model's embeddings have {self.rows} rows (vocab_size in config.json); take its own tokenizer"
            )

    def _long(self, tokens: Tokens) -> np.ndarray:
        """Return whether each row, its prompt or its answer is too long."""
        long: np.ndarray = np.logical_or(*self.limits.exceeded(tokens)) | (tokens.ids.lengths > self.max_length)
        return long

    def _too_long(self, tokens: Tokens, number: int) -> str:
        """Return why all of a row is dropped, and a remedy that is not set already."""
        length, policy = tokens.ids.lengths[number], self.too_long
        prompt = int(tokens.prompt[number])
        for part, count, over, limit in zip(
            ("prompt", "answer"), (prompt, length - prompt), self.limits.exceeded(tokens), self.limits, strict=True
        ):
            if over[number]:
                has = f"has {count} tokens in its {part}, max_{part}_length is {limit}"
                if policy in ("fail", "drop"):
                    drop = "drop, " if policy == "fail" else ""
                    others = "truncate_left or truncate_right"
                    return f"{has}; shorten it, raise max_{part}_length, or set too_long: {drop}{others}"
                return f"{has}, and {policy} leaves none of its supervised tokens; raise max_{part}_length"
        has = f"has {length} tokens, max_length is {self.max_length}"
        if policy in ("fail", "drop"):
            others = "truncate_left, truncate_right or split"
            drop = "drop, " if policy == "fail" else ""
            return f"{has}; shorten it, raise max_length, or set too_long: {drop}{others}"
        roles = tokens.supervised_role[tokens.ids.offsets[number] : tokens.ids.offsets[number + 1]]
        supervised = np.flatnonzero(roles != CONTEXT) + 1
        first, last = int(supervised[0]), int(supervised[-1])
        # The first token of the remaining part is never supervised.
        needed = length - last + 2 if policy == "truncate_left" else max(first, self.max_length + 1)
        remedy = f"raise max_length to {needed} or more"
        if policy != "split":
            other = "truncate_right" if policy == "truncate_left" else "truncate_left"
            remedy = f"{remedy}, or set too_long: {other} or split"
        stand = f"end at token {last}" if policy == "truncate_left" else f"begin at token {first}"
        return f"{has}, and {policy} leaves none of its supervised tokens, which {stand}; {remedy}"

    def _checked(self, rows: list["_Row"]) -> Tokens:
        """Return rows of the form tokens, checked against the vocabulary."""
        wrong = {}
        tokens, targets = [], []
        for number, row in enumerate(rows):
            assert row.example.tokens is not None and row.example.labels is not None
            largest = max(row.example.tokens)
            if largest >= self.vocabulary:
                wrong[number] = BadRow(
                    f"input_ids holds {largest}, but the model knows {self.vocabulary} tokens only; "
                    "tokenize it with this model's tokenizer"
                )
            tokens.append([0] if number in wrong else row.example.tokens)
            targets.append([0] if number in wrong else row.example.labels)
        ids, labels = Ragged.of(tokens), Ragged.of(targets).values
        supervised = np.where(labels == IGNORED, CONTEXT, 0).astype(np.int8)
        supervised[ids.heads] = CONTEXT
        # The last answer is the last contiguous range of supervised tokens.
        begins = (supervised != CONTEXT) & np.concatenate([[True], supervised[:-1] == CONTEXT])
        last = np.maximum.accumulate(np.where(begins, np.arange(len(supervised)), 0))
        result = Tokens(ids, supervised, last[ids.offsets[1:] - 1] - ids.offsets[:-1], ["tokens"], wrong)
        for number in np.flatnonzero(result.supervised == 0).tolist():
            wrong.setdefault(number, NOTHING)
        return result

    def _count(self, counts: collections.Counter[str], rows: list["_Row"]) -> None:
        """Count the turns of rows, the supervised ones, and their stop tokens."""
        turns: list[str] = []
        answers: list[Piece] = []
        for _, example, pieces, *_ in rows:
            messages = example.messages or ()
            turns += [message["role"] for message in messages]
            answers += [piece for piece in pieces if piece.supervised and piece.role]
            if example.supervised:
                for message, supervised in zip(messages, example.supervised, strict=True):
                    if supervised is not None:
                        counts[f"turns_{'put_in' if supervised else 'left_out'}.{message['role']}"] += 1
            if example.prompt:
                counts.update(f"turns_of_prompts.{message['role']}" for message in messages[: example.prompt])
        for role, number in collections.Counter(turns).items():
            counts[f"turns.{role}"] += number
        for role, number in collections.Counter(str(piece.role) for piece in answers).items():
            counts[f"supervised_turns.{role}"] += number
        for text, _, _ in answers:
            for stop in self.template.stops:
                if text.endswith(stop):
                    counts[f"stop.{stop}"] += 1
                    break


class _Row(NamedTuple):
    """A readable row: its index in the chunk, and its pieces (none for the form tokens); of a pair also those with the
    rejected answer; of a sampled answer the hash of the prompt that it was sampled from."""

    number: int
    example: Example
    pieces: list[Piece]
    rejected: list[Piece]
    sampled_from: str | None = None

    @property
    def other(self) -> "_Row":
        """A pair's rejected answer as a row."""
        return _Row(self.number, _rejected(self.example) or self.example, self.rejected, [])


def _rejected(example: Example) -> Example | None:
    """Return the conversation with the rejected answer of a pair."""
    return example._replace(messages=example.rejected, rejected=None) if example.rejected else None


def _joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _count_roles(counts: collections.Counter[str], tokens: Tokens) -> None:
    """Count the supervised tokens of each role."""
    kinds = tokens.supervised_role[tokens.supervised_role != CONTEXT]
    numbers = np.bincount(kinds, minlength=len(tokens.roles)).tolist()
    for role, supervised in zip(tokens.roles, numbers, strict=True):
        counts[f"supervised_tokens.{role}"] += supervised


def _of_other_form(job: Job, form: str) -> BadRow:
    like = f"like {job.seen}" if job.seen else "as its format says"
    return BadRow(
        f"is of the form {form}, but its source is read as {job.format}, {like}; put rows of one form into files "
        "of their own, and name these in sources, each with its format"
    )


def _characters(example: Example) -> int:
    """Return the approximate number of characters of a row, without its tool calls."""
    result = len(example.text or "")
    for message in example.messages or ():
        result += len(message["content"])
        if len(message) > 2:
            result += len(message.get("reasoning_content", ""))
    return result


def _as_text(value: Any) -> str:
    """Return a row as JSON: null if it could not be read, its beginning as text if JSON has no form for it."""
    if isinstance(value, BadRow):
        return "null"
    try:
        return canonical(value)
    except (RecursionError, TypeError, ValueError):
        return canonical(shown(value))


def _holds(value: Any, column: str) -> bool:
    """Return whether a row has a column; a.b is the field b inside the column a."""
    for name in [column] if isinstance(value, dict) and column in value else column.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def _texts(example: Example, index: int | None) -> tuple[str, str]:
    """Return the answer at `index`, and the question before it; the question first."""
    messages = example.messages
    if messages is None or index is None:
        return "", ""
    question = next((each["content"] for each in reversed(messages[:index]) if each["role"] == "user"), "")
    answer = messages[index]
    return question, answer["content"] or json.dumps(answer.get("tool_calls"), ensure_ascii=False)


def _asked(example: Example, end: int | None) -> str:
    """Return what a row asks in its first `end` messages, "" if nothing: the same under any system prompt of the
    settings and in any template. The row's own system prompt and tools, in which the material of a question may be,
    count."""
    messages = (example.messages or [])[: end or 0]
    tools = canonical(example.tools) if messages and example.tools else ""
    return "".join([*map(_turn_text, messages), tools])


def _turn_text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return f"{message['role']}\n{message['content']}{canonical(calls) if calls else ''}\n"


def _normal_hash(text: str) -> int:
    """Return a 64-bit hash of a text's normal form."""
    return int.from_bytes(hashlib.blake2b(normal_form(text).encode(), digest_size=8).digest())


def _supervised_ranges(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Return begin and end of the supervised parts of a row's text."""
    result: list[tuple[int, int]] = []
    position = 0
    for piece in pieces:
        begin, position = position, position + len(piece.text)
        if piece.supervised and result and result[-1][1] == begin:
            begin = result.pop()[0]
        if piece.supervised:
            result.append((begin, position))
    return result


def _batch(
    tokens: Tokens, texts: list[tuple[str, str]], source: int, hashes: np.ndarray, conversations: list[str] | None
) -> Any:
    """Serialize rows, each with its question and expected answer, as an Arrow record batch (see Result). conversations:
    the column ROW, if there is one."""
    columns = {**_columns(tokens), **_of_rows(tokens, texts, source, hashes)}
    columns |= {"length": tokens.ids.lengths.astype(np.int32), "supervised": tokens.supervised.astype(np.int32)}
    return _serialized(columns, "texts", conversations)


def _batch_of_answers(
    fitting: Answers,
    rows: list[_Row],
    texts: list[tuple[str, str]],
    source: int,
    hashes: np.ndarray,
    conversations: list[str] | None,
) -> Any:
    """Do the same for rows of preference data."""
    first, *others = fitting.sequences
    columns = {**_columns(first), **_of_rows(first, texts, source, hashes), "prompt": fitting.prompt.astype(np.int32)}
    columns |= {
        "length": np.sum([tokens.ids.lengths for tokens in fitting.sequences], 0).astype(np.int32),
        "supervised": np.sum([tokens.supervised for tokens in fitting.sequences], 0).astype(np.int32),
    }
    if not others:
        labels = [bool(row.example.desirable) for row in rows]
        columns |= {
            "prompt_hash": hashes[:, 1].astype(np.uint64).view(np.int64),
            "desirable": np.array(labels, np.int8),
        }
        return _serialized(columns, "labelled", conversations)
    columns |= _columns(others[0], "rejected_")
    columns["chosen_supervised"] = first.supervised.astype(np.int32)
    columns["rejected"] = [_texts(row.other.example, len(row.other.example.messages or ()) - 1)[1] for row in rows]
    return _serialized(columns, "pairs", conversations)


def _columns(tokens: Tokens, prefix: str = "") -> dict[str, Any]:
    """Return two columns for rows: their tokens and their labels."""
    import pyarrow

    ids, offsets = tokens.ids.values, tokens.ids.offsets.astype(np.int32)
    labels = np.where(tokens.supervised_role == CONTEXT, np.int32(IGNORED), ids)
    return {
        f"{prefix}input_ids": pyarrow.ListArray.from_arrays(offsets, ids),
        f"{prefix}labels": pyarrow.ListArray.from_arrays(offsets, labels),
    }


def _of_rows(tokens: Tokens, texts: list[tuple[str, str]], source: int, hashes: np.ndarray) -> dict[str, Any]:
    import pyarrow

    return {
        HASHES: pyarrow.FixedSizeListArray.from_arrays(hashes[:, :3].flatten(), 3),
        "source": np.full(len(texts), source, np.int16),
        "prompt": tokens.prompt.astype(np.int32),
        **{field: [pair[number] for pair in texts] for number, field in enumerate(FIELDS)},
    }


def _serialized(columns: dict[str, Any], rows: RowKind, conversations: list[str] | None) -> Any:
    import pyarrow

    kind = schema(held_out=True, rows=rows, prompts=conversations is not None)
    columns = columns if conversations is None else {**columns, ROW: conversations}
    arrays = [pyarrow.array(columns[field.name], field.type) for field in kind]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=kind).serialize()
