"""The model card of a run: card.md, filled in with what the run's files say, and metadata for the hub.

What the files do not say is left out, or said to be unknown.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from zerolora import __version__
from zerolora.config.schema import data_folders
from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_json, sha256
from zerolora.publish.config_of_run import config_of_run
from zerolora.publish.finished import RESULTS, FinishedRun, command, remedy
from zerolora.publish.product import PushedModel, weights_of
from zerolora.report import tasks
from zerolora.report.markdown import Written, cell, code, fenced, table
from zerolora.report.provenance import commit
from zerolora.units import gib

TEMPLATE = Path(__file__).with_name("card.md")
LOCK = Path("envs/requirements.lock")
LIBRARIES = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes", "tokenizers", "safetensors")
"""Whose versions can change a result."""
PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
METHOD_SECTIONS = {"lora": "LoRA", "ia3": "(IA)³", "vera": "VeRA", "quantization": "quantization"}
TRAINING = (
    "learning_rate", "schedule", "schedule_options", "warmup_ratio", "warmup_steps", "optimizer", "betas", "epsilon",
    "weight_decay", "global_batch", "epochs", "max_steps", "neftune_alpha", "seed", "keep", "validation_steps",
    "patience",
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
"""The identifiers of the hub's documentation, "Licenses" (hub-docs, docs/hub/repositories-licenses.md), but for
`unknown` and `other`. The hub refuses any other, so those are sent as `other`, with their name."""


class DataFile(NamedTuple):
    """A file that rows were read from."""

    source: str
    """The source of the data set that it belongs to."""
    name: str
    """Its path in its origin; of a file of this machine, the path below the data set's parent directory."""
    sha256: str
    origin: str | None = None
    """Repository and commit, or package and version; None for a file of the user's own."""
    licence: str | None = None
    repository: str | None = None
    """The data set repository of the hub, if it is from one."""


def model_card(
    run: FinishedRun, product: PushedModel, title: str, *, repository: bool = True, branch: str | None = None
) -> str:
    """Return the card as the text of README.md, for a `branch` of a `repository` or for a directory.

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
    config, cut = config_of_run(run)
    # Whatever the template prints is a number or a code span (report/markdown.py), unless it is `Written`.
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
        held_out=_table(_held_out(figures)) if figures.get("enabled", True) else None,
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
    if "accuracy" in figures:
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
    """Return `license`, and `license_name` if the hub has no such licence, for the SPDX name that the config has.

    SPDX names of the GNU licences say `-only` or `-or-later`; the hub's do not.
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
    """Return the files that the data set of a run was read from."""
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
    """Return the counts of each source, with its share of the supervised training tokens."""
    if "sources" in stats:
        return dict(stats["sources"])
    (name,) = run.read(run.data / MANIFEST)["sources"]
    return {name: stats | {"train_supervised_share": 1.0}}


def _hyperparameters(run: FinishedRun) -> dict[str, Any]:
    """Return the settings that decide what was learned, by the name that a reader sees."""
    from zerolora.methods.registry import TRAINABLE

    train = run.settings.train.model_dump(mode="json")
    result = {
        f"{METHOD_SECTIONS.get(section, section)}: {key}": value
        for section in TRAINABLE[run.settings.train.method].sections
        for key, value in train[section].items()
    }
    result |= {key.replace("_", " "): train[key] for key in TRAINING}
    return {name: value for name, value in result.items() if value not in (None, {}, [])}


def _origin(run: FinishedRun) -> str | None:
    """Return one line about the adapter that training started from, if it did."""
    origin = run.read(run.directory / "adapter" / MANIFEST).get("from_adapter")
    if not origin:
        return None
    source = "".join(f", {key} {value}" for key, value in origin.get("source", {}).items())
    licence = f", {origin['license']}" if "license" in origin else ""
    return f"an adapter with sha256 {origin['sha256']}{source}{licence}"


Changes = dict[str, dict[str, list[float]]]
"""By metric, `base`, `tuned` and `difference`: the value, and the ends of its interval if it has one."""


def _held_out(figures: dict[str, Any]) -> Changes:
    """Return the metrics on the held-out rows."""

    def with_ends(name: str) -> list[float]:
        known = isinstance(figures.get(name), int | float)
        return [figures[f"{name}{end}"] for end in ("", *tasks.ENDS) if f"{name}{end}" in figures] if known else []

    names = [
        name for name in figures if f"base_{name}" in figures and "." not in name and not name.endswith(tasks.ENDS)
    ]
    return {
        name.replace("_", " "): {
            "base": with_ends(f"base_{name}"),
            "tuned": with_ends(name),
            "difference": with_ends("difference" if name == "accuracy" else f"{name}_difference"),
        }
        for name in names
    }


def _changes(run: FinishedRun, task: str) -> Changes:
    """Return the metrics of a further task, none unless both models have answered it."""
    folders = Path("results/base") / run.dataset / tasks.FOLDER, run.directory / tasks.FOLDER
    metrics, answers = tasks.files_of(task)
    if not all((folder / metrics).is_file() for folder in folders):
        return {}
    before, after = ((run.read(folder / metrics), run.read(folder / answers, read_json)) for folder in folders)
    return {code(metric): change for metric, change in tasks.changes(before, after).items()}


def _table(changes: Changes) -> Written:
    def text(figures: list[float]) -> Written:
        value, *ends = (f"{each:.4g}" for each in figures) if figures else ("",)
        return Written(f"{value} [{', '.join(ends)}]" if ends else value)

    rows = [(Written(metric), *map(text, change.values())) for metric, change in changes.items()]
    return Written(table(("metric", "base model", "this model", "difference"), rows))


def _pins() -> dict[str, str]:
    """Return the versions in the lock file, and its sha256."""
    if not LOCK.is_file():
        return {}
    pins = dict(PIN.findall(LOCK.read_text(encoding="utf-8")))
    return {name: pins[name] for name in LIBRARIES if name in pins} | {f"sha256 of {code(str(LOCK))}": sha256(LOCK)}
