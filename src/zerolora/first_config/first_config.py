"""Writes the first config of a project from a model, rows and this machine, and says what it will do.

What the config leaves to choose is chosen by the stages themselves: the rows are prepared and packed, and memory and
time estimated, as the pipeline does it, in a temporary folder.
"""

import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zerolora.config.file import check_files, load, publish
from zerolora.config.recipes import schema_line
from zerolora.config.resolve import default_rate, rate_for_width, resolve
from zerolora.config.schema import TrainSection
from zerolora.config.settings import Resolved
from zerolora.config.values import UNKNOWN_LICENSE
from zerolora.data.pack import pack_rows
from zerolora.data.prepare import prepare
from zerolora.data.prepared_rows import IGNORED, open_table
from zerolora.data.readers import chunks
from zerolora.data.source_files import SourceFiles, sources_of
from zerolora.errors import UserError, printable
from zerolora.files import MANIFEST, read_json, write_json
from zerolora.first_config.columns import RowLayout, layout_of, undecided_block
from zerolora.first_config.given_data import GivenData, given_data
from zerolora.first_config.given_model import GivenModel, given_model
from zerolora.first_config.recipe_settings import training_settings
from zerolora.log import only_warnings
from zerolora.machine import this_machine
from zerolora.memory.estimate import estimate
from zerolora.methods.registry import TRAINABLE
from zerolora.model.architecture import config_of, tokenizer_of
from zerolora.planner.render import render
from zerolora.probe.listed_trial import check as try_model
from zerolora.probe.untrained import untrained
from zerolora.schedules import steps_in
from zerolora.train.objectives import reading
from zerolora.units import counted, gib
from zerolora.yaml_file import dumped, written

HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 200
"""Of the rows, for each of validation and test, and at most so many."""
DEFAULT_METHOD, DEFAULT_OBJECTIVE, DEFAULT_BATCH = (
    TrainSection.model_fields[name].default for name in ("method", "objective", "global_batch")
)
FEW_STEPS, MOST_EPOCHS = 100, 5
"""Steps below which a run may teach little, and passes over the rows above which it learns them by heart."""
STEP = 64
"""Tokens to whose multiple the longest row is rounded up for max_length."""
SHOWN_TOKENS = 200
UNREAD = (
    "say which columns hold what, as in `--columns prompt=QUESTION,completion=ANSWER --ignore ID --force` with your "
    "columns' names, or under prepare in the config that was written"
)
UNDECIDED = "map each, keep rows by it or ignore it, in the config that was written, and remove it from undecided"


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


def first_config(
    model: str,
    data: str,
    output: Path,
    force: bool,
    recipe: str | None = None,
    columns: dict[str, str] | None = None,
    ignored: Sequence[str] = (),
) -> Iterator[str]:
    """Write the config to `output`, with the training settings of a recipe; yield what it will train, line by line.

    columns: the column of each field, ignored: columns to leave out, where they do not follow from the rows. What
    neither says is listed as `undecided` in the config, which then cannot be prepared yet. Raises UserError if `output`
    exists, unless `force`; if model or rows cannot be used; if the recipe's settings do not hold for them on this
    machine; or if nothing fits.
    """
    if output.exists() and not force:
        raise UserError(f"{output}: exists; pass --force to replace it, or another --output")
    settings = training_settings(recipe) if recipe else {}
    with tempfile.TemporaryDirectory() as name, only_warnings():
        folder = Path(name)
        (folder / "model").mkdir()
        given = given_model(model, folder / "model")
        rows = given_data(data, folder / "downloaded")
        yield from rows.said
        command = _command(model, rows, recipe, columns or {}, ignored)
        try:
            with _held_for(recipe):
                values = _values(given, rows, settings)
                sources = sources_of(_resolved(values, folder).prepare[rows.name])
                files = [path for source in sources for path in source.files]
                layout = layout_of(files, columns or {}, ignored, data)
                values["prepare"][rows.name] |= layout.settings()
                if layout.rows != "texts":
                    values["train"].setdefault("objective", reading(layout.rows)[0])
                if not recipe:
                    values["train"]["learning_rate"] = _rate(values["train"], given)
                _resolved(values, folder)
            yield from (f"column  {column.line()}" for column in layout.found)
            if not layout.form:
                _set_split(values["prepare"][rows.name], rows, sources)
                _write(values, layout, given, rows, command, output)
                yield f"undecided: no form reads these columns; {UNREAD}"
                return
            stats, limit = _prepared(values, layout, given, rows, sources, folder)
            if not recipe:
                values["train"]["epochs"] = _epochs(stats["train_rows"])
            with _held_for(recipe):
                plan = _plan(values, given, folder) if recipe else _planned(values, given, folder)
        except UserError as error:
            raise UserError(str(error).replace(str(rows.files), data)) from None
        _write(plan.values, layout, given, rows, command, output)
        first = _first_row(folder / "data", given.files)
    longest = max(stats[f"{split}_longest_row"] for split in ("train", "validation", "test"))
    counts = f"{stats['train_rows']:,} rows of {layout.form}, the longest of {longest:,} tokens"
    yield f"data    {data}: {counts}; {_held_out(stats)}"
    if dropped := stats["dropped_too_long_rows"]:
        yield f"        {dropped:,} rows are longer than the model's {limit:,} tokens and left out"
    yield f"row 1   {first}"
    yield from _said(plan)
    if layout.undecided:
        yield f"undecided: {', '.join(layout.undecided)}; {UNDECIDED}"


def _write(
    values: dict[str, Any],
    layout: RowLayout,
    given: GivenModel,
    rows: GivenData,
    command: str,
    output: Path,
) -> None:
    """Write the config."""
    values["prepare"][rows.name]["path"] = rows.path
    if rows.entry:
        values["fetch"]["data"] = {rows.name: rows.entry}
    undecided = {"undecided": layout.undecided} if layout.undecided else {}
    entry = {rows.name: values["prepare"][rows.name] | undecided}
    text = schema_line(output) + _text(values, layout, given, rows, command)
    publish(output, text, _filled(values) | {"prepare": entry})


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """Return the sections that are written: those with entries."""
    return {section: entries for section, entries in values.items() if entries}


@contextmanager
def _held_for(recipe: str | None) -> Iterator[None]:
    """Name the recipe in an error."""
    try:
        yield
    except UserError as error:
        if recipe is None:
            raise
        raise UserError(f"--recipe {recipe}: does not hold for this model and machine: {error}") from None


def _set_split(entry: dict[str, Any], rows: GivenData, sources: list[SourceFiles]) -> None:
    """Hold out a share of the rows for each split that was not published; none of few rows."""
    drawn = [name for name in ("validation", "test") if name not in rows.published]
    divided = [source for source in sources if not source.settings.split]
    count = sum(1 for source in divided for path in source.files for chunk in chunks(path) for _ in chunk.records())
    held_out = min(int(count * HELD_OUT_SHARE), MOST_HELD_OUT)
    entry["split"] = {name: held_out if name in drawn else 0 for name in ("validation", "test")}


def _rate(train: dict[str, Any], given: GivenModel) -> float:
    """Return the learning rate for the model's size; the default where its config states none."""
    objective = train.get("objective", DEFAULT_OBJECTIVE)
    width = getattr(config_of(given.files).get_text_config(), "hidden_size", None)
    if not isinstance(width, int) or width < 1:
        return default_rate(objective, DEFAULT_METHOD)
    return rate_for_width(objective, DEFAULT_METHOD, width)


def _epochs(rows: int) -> int:
    """Return as many passes over a small set as make FEW_STEPS, at most MOST_EPOCHS."""
    return min(MOST_EPOCHS, -(-FEW_STEPS // max(1, steps_in(rows, 1, DEFAULT_BATCH))))


def _prepared(
    values: dict[str, Any],
    layout: RowLayout,
    given: GivenModel,
    rows: GivenData,
    sources: list[SourceFiles],
    folder: Path,
) -> tuple[dict[str, Any], int]:
    """Prepare the rows in `folder`, without what is undecided, and set their split and longest length in the config's
    values; return their counts, and the model's own limit of their length."""
    entry = values["prepare"][rows.name]
    _set_split(entry, rows, sources)
    settings = _resolved(values, folder).prepare[rows.name]
    # What all rows have in common is only known to be so in those that were looked at; the stage checks it.
    left_out = [*layout.ignore, *layout.undecided, *layout.passed]
    prepare(settings.model_copy(update={"ignore": left_out}), given.files / MANIFEST, folder / "data")
    stats = read_json(folder / "data/stats.json", "zerolora stage prepare")
    longest = max(stats[f"{split}_longest_row"] for split in ("train", "validation", "test"))
    entry["max_length"] = min(-(-longest // STEP) * STEP, settings.max_length)
    if not stats["dropped_too_long_rows"]:
        del entry["too_long"]
    return stats, settings.max_length


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
    """Return the plan of a run, on GPUs with the method's quantized form if that is predicted to be faster than to
    offload states. Raises UserError if nothing fits."""
    plans: list[Plan] = []
    try:
        plans.append(_plan(values, given, folder))
    except UserError:
        if values["hardware"]["device"] == "cpu":
            raise
    if not plans or ("offload" in plans[0].strategy and values["hardware"]["device"] == "cuda"):
        try:
            train = values["train"] | {"method": TRAINABLE[DEFAULT_METHOD].quantized_form}
            plans.append(_plan(values | {"train": train}, given, folder))
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
    chosen, rendered = render(run.render, folder / "estimate.json")
    try_model(run.render, chosen.choice.attention, given.files, folder / "weights")
    untrained(run.render, chosen.choice.attention, given.files)
    return Plan(values, rendered, estimated)


def _said(plan: Plan) -> Iterator[str]:
    """Yield what will be trained, whether it fits, and how long it takes."""
    chosen, hardware = plan.rendered["choice"]["ranked"][0], plan.values["hardware"]
    method = plan.values["train"].get("method", DEFAULT_METHOD)
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
    if steps < FEW_STEPS:
        yield f"few     {counted(steps, 'step')} may teach little; use more rows, or raise train.epochs"
    yield f"fits    {plan.strategy}, {chosen['micro_batch']} rows at a time: {memory}"
    yield f"takes   {plan.seconds / 60:,.0f} minutes, predicted; hardware: {plan.rendered['hardware']}"


def _command(model: str, rows: GivenData, recipe: str | None, columns: dict[str, str], ignored: Sequence[str]) -> str:
    words = ["zerolora", "init", "--model", model, "--data", rows.text, *(["--recipe", recipe] if recipe else [])]
    if columns:
        words += ["--columns", ",".join(f"{field}={column}" for field, column in columns.items())]
    if ignored:
        words += ["--ignore", ",".join(ignored)]
    return shlex.join(words)


def _text(values: dict[str, Any], layout: RowLayout, given: GivenModel, rows: GivenData, command: str) -> str:
    """Return the config's text: a line for each entry, and one for each column that the user decides."""
    lines = [f"# {printable(command)}"]
    texts = {given.group: given.text, "data": rows.text}
    for section, entries in values.items():
        if section in ("fetch", "prepare", "runs"):
            lines.append(f"{section}:")
            for name, entry in entries.items():
                if section == "fetch":
                    ((key, value),) = entry.items()
                    lines += [f"  {written(name)}:", f"    {written(key)}: {_flow(value)}{_remark(value, texts[name])}"]
                elif section == "prepare" and layout.undecided:
                    lines += [f"  {written(name)}:", *(f"    {key}: {_flow(held)}" for key, held in entry.items())]
                    lines += undecided_block(layout, "    ")
                else:
                    lines.append(f"  {written(name)}: {_flow(entry)}")
        elif entries:
            remark = "  # this machine" if section == "hardware" else ""
            lines.append(f"{section}: {_flow(entries)}{remark}")
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


def _flow(value: Any) -> str:
    return dumped(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _first_row(data: Path, model: Path) -> str:
    """Return the first training row's text, what is supervised in 「」."""
    tokenizer = tokenizer_of(model)
    (row,) = open_table(data, "train").slice(0, 1).to_pylist()
    ids, labels = row["input_ids"][:SHOWN_TOKENS], row["labels"][:SHOWN_TOKENS]
    parts, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or (labels[end] == IGNORED) != (labels[start] == IGNORED):
            text = tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            parts.append(text if labels[start] == IGNORED else f"「{text}」")
            start = end
    if len(row["input_ids"]) > SHOWN_TOKENS:
        parts.append("…")
    return "".join(parts).replace("\n", "⏎")
