"""What of a config's runs would stop before their first step, without weights: `prepare` to `render` in a folder of
their own.

A dry run rehearses what it plans, and `zerolora check` all. What is not on this machine yet, or is large, is left out:
the stages themselves refuse it before anything expensive runs.
"""

import contextlib
import io
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from zerolora.config.settings import FetchDirectory, Resolved, RunSettings, SampleSettings
from zerolora.data.pack import pack_rows
from zerolora.data.prepare import prepare
from zerolora.data.sampled_prompts import size_of
from zerolora.data.source_files import sources_of
from zerolora.errors import UserError, explained
from zerolora.fetch.small_files import small_files
from zerolora.files import MANIFEST, write_json
from zerolora.log import LOGGER
from zerolora.memory.estimate import estimate
from zerolora.planner.render import render
from zerolora.probe.listed_trial import check as try_model
from zerolora.probe.untrained import untrained
from zerolora.sample.prompt_batches import check_room

LARGEST = 20_000_000
"""Bytes of rows, or of prepared rows, that take seconds."""
MOST = 8
"""Outputs of `render` that a dry run rehearses."""
MODELS, WEIGHTS = Path("resources/models"), Path("resources/weights")
RESULTS = Path("results")
Fault = tuple[str, str]
"""A job, as in render@default, and why it would stop."""


def faults(resolved: Resolved, planned: Collection[str] | None = None) -> list[Fault]:
    """Return the jobs that would stop, of those that are `planned`, or of all; each with the message of its stage.

    Of planned ones, the first MOST outputs of `render` are rehearsed: a grid's plan is to take seconds.
    """
    where = ".snakemake" if Path(".snakemake").is_dir() else "."  # on the disk of the results, whose room is checked
    with tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=where) as name, _silent():
        rehearsal = _Rehearsal(resolved, Path(name), planned)
        runs = [run for run in resolved.runs.values() if rehearsal.is_planned(f"render@{run.rendered}")]
        rendered = list(dict.fromkeys(run.rendered for run in runs))[: None if planned is None else MOST]
        for run in runs:
            if run.rendered in rendered:
                rehearsal.run(run)
        for sample in resolved.samples:
            if rehearsal.is_planned(f"sample@{sample}"):
                rehearsal.sample(sample)
        return rehearsal.faults


class _Rehearsal:
    """The stages of all runs, each once, as the pipeline has them."""

    def __init__(self, resolved: Resolved, folder: Path, planned: Collection[str] | None) -> None:
        self.faults: list[Fault] = []
        self._resolved, self._folder, self._planned = resolved, folder, planned
        self._made: dict[str, Path | None] = {}
        """The output of each job, whether it was made here or before; None if it stops, or is not rehearsed."""

    def run(self, run: RunSettings) -> None:
        """Rehearse the stages of a run."""
        name = self._resolved.prepare[run.dataset].model
        model = self._once(f"fetch@{name}", lambda: self._model(name))
        data = self._once(f"prepare@{run.dataset}", lambda: self._data(run.dataset, model))
        packing = self._once(f"pack@{run.packed}", lambda: self._packing(run, data))
        if model and data and packing:
            self._once(f"render@{run.rendered}", lambda: self._render(run, model, data, packing))

    def sample(self, name: str) -> None:
        """Rehearse a sample of a model of this project."""
        settings = self._resolved.samples[name]
        if settings.of.served:
            return
        named = self._resolved.prepare[settings.dataset].model
        model = self._once(f"fetch@{named}", lambda: self._model(named))
        data = self._once(f"prepare@{settings.dataset}", lambda: self._data(settings.dataset, model))
        if model and data:
            self._once(f"sample@{name}", lambda: self._sample(name, settings, model, data))

    def _once(self, job: str, make: Callable[[], Path | None]) -> Path | None:
        if job not in self._made:
            try:
                self._made[job] = make()
            except (UserError, OSError) as error:
                text = str(error) if isinstance(error, UserError) else explained(error)
                self._made[job] = None
                self.faults.append((job, text.replace(f"{self._folder}/", "")))
        return self._made[job]

    def is_planned(self, job: str) -> bool:
        """Return whether a job is to run."""
        return self._planned is None or job in self._planned

    def _model(self, name: str) -> Path | None:
        """Return the directory of a model's small files."""
        settings, fetched = self._resolved.fetch[name], MODELS / name
        if (fetched / MANIFEST).is_file() and not (self._planned and f"fetch@{name}" in self._planned):
            return fetched
        if not isinstance(settings, FetchDirectory):
            return None
        folder = self._folder / f"model-{name}"
        folder.mkdir()
        return small_files(Path(settings.path), folder)

    def _data(self, name: str, model: Path | None) -> Path | None:
        """Return the prepared rows: those that are there, unless they would be prepared again."""
        settings, done = self._resolved.prepare[name], RESULTS / "data" / name
        if self._planned is not None and (done / MANIFEST).is_file():
            return None if f"prepare@{name}" in self._planned else done
        read = [Path(path) for path in settings.reads]
        if model is None or not all(path.exists() for path in read) or settings.undecided:
            return None
        files = [path for source in sources_of(settings, RESULTS / "selections") for path in source.files]
        if sum(path.stat().st_size for path in files) > LARGEST:
            return None
        prepare(settings, model / MANIFEST, self._folder / f"data-{name}", workers=1)
        return self._folder / f"data-{name}"

    def _packing(self, run: RunSettings, data: Path | None) -> Path | None:
        """Return the packed rows: those that are there, unless they would be packed again."""
        done = RESULTS / run.packed / "packing"
        if (done / MANIFEST).is_file() and not self.is_planned(f"pack@{run.packed}"):
            return done
        if data is None or (data / "train.arrow").stat().st_size > LARGEST:
            return None
        pack_rows(run.pack, data, self._folder / f"packing-{run.packed}")
        return self._folder / f"packing-{run.packed}"

    def _sample(self, name: str, settings: SampleSettings, model: Path, data: Path) -> Path:
        check_room(size_of(data)[1], settings.max_new_tokens, model, f"samples.{name}")
        return data

    def _render(self, run: RunSettings, model: Path, data: Path, packing: Path) -> Path:
        file = self._folder / f"estimate-{run.rendered}.json"
        write_json(file, estimate(run.estimate, model, packing))
        chosen, _ = render(run.render, file)
        weights = WEIGHTS / self._resolved.prepare[run.dataset].model
        try_model(run.render, chosen.choice.attention, model, weights, data)
        untrained(run.render, chosen.choice.attention, model)
        return file


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Leave out what the stages say of their work."""
    before = LOGGER.level
    LOGGER.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        LOGGER.setLevel(before)
