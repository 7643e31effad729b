"""The `zerolora` command: one thin subcommand a stage.

Stages are imported inside their subcommand, so that estimate, render and --help answer without loading torch.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from zerolora.errors import UserError

app = typer.Typer(
    help="Reproducible LoRA fine-tuning under DeepSpeed ZeRO. Each command is one stage of the pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

REPORT = logging.getLogger("zerolora")

Resolved = Annotated[Path, typer.Option("--config", help="The resolved config that `zerolora resolve` wrote.")]
Output = Annotated[Path, typer.Option(help="Where the result goes.")]
RunName = Annotated[str, typer.Option("--run", help="Name of the run.")]
ModelName = Annotated[str, typer.Option("--model", help="Name of the base model.")]
DatasetName = Annotated[str, typer.Option("--dataset", help="Name of the data set.")]
ModelDirectory = Annotated[Path, typer.Option("--model", help="resources/models/NAME, as fetch wrote it.")]
Data = Annotated[Path, typer.Option(help="Directory of the prepared data set.")]
Weights = Annotated[Path, typer.Option(help="resources/weights/NAME: where downloaded weights lie.")]
Stamp = Annotated[Path, typer.Option("--weights", help="The file that says where the weights are.")]
Manifest = Annotated[Path, typer.Option(help="manifest.json of the model.")]


@app.callback()
def start(
    context: typer.Context,
    log: Annotated[Path | None, typer.Option(help="Write what is reported to this file too.")] = None,
) -> None:
    """Set up reporting, and keep every stage but fetch off the network."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log, mode="w", encoding="utf-8"))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=handlers)
    REPORT.setLevel(logging.INFO)
    if context.invoked_subcommand not in ("fetch", "weights"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)


@app.command()
def resolve(
    config: Annotated[Path, typer.Option(help="The config, as in config/config.yaml.")], output: Output
) -> None:
    """Check the config and write what it means for every stage."""
    from zerolora.resolve import write

    write(config, output)


@app.command()
def schema(output: Output) -> None:
    """Write the JSON Schema of the config, for editors."""
    from zerolora.config import Config
    from zerolora.files import write_json

    write_json(output, Config.model_json_schema())


@app.command()
def reference(
    output: Output,
    rule: Annotated[Literal["tens", "random"], typer.Option(help="How x is split into two numbers.")] = "tens",
    seed: Annotated[int, typer.Option(help="Seed of the order, and of the random rule.")] = 42,
) -> None:
    """Generate the reference task's data."""
    from zerolora.data.reference import records
    from zerolora.files import write_text

    rows = ",\n".join(_row(record) for record in records(rule, seed))
    write_text(output, f"[\n{rows}\n]\n")


@app.command()
def fetch(config: Resolved, model: ModelName, weights: Weights, output: Output) -> None:
    """Bring the pinned base model here and write down what it is."""
    from zerolora.config import section
    from zerolora.fetch import fetch as stage

    stage(section(config, "fetch", model), weights, output)


@app.command()
def weights(config: Resolved, model: ModelName, manifest: Manifest, weights: Weights, output: Output) -> None:
    """Make sure the base weights are on this machine and are those of the manifest."""
    from zerolora.config import section
    from zerolora.fetch import restore

    restore(section(config, "fetch", model), manifest, weights, output)


@app.command()
def prepare(
    config: Resolved,
    dataset: DatasetName,
    model: Annotated[Path, typer.Option(help="manifest.json of the model whose tokenizer is used.")],
    output: Output,
) -> None:
    """Turn rows into tokens and masked labels, in three splits."""
    from zerolora.config import section
    from zerolora.data.prepare import prepare as stage

    stage(section(config, "prepare", dataset), model, output)


@app.command()
def estimate(config: Resolved, run: RunName, model: ModelDirectory, data: Data, output: Output) -> None:
    """Predict the bytes per GPU and per host of every strategy."""
    from zerolora.config import section
    from zerolora.files import write_json
    from zerolora.memory.estimate import estimate as stage
    from zerolora.memory.estimate import table

    result = stage(section(config, "runs", run, "estimate"), model, data)
    write_json(output, result)
    REPORT.info(table(result))


@app.command()
def render(
    config: Resolved,
    run: RunName,
    estimate: Annotated[Path, typer.Option(help="The run's estimate.json.")],
    output: Output,
    reasons: Annotated[Path, typer.Option(help="Where the reasons and overrides go.")],
) -> None:
    """Write the DeepSpeed JSON of the run's strategy."""
    from zerolora.config import section
    from zerolora.files import write_json
    from zerolora.zero.render import lines
    from zerolora.zero.render import render as stage

    rendered, why = stage(section(config, "runs", run, "render"), estimate)
    write_json(reasons, why)
    write_json(output, rendered)
    REPORT.info(lines(why))


@app.command()
def train(
    config: Resolved,
    run: RunName,
    data: Data,
    zero: Annotated[Path, typer.Option(help="The run's DeepSpeed JSON.")],
    weights: Stamp,
    output: Output,
    logs: Annotated[Path, typer.Option(help="Directory for the ranks' logs.")],
) -> None:
    """Train the adapter: one rank, several here, or one Slurm task of many."""
    from zerolora.config import section
    from zerolora.files import canonical
    from zerolora.train.launcher import launch, place

    settings = section(config, "runs", run, "train")
    where = place(os.environ, settings["nodes"], settings["ranks_per_node"])
    paths = {"data": data, "zero": zero, "weights": weights, "output": output}
    arguments = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    launch(where, ["--settings", canonical(settings), *arguments], settings["device"], logs)


@app.command()
def merge(
    weights: Stamp,
    adapter: Annotated[Path, typer.Option(help="Directory of the adapter.")],
    place: Annotated[Path, typer.Option(help="Where the merged weights go.")],
    output: Output,
) -> None:
    """Add the adapter to the base weights."""
    from zerolora.merge.merge import merge as stage
    from zerolora.model.manifest import located

    stage(located(weights), adapter, output, place)


@app.command()
def merged_weights(
    weights: Stamp,
    adapter: Annotated[Path, typer.Option(help="Directory of the adapter.")],
    manifest: Manifest,
    output: Output,
) -> None:
    """Make sure the merged weights are on this machine; merge again if they are not."""
    from zerolora.merge.merge import restore
    from zerolora.model.manifest import located

    restore(located(weights), adapter, manifest, output)


@app.command()
def evaluate(
    config: Resolved,
    dataset: DatasetName,
    data: Data,
    weights: Stamp,
    output: Output,
    answers: Annotated[Path, typer.Option(help="Where every answer goes.")],
) -> None:
    """Ask a model the held-out rows and judge its answers."""
    from zerolora.config import section
    from zerolora.evaluate.evaluate import evaluate as stage
    from zerolora.model.manifest import located

    stage(section(config, "evaluate", dataset), data, located(weights), output, answers)


@app.command()
def report(
    config: Resolved,
    run: RunName,
    model: Annotated[Path, typer.Option(help="manifest.json of the base model.")],
    data: Data,
    base: Annotated[Path, typer.Option(help="Directory of the base model's evaluation.")],
    results: Annotated[Path, typer.Option(help="Directory of the run's results.")],
    lock: Annotated[Path, typer.Option(help="The lock file of the environment.")],
    output: Output,
) -> None:
    """Write the run's page: before and after, loss, memory, provenance."""
    from zerolora.config import section
    from zerolora.report.report import report as stage

    stage(section(config, "runs", run, "report"), run, model, data, base, results, config, lock, output)


def _row(record: dict[str, str]) -> str:
    import json

    return json.dumps(record, ensure_ascii=False)


def main() -> None:
    """Run the command; a user's mistake prints its lines and exits with 2."""
    try:
        app()
    except UserError as error:
        for line in str(error).splitlines():
            REPORT.error("zerolora: %s", line)
        sys.exit(2)
