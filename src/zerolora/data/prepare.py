"""Stage prepare: tokenizes rows of any source, masks their labels, and writes three splits in Arrow's format.

    zerolora stage prepare DATASET

Writes train.arrow, validation.arrow and test.arrow (columns: prepared_rows.schema), prompts.arrow (prompts to sample
from, sampled_prompts.py), stats.json and lengths.csv (counts and lengths of rows), mask.json and mask.html (the loss
mask, verified and shown), dropped.jsonl and manifest.json (hashes of inputs and outputs). Memory grows by about 25
bytes for each row.
"""

import collections
import concurrent.futures
import contextlib
import os
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zerolora import log
from zerolora.config.settings import PrepareSettings
from zerolora.data.concatenate import concatenated
from zerolora.data.formats import FORMS
from zerolora.data.formats.leaves import Unread, undecided_lines
from zerolora.data.formats.reading import reading_of
from zerolora.data.mask import Proof, ReadSource, write_page
from zerolora.data.mixture import Index, Mixture, contradictory, mix
from zerolora.data.other_splits import OtherSplits
from zerolora.data.prepared_rows import FIELDS, PROMPTS, open_table, schema
from zerolora.data.readers import chunks
from zerolora.data.records import Chunk
from zerolora.data.sampled_prompts import SampledPrompts
from zerolora.data.source_files import SourceFiles, form_of, left_out, sources_of
from zerolora.data.statistics import Statistics, write_lengths
from zerolora.data.tokenize import ChunkTokenizer, Dropped, Job, Result, tokenize
from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, canonical, describe, sha256, staged_directory, write_json
from zerolora.log import LOGGER
from zerolora.progress import Progress
from zerolora.train.objectives import reading
from zerolora.types import RowKind

SHOWN = 5  # mistakes reported at a time
CONTRARY = {"pairs": "the same answers the other way round", "labelled": "the same answer with the opposite label"}
"""What a row that contradicts another one has, by what rows hold."""


def prepare(
    settings: PrepareSettings,
    model: Path,
    output: Path,
    workers: int | None = None,
    selections: Path = Path("results/selections"),
    datasets: Path = Path("results/data"),
) -> None:
    """Write a data set, tokenized for the model of manifest `model`, with `workers` processes (default: all cores).
    `selections` and `datasets` are the directories of selections and of other prepared data sets.

    Raises UserError, naming file and line, for rows that cannot be used, unless the settings drop them; if a split, a
    source or a file would have no row; and if a check of the mask fails. Rows dropped until then are listed beside
    `output`, in NAME.dropped.jsonl.
    """
    if not model.is_file():
        raise UserError(f"--model: {model}: is not a file; give the path of the manifest.json of a fetched model")
    sources = sources_of(settings, selections)
    forms = [form_of(source, Path(settings.path or source.place), settings.rows) for source in sources]
    _check_columns(sources, forms)
    if others := left_out(settings, sources):
        names = ", ".join(str(path.relative_to(settings.title)) for path in others[:SHOWN])
        more = f" and {len(others) - SHOWN:,} more" if len(others) > SHOWN else ""
        LOGGER.info(f"{settings.path}: no entry of sources reads {names}{more}")
    listed = output.with_name(f"{output.name}.dropped.jsonl")
    listed.unlink(missing_ok=True)
    with staged_directory(output) as staged, _kept_on_failure(staged / "dropped.jsonl", listed):
        (folder := staged / "rows").mkdir()
        size = sum(path.stat().st_size for source in sources for path in source.files)
        bar = Progress("tokenizing", size, binary=True)
        work = ChunkTokenizer(model.parent, settings)
        other = OtherSplits.of(settings, datasets, model, work) if settings.held_out else None
        results = tokenize(_jobs(sources, forms), work, workers or len(os.sched_getaffinity(0)), folder)
        statistics, proof = Statistics([source.name for source in sources], listed), Proof()
        with bar, contextlib.closing(results):
            files, index = _collect(results, staged / "dropped.jsonl", settings, statistics, proof, bar, sources)
        _check_sources(settings, sources, statistics)
        questions = partial(_questions, files, settings)
        of_sources, dropped = [source.settings for source in sources], statistics.dropped_line()
        mixture = mix(index, settings, of_sources, dropped, questions, other.held_out if other else None)
        statistics.counts |= mixture.counts
        _warn_of_contrary(index, files, settings, statistics)
        _write_splits(files, staged, mixture, statistics, proof, settings)
        folder.rmdir()
        written = [source.name for source in sources]
        if other:
            written += other.write(staged, written, statistics, proof)
        proof.check()
        if statistics.desirable in (0, len(statistics.lengths["train"])):
            word = "desirable" if statistics.desirable else "undesirable"
            which = f"{word}, and {reading('labelled')[0]} learns from both kinds"
            LOGGER.warning(
                f"{settings.title}: the answers of all training rows are {which}; "
                "add rows of the other kind, or name the right column, as in columns: {label: good}"
            )
        write_json(staged / "stats.json", statistics.flat())
        write_lengths(staged / "lengths.csv", statistics.lengths)
        write_json(staged / "mask.json", proof.as_json())
        read = [
            ReadSource(source.name, form, source.settings.columns, seen, work.template.variables)
            for source, (form, _), seen in zip(sources, forms, statistics.seen, strict=True)
        ]
        write_page(staged, work.tokenizer, settings, proof.as_json(), read)
        write_json(
            staged / MANIFEST,
            {
                "sources": written,
                "read": {str(path): sha256(path) for source in sources for path in source.files},
                "model": {"name": settings.model, "manifest_sha256": sha256(model)},
                "stop_tokens": sorted({*proof.stops, *(settings.stop_tokens or ())}),
                "pad_token": work.template.padding,
                "added_tokens": [asdict(token) for token in work.added],
                "chat_template": work.template.published(),
                "files": {name: file for name, file in describe(staged).items() if name != f"{PROMPTS}.arrow"},
            },
        )
    statistics.listed = output / "dropped.jsonl"
    if dropped := statistics.dropped_line():
        LOGGER.warning(f"{settings.title}: {dropped}")
    LOGGER.info(statistics.line())
    rows = ", ".join(f"{len(lengths):,} {split}" for split, lengths in statistics.lengths.items())
    log.result(f"{rows} rows")


def _check_columns(sources: list[SourceFiles], forms: list[tuple[str, str]]) -> None:
    """Raise UserError for columns of fields that the form of a source has not."""
    for source, (form, _) in zip(sources, forms, strict=True):
        fields = (*FORMS[form].fields, *FORMS[form].keys) if form else (*source.settings.columns,)
        if unknown := [field for field in source.settings.columns if field not in fields]:
            raise UserError(
                f"prepare: columns of {source.name}: {unknown[0]} is not a field of format {form}; choose from "
                f"{', '.join(fields)}"
            )


def _warn_of_contrary(index: Index, files: list[Path], settings: PrepareSettings, statistics: Statistics) -> None:
    """Count and report rows that contradict another one."""
    if len(contrary := contradictory(index)):
        statistics.counts["contradictory_rows"] = len(contrary)
        (_, (question,)), *_ = _questions(files, settings, contrary[:1])
        LOGGER.warning(
            f"{settings.title}: {len(contrary):,} rows contradict another one, which has "
            f"{CONTRARY[settings.rows]}; the first asks {shown(question)}"
        )


@contextlib.contextmanager
def _kept_on_failure(dropped: Path, kept: Path) -> Iterator[None]:
    """Copy the list of dropped rows, if any, on a UserError: it may show why there are too few."""
    try:
        yield
    except UserError:
        if dropped.is_file() and dropped.stat().st_size:
            shutil.copyfile(dropped, kept)
        raise


def _jobs(sources: list[SourceFiles], forms: list[tuple[str, str]]) -> Iterator[Job]:
    for number, (source, (form, seen)) in enumerate(zip(sources, forms, strict=True)):
        for chunk, most in _read(source):
            yield Job(number, form or "text", reading_of(source.settings, chunk.kind), chunk, most, seen)


def _read(source: SourceFiles) -> Iterator[tuple[Chunk, int | None]]:
    """Yield the chunks of a source, each with the number of rows to read (None: all)."""
    left = source.settings.at_most
    if isinstance(left, float):
        # Rounded as `datasets` rounds train[:20%].
        left = round(left * sum(1 for path in source.files for chunk in chunks(path) for _ in chunk.records()))
    for path in source.files:
        for chunk in chunks(path):
            if left is None:
                yield chunk, None
                continue
            count = sum(1 for _ in chunk.records())
            yield chunk, min(left, count)
            left -= min(left, count)
            if left == 0:
                return


def _check_sources(settings: PrepareSettings, sources: list[SourceFiles], statistics: Statistics) -> None:
    """Raise UserError if one of several sources yields no row, or a column of the config no value."""
    for source, counts in zip(sources, statistics.by_source, strict=True):
        if counts["excluded_rows"] and counts["read_rows"] == counts["excluded_rows"]:
            raise UserError(
                f"{source.place}: where and better keep none of its {counts['read_rows']:,} rows; correct them"
            )
        if len(sources) > 1 and counts["read_rows"] == counts["dropped_rows"]:
            problem = "contains no rows;"
            if read := counts["read_rows"]:
                dropped = statistics.dropped_line()
                problem = f"none of its {read:,} rows is left; {dropped}; correct them, or"
            raise UserError(f"{source.place}: {problem} take it out of sources")
    for number, (source, seen) in enumerate(zip(sources, statistics.columns, strict=True)):
        for field, column in source.settings.columns.items():
            if statistics.read and not seen[f"column.{field}"] and not statistics.has_key(number, column):
                raise UserError(
                    f"prepare: columns of {source.name}: no row has a value in {column}, for {field}; correct its "
                    "name, or take it out of columns"
                )


def _collect(
    results: Iterator[Result],
    dropped: Path,
    settings: PrepareSettings,
    statistics: Statistics,
    proof: Proof,
    bar: Progress,
    sources: list[SourceFiles],
) -> tuple[list[Path], Index]:
    """Write the dropped rows; return the files of the used rows, in order, and their index."""
    files = []
    columns = array("h"), array("Q"), array("Q"), array("Q"), array("Q")
    continued, rows = [np.zeros(0, np.int64)], 0
    unread = [Unread() for _ in sources]
    # A lone surrogate is not UTF-8; JSON escapes it as Python does.
    with dropped.open("w", encoding="utf-8", errors="backslashreplace") as rejected:
        for result in results:
            _refuse(result.dropped, settings)
            for row in result.dropped:
                why = canonical({"place": row.place, "kind": row.kind, "reason": row.reason})
                rejected.write(f'{why[:-1]}, "row": {row.row}}}\n')
            unread[result.source].merge(result.unread)
            _check_decided(unread[result.source], sources[result.source], settings.rows)
            statistics.add(result)
            files.append(result.file)
            new = (np.full(len(result.hashes), result.source, np.int16), *result.hashes.T)
            for column, part in zip(columns, new, strict=False):
                column.frombytes(part.tobytes())
            continued.append(result.continued + rows)
            rows += len(result.hashes)
            proof.add(result.counts)
            bar.update(result.progress, f"{statistics.read:,} rows")
        statistics.end_of_file()
    index = Index(*(np.array(column, copy=False) for column in columns))
    return files, index._replace(continued=np.concatenate(continued))


def _check_decided(unread: Unread, source: SourceFiles, rows: RowKind) -> None:
    """Raise UserError for what nothing reads, whatever the policy of bad rows: it is no mistake of a row."""
    if unread.undecided:
        reading = reading_of(source.settings, "")
        raise UserError("\n".join(undecided_lines(unread, reading, SHOWN, pairs=rows == "pairs")))


def _refuse(dropped: list[Dropped], settings: PrepareSettings) -> None:
    """Raise UserError for rows that the settings do not allow to drop."""
    refused = [row for row in dropped if getattr(settings, row.kind) == "fail"]
    lines = [f"{row.place}: {row.reason}" for row in refused[:SHOWN]]
    if len(refused) > SHOWN:
        lines.append(f"and {len(refused) - SHOWN} more in the next lines of that file")
    if lines:
        if any(row.kind == "bad_row" for row in refused):
            lines[-1] += "; or set bad_row: drop, which lists them in dropped.jsonl"
        raise UserError("\n".join(lines))


def _questions(
    files: list[Path], settings: PrepareSettings, rows: np.ndarray
) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Yield some rows (sorted numbers over all files) in parts, each with the questions of its rows."""
    import pyarrow

    start = 0
    for path in files:
        batch = _read_batch(path, settings)
        first, end = np.searchsorted(rows, [start, start + len(batch)])
        if first < end:
            taken = batch["question"].take(pyarrow.array(rows[first:end] - start))
            yield rows[first:end], taken.to_pylist()
        start += len(batch)


def _read_batch(path: Path, settings: PrepareSettings) -> Any:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        columns = schema(held_out=True, rows=settings.rows, prompts=settings.prompts)
        return pyarrow.ipc.read_record_batch(source.read_buffer(), columns)


def _write_splits(
    files: list[Path],
    staged: Path,
    mixture: Mixture,
    statistics: Statistics,
    proof: Proof,
    settings: PrepareSettings,
) -> None:
    """Move rows from `files` to the splits: training rows in their order, or concatenated, held-out rows in the order
    drawn, and prompts to sample from."""
    import pyarrow

    rows = settings.rows
    counts = None if settings.concatenate else statistics
    held_out: dict[str, list[Any]] = {"validation": [], "test": []}
    wanted = {name: np.sort(getattr(mixture, name)) for name in held_out}
    narrow, wide = schema(held_out=False, rows=rows), schema(held_out=True, rows=rows)
    start = 0
    looking: collections.deque[concurrent.futures.Future[None]] = collections.deque()
    with (
        SampledPrompts(staged / f"{PROMPTS}.arrow", settings, mixture) as prompts,
        # Checks written rows while the next file is read.
        concurrent.futures.ThreadPoolExecutor(1) as second,
        pyarrow.OSFile(str(staged / "train.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, narrow) as writer,
    ):
        for path in files:
            batch = _read_batch(path, settings)
            prompts.add(batch, start)
            path.unlink()  # its pages stay until the batch is gone
            times = mixture.times[start : start + len(batch)]
            taken = batch.select(narrow.names)
            if (times != 1).any():
                taken = taken.take(pyarrow.array(np.repeat(np.arange(len(batch)), times)))
            if len(taken):
                writer.write_batch(taken)
                looking.append(second.submit(_look, "train", taken, counts, proof))
                if len(looking) > 2:
                    looking.popleft().result()
            for name, numbers in wanted.items():
                first, end = np.searchsorted(numbers, [start, start + len(batch)])
                held_out[name].append(batch.select(wide.names).take(pyarrow.array(numbers[first:end] - start)))
            start += len(batch)
        for look in looking:
            look.result()
        writer.close()
        if settings.concatenate:
            _concatenate(staged, settings, statistics)
        for name, batches in held_out.items():
            # Reorder from the order of the files to the order drawn.
            order = np.argsort(np.argsort(getattr(mixture, name)))
            table = pyarrow.Table.from_batches(map(_asked, batches)).combine_chunks().take(pyarrow.array(order))
            with (
                pyarrow.OSFile(str(staged / f"{name}.arrow"), "wb") as held,
                pyarrow.ipc.new_stream(held, table.schema) as out,
            ):
                for batch in table.combine_chunks().to_batches():
                    out.write_batch(batch)
                    _look(name, batch, statistics, proof)


def _concatenate(staged: Path, settings: PrepareSettings, statistics: Statistics) -> None:
    """Replace the training rows by those that they are joined to."""
    import pyarrow

    seed = settings.seed if settings.concatenate == "shuffled" else None
    joined = staged / "joined.arrow"
    with pyarrow.OSFile(str(joined), "wb") as file, pyarrow.ipc.new_stream(file, schema(held_out=False)) as writer:
        for batch in concatenated(open_table(staged, "train"), settings.max_length, seed):
            writer.write_batch(batch)
            statistics.count("train", batch)
    joined.replace(staged / "train.arrow")


def _asked(rows: Any) -> Any:
    """Return held-out rows without the texts of those that have no prompt, which nothing asks."""
    import pyarrow

    prompted = pyarrow.compute.not_equal(rows["prompt"], 0)
    for field in FIELDS:
        texts = pyarrow.compute.if_else(prompted, rows[field], "")
        rows = rows.set_column(rows.schema.get_field_index(field), rows.schema.field(field), texts)
    return rows


def _look(split: str, rows: Any, statistics: Statistics | None, proof: Proof) -> None:
    if statistics:
        statistics.count(split, rows)
    proof.look(rows)
