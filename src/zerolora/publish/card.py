"""The model card of a run: card.md filled in from the run's files, and metadata for the hub.

Values that the files lack are omitted or marked as unknown.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from zerolora import __version__
from zerolora.errors import UserError
from zerolora.evaluate.free_form import FREE_FORM
from zerolora.evidence.rebuilt import headline
from zerolora.evidence.verify import FOLDER, Signer
from zerolora.files import MANIFEST, read_json, sha256
from zerolora.publish.data_files import DataFile, data_files
from zerolora.publish.finished import RESULTS, FinishedRun, PushedModel, command, remedy, weights_of
from zerolora.publish.rebuild_statements import RebuildStatement
from zerolora.publish.run_config import as_yaml, config_of_run, without_absolute_paths
from zerolora.publish.slsa_provenance import LOCK
from zerolora.report import tasks
from zerolora.report.markdown import Written, cell, code, fenced, table
from zerolora.report.provenance import adapter_origin, commit
from zerolora.units import gib

TEMPLATE = Path(__file__).with_name("card.md")
LIBRARIES = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes", "tokenizers", "safetensors")
"""Libraries whose versions can change a result."""
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


def model_card(
    run: FinishedRun,
    product: PushedModel,
    title: str,
    *,
    repository: bool = True,
    branch: str | None = None,
    builder: Signer | None = None,
    rebuilds: Sequence[RebuildStatement] = (),
) -> str:
    """Return the text of README.md for a branch of a repository, or for a directory (`repository` false).

    `builder`: who signed the builder's statement; `rebuilds`: the statements beside the card. Raises UserError if a
    file of the run is missing or was changed.
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
    used = config_of_run(run)
    config = without_absolute_paths(used)
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
        config=Written(fenced(as_yaml(config), "yaml")),
        cut=config != used,
        command=command(run.name),
        builder=builder,
        rebuilt=headline(each.rebuild for each in rebuilds),
        rebuilds=_rebuilds(product, rebuilds),
        folder=FOLDER,
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


def _sources(run: FinishedRun, stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the counts of each source, including its share of the supervised training tokens."""
    if "sources" in stats:
        return dict(stats["sources"])
    name, *_ = run.read(run.data / MANIFEST)["sources"]  # the others are of held-out rows of another data set
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


def _rebuilds(product: PushedModel, rebuilds: Sequence[RebuildStatement]) -> Written | None:
    """Return a table of the statements of rebuilds, with the keys that signed them; None without any."""
    rows = [
        (
            each.name,
            each.rebuild.machine,
            each.rebuild.verdict,
            each.rebuild.equal_among(product.hashes),
            each.signer.about,
        )
        for each in rebuilds
    ]
    return Written(table(("statement", "machine", "verdict", "equal", "signature"), rows)) if rows else None


def _pins() -> dict[str, str]:
    """Return the versions of LIBRARIES in the lock file, and its sha256."""
    if not LOCK.is_file():
        return {}
    pins = dict(PIN.findall(LOCK.read_text(encoding="utf-8")))
    return {name: pins[name] for name in LIBRARIES if name in pins} | {f"sha256 of {code(str(LOCK))}": sha256(LOCK)}
