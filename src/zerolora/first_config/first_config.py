"""Writes the first config of a project from a model, a file of rows and this machine, and says what it will do.

What the config leaves to choose is chosen by the stages themselves: the rows are prepared and packed, and memory and
time estimated, as the pipeline does it, in a temporary folder.
"""

import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerolora.config.file import check_files, load
from zerolora.config.resolve import resolve
from zerolora.config.settings import Resolved
from zerolora.config.shorthands import slug
from zerolora.config.values import RESERVED_RUNS, UNKNOWN_LICENSE
from zerolora.data.formats import FORMS
from zerolora.data.pack import pack_rows
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import IGNORED, open_table
from zerolora.data.readers import chunks
from zerolora.data.source_files import form_of, sources_of
from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, read_json, write_json, write_text
from zerolora.first_config.given_model import GivenModel, given_model
from zerolora.log import only_warnings
from zerolora.machine import this_machine
from zerolora.memory.estimate import estimate
from zerolora.model.architecture import config_of
from zerolora.planner.render import render
from zerolora.units import gib

HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 200
"""Of the rows, for each of validation and test, and at most so many."""
FEWEST = 20
"""Rows of a set that is divided."""
STEP = 64
"""Tokens to whose multiple the longest row is rounded up for max_length."""
SHOWN_TOKENS = 200
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


def first_config(model: str, data: str, output: Path, force: bool) -> Iterator[str]:
    """Write the config to `output`; yield what it will train, line by line.

    Raises UserError if `output` exists, unless `force`; if model or rows cannot be used; or if nothing fits.
    """
    if output.exists() and not force:
        raise UserError(f"{output}: exists; write --force to replace it, or another --output")
    if not Path(data).exists():
        raise UserError(f"--data {shown(data)}: there is no such file or directory; correct the path")
    with tempfile.TemporaryDirectory() as name, only_warnings():
        folder = Path(name)
        (folder / "model").mkdir()
        given = given_model(model, folder / "model")
        values = _values(given, data)
        resolved = _resolved(values, folder)
        run = next(iter(resolved.runs))
        settings = resolved.prepare[run]
        (source,) = sources_of(settings)
        form, _ = form_of(source, Path(data))
        count = sum(1 for path in source.files for chunk in chunks(path) for _ in chunk.records())
        held_out = min(int(count * HELD_OUT_SHARE), MOST_HELD_OUT)
        if count < FEWEST:
            raise UserError(f"--data {data}: has {count} rows; write a file of at least {FEWEST}")
        values["prepare"][run] |= {"split": {"validation": held_out, "test": held_out}}
        resolved = _resolved(values, folder)
        prepare(resolved.prepare[run], given.files / MANIFEST, folder / "data")
        stats = read_json(folder / "data/stats.json", "zerolora prepare")
        longest = max(stats[f"{split}_longest_row"] for split in ("train", "validation", "test"))
        values["prepare"][run]["max_length"] = min(-(-longest // STEP) * STEP, settings.max_length)
        if not stats["dropped_too_long_rows"]:
            del values["prepare"][run]["too_long"]
        plan = _planned(values, given, folder)
        write_text(output, _text(plan.values, given, model, data))
        first = _first_row(folder / "data", given.files)
    rows = f"{data}: {stats['train_rows']:,} rows of {FORMS[form].name}, the longest of {longest:,} tokens"
    yield f"data    {rows}; {held_out} more for validation and {held_out} for the test"
    if dropped := stats["dropped_too_long_rows"]:
        yield f"        {dropped:,} rows are longer than the model's {settings.max_length:,} tokens and left out"
    yield f"row 1   {first}"
    yield from _said(plan)


def _values(given: GivenModel, data: str) -> dict[str, Any]:
    """Return a config's values, with the model's own limit as the longest row."""
    run = slug(Path(data).stem, "rows", RESERVED_RUNS)
    # The text model's, by the name that all of transformers' classes have for it.
    limit = getattr(config_of(given.files).get_text_config(), "max_position_embeddings", None)
    hardware = this_machine.hardware()
    return {
        "hardware": hardware,
        "fetch": {given.group: {given.name: given.entry}},
        "prepare": {
            run: {
                "model": given.name, "path": data, "split": {"validation": 1, "test": 1},
                "max_length": limit if isinstance(limit, int) else 2048, "too_long": "drop",
            }
        },
        "render": {"strategy": "auto"},
        "train": {"ranks_per_node": hardware.get("gpus_per_node", 1)},
        "runs": {run: {"dataset": run}},
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


def _text(values: dict[str, Any], given: GivenModel, model: str, data: str) -> str:
    """Return the config's text: a line for each entry."""
    lines = [f"# {shlex.join(['zerolora', 'init', '--model', model, '--data', data])}"]
    for section, entries in values.items():
        if section in ("fetch", "prepare", "runs"):
            lines.append(f"{section}:")
            for name, entry in entries.items():
                if section == "fetch":
                    lines += [f"  {name}:", f"    {given.name}: {_flow(entry[given.name])}{_remark(entry[given.name])}"]
                else:
                    lines.append(f"  {name}: {_flow(entry)}")
        elif entries:
            lines.append(f"{section}: {_flow(entries)}{'  # this machine' * (section == 'hardware')}")
    return "\n".join([*lines, ""])


def _remark(entry: dict[str, str]) -> str:
    return "  # its README.md states no licence" if entry["license"] == UNKNOWN_LICENSE else ""


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
