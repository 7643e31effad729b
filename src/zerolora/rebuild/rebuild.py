"""`zerolora rebuild SOURCE`: the main path, and what it says.

plan      what is fetched, run and written, in hours and bytes
rerun     in a folder of its own, up to the inputs of training first, then the rest
compare   every product, to the byte, else within bounds
verdict   a line, a table, and rebuild.json in the folder
"""

import secrets
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerolora import __version__
from zerolora.errors import UserError, install_command
from zerolora.evidence.machine_words import in_words
from zerolora.files import locked, read_object, write_json
from zerolora.log import result, say
from zerolora.publish.record import names_of, raw_inputs, stage_of
from zerolora.rebuild import audit
from zerolora.rebuild.bounds import Bound, bounds, is_computed, other_kernels
from zerolora.rebuild.explanation import explained, machines, other_settings
from zerolora.rebuild.folder import make_folder, run_targets
from zerolora.rebuild.original import Original, original
from zerolora.rebuild.rebuilt_products import (
    LOSSES,
    RebuiltProduct,
    compared,
    damaged,
    not_compared,
    place_of_difference,
)
from zerolora.report.provenance import UNCOMMITTED
from zerolora.units import byte_size, counted

RESULT, SEED = "rebuild.json", "audit.json"
FOLDER = Path("work/rebuild")
RESOLVED = stage_of("resolve").target
EQUAL, WITHIN, DIFFERENT = "equal to the byte", "equal within bounds", "different"
AUDITED = "equal in the audited segments"
CODES = {EQUAL: 0, AUDITED: 0, WITHIN: 3, DIFFERENT: 1}
SHOWN = 8
"""Characters of a sha256 in the table."""


@dataclass(frozen=True)
class Options:
    """What the user asks for besides the source."""

    output: Path | None = None
    given: tuple[Path, ...] = ()
    """Files and directories with pinned inputs."""
    share: float | None = None
    """Of the segments between checkpoints, for an audit."""
    seed: int | None = None
    """Of the audit's drawing. Default: one that nobody knows before."""
    version: str | None = None
    """Another version of zerolora than the recorded one, by name."""
    trust_code: bool = False
    """Run the Python files that come with a push."""


@dataclass(frozen=True)
class RebuildVerdict:
    """How a rebuild ended."""

    verdict: str
    products: list[RebuiltProduct]
    first: dict[str, Any] | None = None
    explanation: str = ""
    bounds: tuple[Bound, ...] = ()

    @property
    def line(self) -> str:
        """The verdict in one line."""
        if self.first is None:
            return f"{self.verdict}: {self.explanation}" if self.explanation else self.verdict
        where = "".join(f", {name} {self.first[name]}" for name in ("step", "row", "tensor") if name in self.first)
        return f"{self.verdict}, first in {self.first['path']}{where}: {self.explanation}"


def rebuild(source: str, options: Options) -> int:
    """Rebuild what a source names, say how it compares, and return the exit code: 0 equal to the byte, 3 equal within
    bounds, 1 different.

    Raises UserError for a source, an input or a version that cannot be used, Stopped if it is stopped.
    """
    started = time.monotonic()
    was = original(source, FOLDER)
    folder = options.output or FOLDER / was.name
    _check_version(was, options)
    _check_code(was, options)
    seed = _seed(folder, options)
    segments = audit.drawn(was, options.share, seed) if options.share is not None else None
    _print_plan(was, folder, segments)
    with locked(folder.parent, "another rebuild is running here; run this one when it has ended"):
        was.download()
        verdict = _of_damage(was)
        if verdict is None:
            make_folder(was, folder, options.given)
            if segments:
                write_json(folder / SEED, {"seed": seed})
            project = folder / was.prefix
            verdict = _run(was, project) if segments is None else audit_run(was, project, segments)
        folder.mkdir(parents=True, exist_ok=True)
        seconds = time.monotonic() - started
        outcome = as_json(was, folder / was.prefix, verdict, seconds, segments)
        write_json(folder / RESULT, outcome)
    _print_verdict(was, verdict, folder, in_words(outcome["machine"]))
    return CODES[verdict.verdict]


def _seed(folder: Path, options: Options) -> int:
    """Return the seed of an audit: the given one, that of an audit which continues, or a new one. A seed that the
    trainer knew would leave the other segments to him."""
    if options.seed is not None:
        return options.seed
    kept = read_object(folder / SEED, "zerolora rebuild").get("seed") if (folder / SEED).is_file() else None
    return kept if isinstance(kept, int) and kept >= 0 else secrets.randbelow(2**32)


def _check_version(was: Original, options: Options) -> None:
    """Raise UserError unless the installed zerolora is the recorded one, or the user has named it."""
    if was.record is None or __version__ in (was.version, options.version):
        return
    raise UserError(
        f"{was.source}: was made by zerolora {was.version}, and {__version__} is installed; run "
        f"{install_command(f'zerolora=={was.version}')}, or pass --zerolora {__version__} to rebuild with that"
    )


def _check_code(was: Original, options: Options) -> None:
    """Raise UserError for Python files of a push, unless the user trusts them."""
    files = sorted(name for name in was.record.files if name.endswith(".py")) if was.record else []
    if files and not options.trust_code:
        raise UserError(
            f"{was.source}: comes with Python that the rebuild would run ({', '.join(files)}); read it in its "
            "record.json, then pass --trust-code"
        )


def _print_plan(was: Original, folder: Path, segments: "audit.Draw | None") -> None:
    """Say what is fetched, run and written. Raises UserError if the disk has no room for it."""
    costs = was.costs
    downloads = sum(each["bytes"] for each in was.listed.values()) if was.repository and "@" in was.repository else 0
    share = segments.share_of_steps if segments else 1.0
    needed = costs.fetched + costs.written + downloads
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    revision = f" at {was.commit}" if was.commit and was.edited is None else ""
    of = was.repository or f"run {was.run} of this project{revision}"
    say(f"rebuild   {of}, by zerolora {was.version}, in {folder}")
    say(f"fetch     {byte_size(costs.fetched + downloads)}, by sha256: {_fetched(was)}")
    say(f"run       {', '.join(was.receipts)}")
    say(f"time      about {share * costs.seconds / 3600:.2g} h of training and answering, as the original took")
    say(f"disk      {byte_size(needed)} of {byte_size(free)} that are free")
    if segments:
        say(f"audit     {segments}")
    if needed > free:
        raise UserError(
            f"{folder}: the rebuild needs {byte_size(needed)}, and {byte_size(free)} are free there; free some, or "
            "name a directory on another disk with --output"
        )


def _fetched(was: Original) -> str:
    stages = [stage for stage in was.receipts if stage.startswith("fetch")]
    return ", ".join([*stages, counted(sum(1 for _ in raw_inputs(was.receipts)), "input file")])


def _of_damage(was: Original) -> RebuildVerdict | None:
    """Return the verdict on an original whose files are not what its record says; None if they are."""
    found = list(damaged(was))
    if not found:
        return None
    first = found[0]
    return RebuildVerdict(DIFFERENT, found, {"path": first.path, "stage": first.stage}, f"{first.path} {first.note}")


def _run(was: Original, folder: Path) -> RebuildVerdict:
    """Run the pipeline in the folder, and compare what it makes. What is before training ends first: if that differs,
    nothing is trained."""
    if verdict := run_before_training(was, folder):
        return verdict
    keep = max(len(was.checkpoint_files), len(was.checkpoint_digests)) or None
    run_targets(was, folder, _targets(was), keep)
    return compare(was, folder)


def run_before_training(was: Original, folder: Path) -> RebuildVerdict | None:
    """Run the stages that training reads, and return the verdict if they or the settings differ."""
    train = f"train@{was.run}"
    run_targets(was, folder, [*was.receipts[train].inputs, RESOLVED], None)
    products = list(compared(was, folder, until=train))
    # Where kernels may round differently, what a kernel computed, as the adapter to begin with, has bounds afterwards.
    rounded = other_kernels(was, folder)
    if any(not (each.equal or (rounded and is_computed(each))) for each in products):
        return _different(was, folder, products)
    if found := other_settings(was, folder):
        stage, how = found
        path = next(iter(was.receipts[stage].outputs))
        return RebuildVerdict(DIFFERENT, products, {"path": path, "stage": stage}, f"{how}, so nothing was trained")
    return None


def _targets(was: Original) -> list[str]:
    names = names_of(was.receipts[f"train@{was.run}"]) | {"run": was.run}
    stages = ("train", "merge", "evaluate", "evaluate_base")
    return [stage_of(stage).target.format(**names) for stage in stages]


def _different(was: Original, folder: Path, products: list[RebuiltProduct]) -> RebuildVerdict | None:
    first = next((product for product in products if not product.equal), None)
    if first is None:
        return None
    return RebuildVerdict(DIFFERENT, products, place_of_difference(was, folder, first), explained(was, folder, first))


def compare(was: Original, folder: Path) -> RebuildVerdict:
    """Return the verdict on a finished rebuild."""
    products = list(compared(was, folder))
    verdict = _different(was, folder, products)
    if verdict is None:
        return RebuildVerdict(EQUAL, products)
    losses = [product for product in products if product.path.endswith(f"/{LOSSES}")]
    # Kernels that round in another way change the losses. If these are the same, other bytes are not due to kernels.
    if not other_kernels(was, folder) or all(each.equal for each in losses):
        return verdict
    limits = bounds(was, folder, products)
    if limits is None:
        return verdict
    if beyond := next((limit for limit in limits if not limit.holds), None):
        return replace(verdict, bounds=tuple(limits), explanation=f"{verdict.explanation}; beyond the bounds: {beyond}")
    return replace(verdict, verdict=WITHIN, bounds=tuple(limits))


def audit_run(was: Original, folder: Path, segments: "audit.Draw") -> RebuildVerdict:
    """Run the drawn segments, and return the verdict."""
    if verdict := run_before_training(was, folder):
        return verdict
    products = list(audit.run(was, folder, segments))
    first = next((product for product in products if not product.equal), None)
    if first is None:
        return RebuildVerdict(AUDITED, products, explanation=segments.meaning)
    place = {"path": first.path, "stage": first.stage}
    return RebuildVerdict(
        DIFFERENT, products, place, first.note or "the segment does not end in the recorded checkpoint"
    )


def as_json(
    was: Original, folder: Path, verdict: RebuildVerdict, seconds: float, segments: "audit.Draw | None" = None
) -> dict[str, Any]:
    """Return the content of rebuild.json."""
    _, machine = machines(was, folder)
    revision = f"{was.commit}{UNCOMMITTED}" if was.edited else was.commit
    place = {"repository": was.repository} if was.repository else {"revision": revision}
    return {
        "source": was.source,
        **place,
        "run": was.run,
        "version": was.version,
        "rebuilt_with": __version__ if was.record else was.version,
        "machine": machine,
        "verdict": verdict.verdict,
        "products": [product.as_json() for product in verdict.products],
        "first_difference": verdict.first,
        "explanation": verdict.explanation,
        "bounds": [str(limit) for limit in verdict.bounds],
        "not_compared": not_compared(was),
        **({"audit": segments.as_json()} if segments else {}),
        "seconds": seconds,
    }


def _print_verdict(was: Original, verdict: RebuildVerdict, folder: Path, machine: str) -> None:
    rows = [("product", "original", "rebuilt", "")]
    rows += [(each.path, _short(each.original), _short(each.rebuilt), _word(each)) for each in verdict.products]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        say("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())
    for limit in verdict.bounds:
        say(str(limit))
    if left := not_compared(was):
        say(f"not compared, since they name directories of the machine: {', '.join(left)}")
    say(f"rebuilt on {machine}")
    say(verdict.line)
    result(f"{folder / RESULT} has the whole comparison")


def _word(product: RebuiltProduct) -> str:
    if product.equal:
        return "equal" + (f", {product.note}" if product.note else "")
    return "different"


def _short(digest: str | None) -> str:
    return digest[:SHOWN] if digest else "missing"
