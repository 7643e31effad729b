"""The model card of a run: card.md filled in from the run's files, and metadata for the hub.

Values that the files lack are omitted or marked as unknown.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml

from zerolora import __version__
from zerolora.config.file import read_written_out
from zerolora.config.schema import data_folders
from zerolora.config.values import HUB_ADAPTERS
from zerolora.errors import UserError, printable
from zerolora.evaluate.free_form import FREE_FORM
from zerolora.files import MANIFEST, read_json, sha256
from zerolora.publish.finished import CONFIG, RESULTS, FinishedRun, PushedModel, command, remedy, weights_of
from zerolora.report import tasks
from zerolora.report.markdown import Written, cell, code, fenced, table
from zerolora.report.provenance import adapter_origin, commit
from zerolora.units import gib

TEMPLATE = Path(__file__).with_name("card.md")
LOCK = Path("envs/requirements.lock")
LIBRARIES = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes", "tokenizers", "safetensors")
"""Libraries whose versions can change a result."""
CONFIG_SECTIONS = ("hardware", "pack", "estimate", "render", "train", "merge", "evaluate", "report")
"""Sections that every run reads. Judge, export and further tasks are not needed to reproduce a run."""
ELSEWHERE = "/path/to"
PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
TRAINING = (
    "learning_rate", "schedule", "schedule_options", "warmup_ratio", "warmup_steps", "optimizer", "betas", "epsilon",
    "weight_decay", "global_batch", "group_by_length", "epochs", "max_steps", "weights", "neftune_alpha", "seed",
    "keep",
    "validation_steps", "patience",
)  # fmt: skip
LICENCES = frozenset(
    {
        "apache-2.0", "mit", "openrail", "bigscience-openrail-m", "creativeml-openrail-m",
        "bigscience-bloom-rail-1.0", "bigcode-openrail-m", "afl-3.0", "artistic-2.0", "bsl-1.0", "bsd",
        "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "c-uda", "cc", "cc0-1.0", "cc-by-2.0", "cc-by-2.5",
        "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0",
        "cc-by-nd-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0",
        "cdla-sharing-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "wtfpl", "ecl-2.0", "epl-1.0", "epl-2.0",
        "etalab-2.0", "eupl-1.1", "agpl-3.0", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "lgpl", "lgpl-2.1", "lgpl-3.0",
        "isc", "lppl-1.3c", "ms-pl", "mpl-2.0", "odc-by", "odbl", "openrail++", "osl-3.0", "postgresql", "ofl-1.1",
        "ncsa", "unlicense", "zlib", "pddl", "lgpl-lr", "deepfloyd-if-license", "llama2", "gemma",
    }
)  # fmt: skip
"""The hub's licence identifiers (hub-docs, docs/hub/repositories-licenses.md), without `unknown` and `other`. The hub
refuses all others, so they are sent as `other` with their name."""


class DataFile(NamedTuple):
    """A file of the data set."""

    source: str
    """Name of its source in the data set."""
    name: str
    """Its path in its origin; for a local file, relative to the data set's parent directory."""
    sha256: str
    origin: str | None = None
    """Repository and commit, or package and version; None for a local file."""
    licence: str | None = None
    repository: str | None = None
    """Its data set repository on the hub, if any."""


def model_card(
    run: FinishedRun, product: PushedModel, title: str, *, repository: bool = True, branch: str | None = None
) -> str:
    """Return the text of README.md for a branch of a repository, or for a directory (`repository` false).

    Raises UserError if a file of the run is missing or was changed.
    """
    paths = {
        "figures": run.directory / "metrics/difference.json",
        "model": run.model / MANIFEST,
        "stats": run.data / "stats.json",
        "trained": run.directory / "metrics/train.json",
        "used": run.directory / "metrics/train_resources.json",
        "usage": run.directory / "usage.json",
        "zero": RESULTS / run.settings.rendered / "zero.json",
    }
    read = {name: run.read(path) for name, path in paths.items()}
    figures, model, stats = read["figures"], read["model"], read["stats"]
    files, on_hub, base = data_files(run), model["source"]["source"] == "hub", product.base
    config, cut = _config_of_run(run)
    held_out = {name.replace("_", " "): each for name, each in tasks.held_out_changes(figures).items()}
    # Everything that the template prints is a number or a code span (report/markdown.py), except for `Written`.
    environment = jinja2.Environment(  # noqa: S701 - Markdown
        finalize=cell,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"plain": Written, "gib": gib}
    values = dict(
        run=run,
        product=product,
        title=title,
        **read,
        base=base,
        files=files,
        on_hub=on_hub,
        adapter=product.kind == "adapter",
        metadata=Written(_metadata(run, product, title, files, figures, model["license"], on_hub)),
        of_base=_arguments(base["name"], base["revision"]) if on_hub else Written('"DIRECTORY OF THE BASE MODEL"'),
        own=_arguments(title, branch) if repository else Written('"THIS DIRECTORY"'),
        weights=weights_of(model["files"]),
        unknown=Written("not known; write it here before others use the model"),
        sources=_sources(run, stats),
        train=run.settings.train,
        hyperparameters=_hyperparameters(run),
        origin=_origin(run),
        evaluated=run.resolved.evaluate[run.dataset],
        held_out=_table(held_out) if figures.get("enabled", True) else None,
        tasks={task: _table(changes) for task in sorted(run.resolved.tasks) if (changes := _changes(run, task))},
        gate=run.settings.accept.fail_if,
        planned=run.settings.render,
        version=__version__,
        commit=commit(),
        pins=_pins(),
        config=Written(fenced(config, "yaml")),
        cut=cut,
        command=command(run.name),
    )
    try:
        return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(values)
    except jinja2.UndefinedError as error:
        raise UserError(
            f"run {run.name}: its results lack a figure of the card ({error}); {remedy(run.name)}"
        ) from None


def _metadata(
    run: FinishedRun,
    product: PushedModel,
    title: str,
    files: list[DataFile],
    figures: dict[str, Any],
    licence: str,
    on_hub: bool,
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    adapter, datasets = product.kind == "adapter", [file.repository for file in files if file.repository]
    results = []
    if "accuracy" in figures and not figures.get(FREE_FORM):
        low, high = figures["accuracy_low"], figures["accuracy_high"]
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=next(iter(datasets), run.dataset),
                dataset_name=run.dataset,
                dataset_split=run.resolved.evaluate[run.dataset].split,
                metric_type="accuracy",
                metric_name="Accuracy",
                metric_value=figures["accuracy"],
                metric_args={"rows": figures["rows"], "low": low, "high": high, "interval": "Wilson, 95 %"},
            )
        )
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        base_model=product.base["name"] if on_hub else None,
        base_model_relation=("adapter" if adapter else "finetune") if on_hub else None,
        datasets=sorted(set(datasets)) or None,
        pipeline_tag="text-generation",
        tags=["zerolora", run.settings.train.method],
        model_name=title.rpartition("/")[2],
        eval_results=results or None,
        **licence_metadata(licence),
    )
    return data.to_yaml()


def licence_metadata(name: str) -> dict[str, Any]:
    """Return `license` for the config's SPDX name, with `license_name` if the hub does not know the licence.

    SPDX names of GNU licences end with `-only` or `-or-later`; the hub's do not.
    """
    lower = name.strip().lower()
    known = re.sub(r"-(only|or-later)$", "", lower)
    if known in LICENCES:
        return {"license": known}
    slug = re.sub(r"[^a-z0-9.]+", "-", lower).strip("-.")
    return {"license": "other", "license_name": slug} if slug else {}


def _arguments(name: str, revision: str | None) -> Written:
    """Return the arguments of from_pretrained for a repository."""
    return Written(json.dumps(name) + (f", revision={json.dumps(revision)}" if revision else ""))


def data_files(run: FinishedRun) -> list[DataFile]:
    """Return the files of a run's data set."""
    manifest = run.read(run.data / MANIFEST)
    top, folders = Path(run.prepared.path), [Path(folder) for folder in data_folders(run.config.fetch).values()]
    result = []
    for text, digest in manifest["read"].items():
        path = Path(text)
        source = next((name for name in manifest["sources"] if path.is_relative_to(top / name)), top.name)
        folder = next((folder for folder in folders if path.is_relative_to(folder)), None)
        if folder is None:
            shown = path.relative_to(top.parent) if path.is_relative_to(top.parent) else Path(path.name)
            result.append(DataFile(source, shown.as_posix(), digest))
            continue
        fetched = run.read(folder / MANIFEST)
        origin, name = fetched["source"], path.relative_to(folder).as_posix()
        repository = origin.get("repository")
        version = f"{repository}@{origin['revision']}" if repository else f"{origin['package']}=={origin['version']}"
        result.append(DataFile(source, name, digest, version, fetched["license"], repository))
    return result


def _sources(run: FinishedRun, stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the counts of each source, including its share of the supervised training tokens."""
    if "sources" in stats:
        return dict(stats["sources"])
    (name,) = run.read(run.data / MANIFEST)["sources"]
    return {name: stats | {"train_supervised_share": 1.0}}


def _hyperparameters(run: FinishedRun) -> dict[str, Any]:
    """Return the training settings by their title in the card."""
    from zerolora.methods.registry import TRAINABLE

    train = run.settings.train.model_dump(mode="json")
    result = {
        f"{section}.{key}": value
        for section in TRAINABLE[run.settings.train.method].sections
        for key, value in train[section].items()
    }
    result |= {key.replace("_", " "): train[key] for key in TRAINING}
    return {name: value for name, value in result.items() if value not in (None, {}, [])}


def _origin(run: FinishedRun) -> str | None:
    """Return a line about the adapter that training started from, if any."""
    origin = run.read(run.directory / "adapter" / MANIFEST).get("from_adapter")
    return f"an adapter with {adapter_origin(origin)}" if origin else None


def _changes(run: FinishedRun, task: str) -> tasks.Changes:
    """Return the metrics of a further task; empty unless both models have answered it."""
    folders = Path("results/base") / run.dataset / tasks.FOLDER, run.directory / tasks.FOLDER
    metrics, answers = tasks.files_of(task)
    if not all((folder / metrics).is_file() for folder in folders):
        return {}
    before, after = ((run.read(folder / metrics), run.read(folder / answers, read_json)) for folder in folders)
    return {code(metric): change for metric, change in tasks.changes(before, after).items()}


def _table(changes: tasks.Changes) -> Written:
    def text(figures: list[float]) -> Written:
        value, *ends = (f"{each:.4g}" for each in figures) if figures else ("",)
        return Written(f"{value} [{', '.join(ends)}]" if ends else value)

    rows = [(Written(metric), *map(text, change.values())) for metric, change in changes.items()]
    return Written(table(("metric", "base model", "this model", "difference"), rows))


def _pins() -> dict[str, str]:
    """Return the versions of LIBRARIES in the lock file, and its sha256."""
    if not LOCK.is_file():
        return {}
    pins = dict(PIN.findall(LOCK.read_text(encoding="utf-8")))
    return {name: pins[name] for name in LIBRARIES if name in pins} | {f"sha256 of {code(str(LOCK))}": sha256(LOCK)}


def _config_of_run(run: FinishedRun) -> tuple[str, bool]:
    """Return the run's part of config/config.yaml as YAML, and whether absolute paths in it were cut to their names."""
    values = read_written_out(CONFIG)
    names = _with_origins(run)
    datasets = {run.resolved.runs[name].dataset for name in names}
    models = {run.resolved.prepare[name].model for name in datasets}
    paths = [Path(run.resolved.prepare[name].path) for name in datasets]
    starts = {run.resolved.runs[name].train.from_adapter for name in names}
    folders = {
        name
        for name, folder in data_folders(run.config.fetch).items()
        if any(Path(folder).is_relative_to(path) or path.is_relative_to(folder) for path in paths)
    }

    def uses(source: str, name: str) -> bool:
        if source in ("data", "package_data"):
            return f"{source}.{name}" in folders
        return f"{HUB_ADAPTERS}/{name}" in starts if source == "adapter" else name in models

    used: dict[str, Any] = {key: values[key] for key in CONFIG_SECTIONS if key in values}
    used["fetch"] = {
        source: {name: value for name, value in (entries or {}).items() if uses(source, name)}
        for source, entries in values["fetch"].items()
    }
    used["prepare"] = {name: value for name, value in values["prepare"].items() if name in datasets}
    # A run of a grid or a search is written out, since the other runs need not be finished.
    for group in ("runs", "continued"):
        of_group = {
            name: {key: each for key, each in value.items() if key != "repeats"}
            for name, value in (values.get(group) or {}).items()
            if name in names
        }
        for name in sorted(names & run.config.expanded_runs.keys()):
            if run.config.is_continued(name) == (group == "continued"):
                of_group[name] = run.config.all_runs[name].model_dump(exclude_defaults=True)
        if of_group or group in values:
            used[group] = of_group
    shown = _without_absolute_paths(used)
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(printable(line) for line in text.splitlines()), shown != used


def _with_origins(run: FinishedRun) -> set[str]:
    """Return the run, and the runs whose adapters it started from, directly or not."""
    names, waiting = set(), [run.name]
    while waiting:
        names.add(name := waiting.pop())
        start = run.resolved.runs[name].train.from_adapter
        before = {each for each in run.resolved.runs if start and Path(start) == RESULTS / each / "adapter"}
        waiting += before - names
    return names


def _without_absolute_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_absolute_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_absolute_paths(item) for item in value]
    absolute = isinstance(value, str) and value.startswith(("/", "~"))
    return f"{ELSEWHERE}/{Path(value).name}" if absolute else value
