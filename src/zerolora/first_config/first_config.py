"""Writes the first config of a project from a model, rows and this machine, and says what it will do.

What the config leaves to choose is chosen by the stages themselves: the rows are prepared and packed, and memory and
time estimated, as the pipeline does it, in a temporary folder.
"""

import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerolora.config.file import check_files, load
from zerolora.config.resolve import resolve
from zerolora.config.settings import Resolved
from zerolora.config.values import UNKNOWN_LICENSE
from zerolora.data.formats import FORMS
from zerolora.data.pack import pack_rows
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import IGNORED, open_table
from zerolora.data.readers import chunks
from zerolora.data.source_files import form_of, sources_of
from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_json, write_json, write_text
from zerolora.first_config.given_data import GivenData, given_data
from zerolora.first_config.given_model import GivenModel, given_model
from zerolora.first_config.recipe_settings import training_settings
from zerolora.log import only_warnings
from zerolora.machine import this_machine
from zerolora.memory.estimate import estimate
from zerolora.model.architecture import config_of
from zerolora.planner.render import render
from zerolora.types import RowKind
from zerolora.units import gib

HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 200
"""Of the rows, for each of validation and test, and at most so many."""
FEWEST = 20
"""Rows of a set that is divided."""
STEP = 64
"""Tokens to whose multiple the longest row is rounded up for max_length."""
SHOWN_TOKENS = 200
OF_PREFERENCES: dict[RowKind, str] = {"pairs": "dpo", "labelled": "kto"}
"""The objective for each kind of preference data, which no text form reads."""
QUANTIZED = "qlora"
"""Method for a model that fits only offloaded, or not at all."""


class Plan(NamedTuple):
    """A config, and what the stages make of it."""

    values: dict[str, Any]
    rendered: Any
    estimated: dict[str, Any]

    @property
    def strategy(self) -> str:
        """The strategy that was chosen."""
        return str(self.rendered["choice"]["ranked"][0]["strategy"])

    @property
    def seconds(self) -> float:
        """Predicted seconds of training."""
        return float(self.rendered["slurm_resources"]["seconds"])


def first_config(model: str, data: str, output: Path, force: bool, recipe: str | None = None) -> Iterator[str]:
    """Write the config to `output`, with the training settings of a recipe; yield what it will train, line by line.

    Raises UserError if `output` exists, unless `force`; if model or rows cannot be used; if the recipe's settings do
    not hold for them on this machine; or if nothing fits.
    """
    if output.exists() and not force:
        raise UserError(f"{output}: exists; write --force to replace it, or another --output")
    settings = training_settings(recipe) if recipe else {}
    with tempfile.TemporaryDirectory() as name, only_warnings():
        folder = Path(name)
        (folder / "model").mkdir()
        given = given_model(model, folder / "model")
        rows = given_data(data, folder / "downloaded")
        yield from rows.said
        try:
            with _held_for(recipe):
                values = _values(given, rows, settings)
                if objective := _objective(values, rows, folder):
                    values["train"].setdefault("objective", objective)
                _resolved(values, folder)
            form, stats, limit = _prepared(values, given, rows, folder)
            with _held_for(recipe):
                plan = _plan(values, given, folder) if recipe else _planned(values, given, folder)
        except UserError as error:
            raise UserError(str(error).replace(str(rows.files), data)) from None
        plan.values["prepare"][rows.name]["path"] = rows.path
        if rows.entry:
            plan.values["fetch"]["data"] = {rows.name: rows.entry}
        write_text(output, _text(plan.values, given, rows, model, recipe))
        first = _first_row(folder / "data", given.files)
    longest = max(stats[f"{split}_longest_row"] for split in ("train", "validation", "test"))
    counts = f"{stats['train_rows']:,} rows of {form}, the longest of {longest:,} tokens"
    yield f"data    {data}: {counts}; {_held_out(stats)}"
    if dropped := stats["dropped_too_long_rows"]:
        yield f"        {dropped:,} rows are longer than the model's {limit:,} tokens and left out"
    yield f"row 1   {first}"
    yield from _said(plan)


@contextmanager
def _held_for(recipe: str | None) -> Iterator[None]:
    """Name the recipe in an error."""
    try:
        yield
    except UserError as error:
        if recipe is None:
            raise
        raise UserError(f"--recipe {recipe}: does not hold for this model and machine: {error}") from None


def _objective(values: dict[str, Any], rows: GivenData, folder: Path) -> str | None:
    """Return the objective that learns from the rows if they are preference data, None for others."""
    sources = sources_of(_resolved(values, folder).prepare[rows.name])
    for kind, objective in OF_PREFERENCES.items():
        with suppress(UserError):
            if all(form_of(source, rows.files, kind)[0] for source in sources):
                return objective
    return None


def _prepared(
    values: dict[str, Any], given: GivenModel, rows: GivenData, folder: Path
) -> tuple[str, dict[str, Any], int]:
    """Prepare the rows in `folder`, and set their split and longest length in the config's values; return the form of
    the rows, their counts, and the model's own limit of their length."""
    entry = values["prepare"][rows.name]
    settings = _resolved(values, folder).prepare[rows.name]
    sources = sources_of(settings)
    forms = [form_of(source, rows.files, settings.rows)[0] for source in sources]
    drawn = [name for name in ("validation", "test") if name not in rows.published]
    divided = [source for source in sources if not source.settings.split]
    count = sum(1 for source in divided for path in source.files for chunk in chunks(path) for _ in chunk.records())
    if drawn and count < FEWEST:
        raise UserError(f"--data {rows.text}: has {count} rows; write a file of at least {FEWEST}")
    held_out = min(int(count * HELD_OUT_SHARE), MOST_HELD_OUT)
    entry["split"] = {name: held_out if name in drawn else 0 for name in ("validation", "test")}
    prepare(_resolved(values, folder).prepare[rows.name], given.files / MANIFEST, folder / "data")
    stats = read_json(folder / "data/stats.json", "zerolora prepare")
    longest = max(stats[f"{split}_longest_row"] for split in ("train", "validation", "test"))
    entry["max_length"] = min(-(-longest // STEP) * STEP, settings.max_length)
    if not stats["dropped_too_long_rows"]:
        del entry["too_long"]
    return " and ".join(FORMS[form].name for form in dict.fromkeys(forms) if form), stats, settings.max_length


def _held_out(stats: dict[str, Any]) -> str:
    return f"{stats['validation_rows']:,} more for validation and {stats['test_rows']:,} for the test"


def _values(given: GivenModel, rows: GivenData, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values, with the model's own limit as the longest row, and the rows where they are now.

    settings: `pack` and `train` of a recipe.
    """
    # The text model's, by the name that all of transformers' classes have for it.
    limit = getattr(config_of(given.files).get_text_config(), "max_position_embeddings", None)
    hardware = this_machine.hardware()
    return {
        "hardware": hardware,
        "fetch": {given.group: {given.name: given.entry}},
        "prepare": {
            rows.name: {
                "model": given.name, "path": str(rows.files), **({"sources": rows.sources} if rows.sources else {}),
                "split": {name: 0 if name in rows.published else 1 for name in ("validation", "test")},
                "max_length": limit if isinstance(limit, int) else 2048, "too_long": "drop",
            }
        },
        "pack": settings.get("pack", {}),
        "render": {"strategy": "auto"},
        "train": {"ranks_per_node": hardware.get("gpus_per_node", 1), **settings.get("train", {})},
        "runs": {rows.name: {"dataset": rows.name}},
    }  # fmt: skip


def _resolved(values: dict[str, Any], folder: Path) -> Resolved:
    """Return the settings of every stage, checked as those of any config."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    try:
        config = load(path)
        check_files(path, config)
    except UserError as error:
        raise UserError(re.sub(rf"{re.escape(str(path))}(:\d+)?: ", "", str(error))) from None
    return resolve(config)


def _planned(values: dict[str, Any], given: GivenModel, folder: Path) -> Plan:
    """Return the plan of a run, on GPUs with a quantized base if that is predicted to be faster than to offload states.
    Raises UserError if nothing fits."""
    plans: list[Plan] = []
    try:
        plans.append(_plan(values, given, folder))
    except UserError:
        if values["hardware"]["device"] == "cpu":
            raise
    if not plans or ("offload" in plans[0].strategy and values["hardware"]["device"] == "cuda"):
        try:
            plans.append(_plan(values | {"train": values["train"] | {"method": QUANTIZED}}, given, folder))
        except UserError:
            if not plans:
                raise
    return min(plans, key=lambda plan: plan.seconds)


def _plan(values: dict[str, Any], given: GivenModel, folder: Path) -> Plan:
    (run,) = _resolved(values, folder).runs.values()
    packing = folder / "packing"
    if not packing.exists():
        pack_rows(run.pack, folder / "data", packing)
    estimated = estimate(run.estimate, given.files, packing)
    write_json(folder / "estimate.json", estimated)
    _, rendered = render(run.render, folder / "estimate.json")
    return Plan(values, rendered, estimated)


def _said(plan: Plan) -> Iterator[str]:
    """Yield what will be trained, whether it fits, and how long it takes."""
    chosen, hardware = plan.rendered["choice"]["ranked"][0], plan.values["hardware"]
    method = plan.values["train"].get("method", "lora")
    if objective := plan.values["train"].get("objective"):
        method = f"{objective} with {method}"
    parameters, steps = plan.estimated["model"], plan.rendered["choice"]["steps"]
    yield (
        f"trains  {method}, {parameters['trainable_parameters']:,} of "
        f"{parameters['frozen_parameters'] + parameters['trainable_parameters']:,} parameters, {steps:,} steps"
    )
    memory = f"{gib(chosen['host_bytes'])} of {hardware['host_memory']} of the machine"
    if hardware["device"] == "cuda":
        memory = f"{gib(chosen['gpu_bytes'])} of a GPU's {hardware['gpu_memory']}, {memory}"
    yield f"fits    {plan.strategy}, {chosen['micro_batch']} rows at a time: {memory}"
    yield f"takes   {plan.seconds / 60:,.0f} minutes, predicted; hardware: {plan.rendered['hardware']}"


def _text(values: dict[str, Any], given: GivenModel, rows: GivenData, model: str, recipe: str | None) -> str:
    """Return the config's text: a line for each entry."""
    command = ["zerolora", "init", "--model", model, "--data", rows.text, *(["--recipe", recipe] if recipe else [])]
    lines = [f"# {shlex.join(command)}"]
    texts = {given.group: model, "data": rows.text}
    for section, entries in values.items():
        if section in ("fetch", "prepare", "runs"):
            lines.append(f"{section}:")
            for name, entry in entries.items():
                if section == "fetch":
                    ((key, value),) = entry.items()
                    lines += [f"  {name}:", f"    {key}: {_flow(value)}{_remark(value, texts[name])}"]
                else:
                    lines.append(f"  {name}: {_flow(entry)}")
        elif entries:
            lines.append(f"{section}: {_flow(entries)}{'  # this machine' * (section == 'hardware')}")
    return "\n".join([*lines, ""])


def _remark(entry: dict[str, Any], text: str) -> str:
    """Return a comment on what was looked up for an entry of `fetch`."""
    parts = []
    if "revision" in entry and not text.endswith(entry["revision"]):
        parts.append(f"revision: of {text.partition('@')[2] or 'the main branch'}")
    if entry["license"] == UNKNOWN_LICENSE:
        parts.append("its README.md states no licence")
    elif "revision" in entry:
        parts.append("license: of its README.md")
    return f"  # {'; '.join(parts)}" if parts else ""


def _flow(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True).strip()


def _first_row(data: Path, model: Path) -> str:
    """Return the first training row's text, what is supervised in 「」."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    (row,) = open_table(data, "train").slice(0, 1).to_pylist()
    ids, labels = row["input_ids"][:SHOWN_TOKENS], row["labels"][:SHOWN_TOKENS]
    parts, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or (labels[end] == IGNORED) != (labels[start] == IGNORED):
            text = tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            parts.append(text if labels[start] == IGNORED else f"「{text}」")
            start = end
    return "".join(parts).replace("\n", "⏎") + "…" * (len(row["input_ids"]) > SHOWN_TOKENS)
