"""The model card of a run: metadata for the hub, and what was done, with what, how well, and how to do it again.

Everything in it comes from the run's files. What they do not say is left out, or said to be unknown.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora import __version__
from zerolora.errors import printable
from zerolora.files import MANIFEST, sha256
from zerolora.publish.config_of_run import ELSEWHERE, config_of_run
from zerolora.publish.data_facts import DataFile, data_files, data_sources
from zerolora.publish.finished import CONFIG, RESULTS, FinishedRun, command
from zerolora.publish.licences import licence_metadata
from zerolora.publish.product import PushedModel, weights_of
from zerolora.report import tasks
from zerolora.report.markdown import Cell, Written, code, facts, fenced, table
from zerolora.units import gib

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
TOKENS_WERE_ADDED = (
    "if len(tokenizer) > base.get_input_embeddings().num_embeddings:",
    "    base.resize_token_embeddings(len(tokenizer))",
)
UNKNOWN = Written("not known; write it here before others use the model")


@dataclass(frozen=True)
class CardFacts:
    """What all parts of a card draw on."""

    run: FinishedRun
    product: PushedModel
    title: str
    """The name of the repository or directory."""
    repository: bool
    branch: str | None
    files: list[DataFile]
    figures: dict[str, Any]
    """metrics/difference.json."""
    model: dict[str, Any]
    """What fetch recorded of the base model."""

    @property
    def on_hub(self) -> bool:
        """Tell whether the base model is of the hub."""
        return bool(self.model["source"]["source"] == "hub")


def model_card(
    run: FinishedRun, product: PushedModel, title: str, *, repository: bool = True, branch: str | None = None
) -> str:
    """Return the card as the text of README.md, for a `branch` of a `repository` or for a directory.

    Raises UserError if a file of the run is missing or was changed.
    """
    found = CardFacts(
        run=run,
        product=product,
        title=title,
        repository=repository,
        branch=branch,
        files=data_files(run),
        figures=run.read(run.directory / "metrics/difference.json"),
        model=run.read(run.model / MANIFEST),
    )
    sections = [
        f"---\n{_metadata(found)}\n---",
        f"# {code(title)}",
        _summary(found),
        "## Use",
        _use(found),
        "## Base model",
        _base(found),
        "## Data",
        _data(found),
        "## Method",
        _method(found),
        "## Metrics",
        *_metrics(found),
        "## Hardware and time",
        _hardware(found),
        "## Versions",
        _versions(),
        "## Reproduce",
        *_reproduce(found),
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(found: CardFacts) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    run, adapter = found.run, found.product.kind == "adapter"
    results = []
    if "accuracy" in found.figures:
        low, high = found.figures["accuracy_low"], found.figures["accuracy_high"]
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=next((file.repository for file in found.files if file.repository), run.dataset),
                dataset_name=run.dataset,
                dataset_split=run.resolved.evaluate[run.dataset].split,
                metric_type="accuracy",
                metric_name="Accuracy",
                metric_value=found.figures["accuracy"],
                metric_args={"rows": found.figures["rows"], "low": low, "high": high, "interval": "Wilson, 95 %"},
            )
        )
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        base_model=found.product.base["name"] if found.on_hub else None,
        datasets=sorted({file.repository for file in found.files if file.repository}) or None,
        pipeline_tag="text-generation",
        tags=["zerolora", run.settings.train.method],
        model_name=found.title.rpartition("/")[2],
        eval_results=results or None,
    )
    more = licence_metadata(found.model["license"])
    if found.on_hub:
        more["base_model_relation"] = "adapter" if adapter else "finetune"
    for key, value in more.items():
        data[key] = value
    return data.to_yaml()


def _summary(found: CardFacts) -> str:
    what = {"adapter": "An adapter for", "merged": "A model fine-tuned from"}[found.product.kind]
    return (
        f"{what} {code(found.product.base['name'])}, trained with zerolora on the data set {code(found.run.dataset)} "
        f"(run {code(found.run.name)}, method {code(found.run.settings.train.method)}). This card was written from the "
        "files of that run; what they do not say is not here."
    )


def _use(found: CardFacts) -> str:
    base, revision = found.product.base["name"], found.product.base["revision"]
    of_base = _arguments(base, revision) if found.on_hub else '"DIRECTORY OF THE BASE MODEL"'
    own = _arguments(found.title, found.branch) if found.repository else '"THIS DIRECTORY"'
    if found.product.kind == "merged":
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({own})",
            f'model = AutoModelForCausalLM.from_pretrained({own}, dtype="auto")',
        ]
        return fenced("\n".join(lines), "python")
    added = "tokenizer.json" in found.product.files
    lines = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({own if added else of_base})",
        f'base = AutoModelForCausalLM.from_pretrained({of_base}, dtype="auto")',
        *(TOKENS_WERE_ADDED if added else ()),
        f"model = PeftModel.from_pretrained(base, {own})",
    ]
    block = fenced("\n".join(lines), "python")
    if added or "chat_template.jinja" not in found.product.files:
        return block
    return f"{block}\n\n`chat_template.jinja` is the chat template of training; give it to the tokenizer."


def _arguments(name: str, revision: str | None) -> str:
    return json.dumps(name) + (f", revision={json.dumps(revision)}" if revision else "")


def _base(found: CardFacts) -> str:
    source = found.model["source"]
    rows: list[tuple[str, Cell]] = [
        ("name", found.product.base["name"]),
        ("revision", found.product.base["revision"]),
        ("sha256 of the package's file", source.get("sha256")),
        ("licence, as the config has it", found.model["license"].strip() or UNKNOWN),
        ("parameters", found.model["parameters"]),
        *((f"sha256 of {code(name)}", digest) for name, digest in weights_of(found.model["files"]).items()),
    ]
    note = ""
    if not found.on_hub:
        note = "\n\nThe base model is not on the hub under this name, so the metadata name none."
    return facts(rows) + note


def _data(found: CardFacts) -> str:
    run = found.run
    stats = run.read(run.data / "stats.json")
    sources = [
        (each.name, each.rows, each.tokens, each.supervised_tokens, Written(f"{each.share:.1%}"))
        for each in data_sources(run)
    ]
    files = [
        (each.source, each.name, each.origin or Written("a file of the author's"), each.licence or UNKNOWN, each.sha256)
        for each in found.files
    ]
    splits = [
        (Written(name), stats[f"{name}_rows"], stats[f"{name}_tokens"], stats[f"{name}_supervised_tokens"])
        for name in ("train", "validation", "test")
    ]
    dropped = stats["dropped_bad_rows"] + stats["dropped_too_long_rows"]
    return "\n\n".join(
        [
            table(("source", "training rows", "tokens", "supervised tokens", "share of supervised tokens"), sources),
            table(("source", "file", "origin", "licence", "sha256"), files),
            table(("split", "rows", "tokens", "supervised tokens"), splits),
            f"Of {stats['read_rows']:,} rows that were read, {dropped:,} were dropped and "
            f"{stats['truncated_rows'] + stats['split_rows']:,} cut; {stats['duplicate_rows']:,} are duplicates, and "
            f"{stats['leaked_prompts']:,} training prompts are also among the held-out rows.",
            facts(
                [
                    ("prompt format", run.prepared.template),
                    ("supervised", _value(run.prepared.loss)),
                    ("longest row, in tokens", run.prepared.max_length),
                    ("seed of the splits", run.prepared.seed),
                ]
            ),
        ]
    )


def _method(found: CardFacts) -> str:
    from zerolora.methods.registry import TRAINABLE

    run, train = found.run, found.run.settings.train
    trained = run.read(run.directory / "metrics/train.json")
    chosen = run.read(RESULTS / run.settings.rendered / "zero.json")["zerolora"]
    rows: list[tuple[str, Cell]] = [("method", train.method), ("trainable parameters", trained["trainable_parameters"])]
    for section in TRAINABLE[train.method].sections:
        for key, value in getattr(train, section).model_dump(mode="json").items():
            if value not in ({}, []):
                rows.append((f"{METHOD_SECTIONS.get(section, section)}: {key}", _value(value)))
    values = train.model_dump(mode="json")
    rows += [(key.replace("_", " "), _value(values[key])) for key in TRAINING if values[key] not in (None, {}, [])]
    rows += [
        ("gradient clipping", run.settings.render.gradient_clipping),
        ("packing, tokens of a packed row", run.settings.pack.capacity),
        ("steps", trained["steps"]),
        ("step of the published weights", trained["published_step"]),
        ("tokens", trained["tokens"]),
        ("supervised tokens", trained["supervised_tokens"]),
        ("strategy", chosen["strategy"]),
        ("precision", chosen["precision"]),
        ("attention", chosen["attention"]),
        ("goes on from", _origin(run)),
    ]
    return facts(rows)


def _value(value: Any) -> Cell:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str | int | float) else str(value)


def _origin(run: FinishedRun) -> str | None:
    origin = run.read(run.directory / "adapter" / MANIFEST).get("from_adapter")
    if not origin:
        return None
    source = "".join(f", {key} {value}" for key, value in origin.get("source", {}).items())
    licence = f", {origin['license']}" if "license" in origin else ""
    return f"an adapter with sha256 {origin['sha256']}{source}{licence}"


def _metrics(found: CardFacts) -> Iterator[str]:
    figures, settings = found.figures, found.run.resolved.evaluate[found.run.dataset]
    if not figures.get("enabled", True):
        yield "The model was not evaluated."
    else:
        names = [
            name for name in figures if f"base_{name}" in figures and "." not in name and not name.endswith(tasks.ENDS)
        ]
        rows = [(Written(name.replace("_", " ")), *_compared(figures, name)) for name in names]
        yield f"On {figures['rows']:,} rows of split {code(settings.split)}, task {code(settings.check)}."
        yield table(("metric", "base model", "this model", "difference"), rows)
        if "gained" in figures:
            yield (
                f"{figures['gained']:,} answers became right and {figures['lost']:,} wrong (McNemar's exact p "
                f"{figures['p']:.2g}). 95 % intervals in brackets: Wilson's of a rate, bootstrap over pairs of a "
                "difference."
            )
    for task in sorted(found.run.resolved.tasks):
        yield from _task(found.run, task)
    gate = found.run.settings.accept.fail_if
    yield f"The run passed its gate, which is to fail if {code(gate)}." if gate else "The run has no gate."


def _compared(figures: dict[str, Any], name: str) -> tuple[Cell, Cell, Cell]:
    change = "difference" if name == "accuracy" else f"{name}_difference"
    return tuple(_interval(figures, each) for each in (f"base_{name}", name, change))  # type: ignore[return-value]


def _interval(figures: dict[str, Any], name: str) -> Cell:
    value = figures.get(name)
    if not isinstance(value, int | float):
        return None
    return _with_ends([value, *(figures[f"{name}{end}"] for end in tasks.ENDS if f"{name}{end}" in figures)])


def _with_ends(figures: Sequence[float]) -> Written:
    value, *ends = (f"{each:.4g}" for each in figures)
    return Written(f"{value} [{', '.join(ends)}]" if ends else value)


def _task(run: FinishedRun, task: str) -> Iterator[str]:
    """Tell the metrics of a further task that both models were asked."""
    folders = Path("results/base") / run.dataset / tasks.FOLDER, run.directory / tasks.FOLDER
    metrics, answers = tasks.files_of(task)
    if not all((folder / metrics).is_file() for folder in folders):
        return
    before, after = ((run.read(folder / metrics), run.read_answers(folder / answers)) for folder in folders)
    rows = [
        (name, *(_with_ends(figures[what]) for what in ("base", "tuned", "difference")))
        for name, figures in tasks.changes(before, after).items()
    ]
    yield f"Further task {code(task)}:"
    yield table(("metric", "base model", "this model", "difference"), rows)


def _hardware(found: CardFacts) -> str:
    run, settings = found.run, found.run.settings.render
    used = run.read(run.directory / "metrics/train_resources.json")
    usage = run.read(run.directory / "usage.json")
    hours = "GPU-hours" if settings.device == "cuda" else "rank-hours (on CPU)"
    seconds = usage.get("accounted_seconds", usage["measured_seconds"])
    rows: list[tuple[str, Cell]] = [
        ("device", settings.device),
        ("GPU, as the config names it", settings.hardware.gpu),
        ("compute capability", settings.hardware.compute_capability),
        ("nodes", settings.nodes),
        ("ranks", used["ranks"]),
        ("training, in seconds", seconds),
        (hours, usage.get("accounted_rank_hours", usage["measured_rank_hours"])),
        ("tokens/s", used["tokens_per_second"]),
        ("peak host memory of all ranks", Written(gib(used["peak_host_bytes_all_ranks"]))),
    ]
    if settings.device == "cuda":
        rows.append(("peak GPU memory of the worst rank", Written(gib(used["peak_gpu_bytes_worst_rank"]))))
    note = ""
    if used["resumes"] and "accounted_seconds" not in usage:
        note = f"\n\nTraining was resumed {used['resumes']} times; times are those of the last attempt."
    return facts(rows) + note


def _versions() -> str:
    pins = dict(PIN.findall(LOCK.read_text(encoding="utf-8"))) if LOCK.is_file() else {}
    rows: list[tuple[str, Cell]] = [("zerolora", __version__), ("commit of the project", _commit())]
    rows += [(name, pins.get(name)) for name in LIBRARIES]
    rows += [(f"sha256 of {code(LOCK.as_posix())}", sha256(LOCK) if LOCK.is_file() else None)]
    return facts(rows) + "\n\nLibraries are those of the project's lock file."


def _commit() -> str | None:
    """Return the checked-out commit, with a note if tracked files differ from it; None outside a git repository."""
    answers = []
    for arguments in (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]):
        found = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if found.returncode:
            return None
        answers.append(found.stdout.strip())
    return answers[0] + (", with uncommitted changes" if answers[1] else "")


def _reproduce(found: CardFacts) -> Iterator[str]:
    text, cut = config_of_run(found.run)
    yield (
        f"In the project at the commit above, with the data files above, write this to {code(CONFIG.as_posix())}, "
        "with the files of `config/` that it names:"
    )
    yield fenced(printable_lines(text), "yaml")
    if cut:
        yield f"{code(ELSEWHERE)} stands for directories of the author's machine."
    yield "then run"
    yield fenced(f"make .venv/installed\n.venv/bin/{command(found.run.name)}", "sh")


def printable_lines(text: str) -> str:
    """Return lines with control characters escaped."""
    return "\n".join(printable(line) for line in text.splitlines())
