"""The `zerolora` command: one thin subcommand a stage.

Stages are imported inside their subcommand, so that estimate, render and --help answer without loading torch.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zerolora.errors import UserError, explained
from zerolora.train.launch.stop_signals import STOPPED, Stopped
from zerolora.types import Attention, Loss, Method

app = typer.Typer(
    help="Reproducible LoRA fine-tuning under DeepSpeed ZeRO. Each command is one stage of the pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

REPORT = logging.getLogger("zerolora")

Settings = Annotated[
    dict[str, Any],
    typer.Option(parser=json.loads, metavar="JSON", help="The stage's entry of results/config.json."),
]
Output = Annotated[Path, typer.Option(help="Where the result goes.")]
ModelDirectory = Annotated[Path, typer.Option("--model", help="resources/models/NAME, as fetch wrote it.")]
Data = Annotated[Path, typer.Option(help="Directory of the prepared data set.")]
Weights = Annotated[Path, typer.Option(help="resources/weights/NAME: where downloaded weights lie.")]
Packing = Annotated[Path, typer.Option(help="Directory of the run's packing plan.")]
Stamp = Annotated[Path, typer.Option("--weights", help="The file that says where the weights are.")]
Adapter = Annotated[Path, typer.Option(help="Directory of the adapter.")]


@app.callback()
def start(
    context: typer.Context,
    log: Annotated[Path | None, typer.Option(help="Write what is reported to this file too.")] = None,
) -> None:
    """Set up reporting, and keep every stage but fetch off the network."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
        # The tasks of an srun share the file: the first begins it, and none writes over what another wrote.
        if os.environ.get("SLURM_PROCID", "0") == "0":
            log.write_text("", encoding="utf-8")
        handlers.append(logging.FileHandler(log, mode="a", encoding="utf-8", errors="backslashreplace"))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=handlers)
    REPORT.setLevel(logging.INFO)
    if context.invoked_subcommand not in ("fetch", "fetch-data", "weights"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)


@app.command()
def resolve(
    config: Annotated[Path, typer.Option(help="The config, as in config/config.yaml.")], output: Output
) -> None:
    """Check the config and write what it means for every stage."""
    from zerolora.config.file import load
    from zerolora.config.resolve import resolve as stage
    from zerolora.files import write_json

    write_json(output, stage(load(config)).model_dump(mode="json"))


@app.command()
def schema(output: Output) -> None:
    """Write the JSON Schema of the config, for editors."""
    from zerolora.config.schema import Config
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

    rows = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records(rule, seed))
    write_text(output, f"[\n{rows}\n]\n")


@app.command()
def fetch(settings: Settings, weights: Weights, output: Output) -> None:
    """Bring the pinned base model here and write down what it is."""
    from zerolora.fetch.models import fetch as stage

    stage(settings, weights, output)


@app.command()
def fetch_data(settings: Settings, output: Output) -> None:
    """Bring the pinned data files of a hub repository here."""
    from zerolora.fetch.data_sets import fetch_data as stage

    stage(settings, output)


@app.command()
def weights(model: ModelDirectory, weights: Weights) -> None:
    """Make sure the base weights are on this machine and are those that fetch wrote down."""
    from zerolora.fetch.models import restore

    restore(model, weights)


@app.command()
def prepare(
    settings: Settings,
    model: Annotated[Path, typer.Option(help="manifest.json of the model whose tokenizer is used.")],
    output: Output,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that tokenize; all cores if left out.")] = None,
) -> None:
    """Turn rows into tokens and masked labels, in three splits."""
    from zerolora.data.prepare import prepare as stage

    stage(settings, model, output, workers)


@app.command()
def pack(settings: Settings, data: Data, output: Output) -> None:
    """Decide which rows share a packed row."""
    from zerolora.data.pack import pack_rows

    pack_rows(settings, data, output)


@app.command()
def estimate(
    model: Annotated[Path, typer.Option(help="A model's directory, or its config.json under any name.")],
    settings: Annotated[
        dict[str, Any] | None,
        typer.Option(parser=json.loads, metavar="JSON", help="The stage's entry of results/config.json."),
    ] = None,
    packing: Annotated[Path | None, typer.Option(help="Directory of the run's packing plan, with --settings.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the result goes, with --settings.")] = None,
    method: Annotated[Method, typer.Option(help="What is trained.")] = "lora",
    lora_r: Annotated[int, typer.Option(min=1, help="Rank of LoRA, DoRA and QLoRA.")] = 8,
    lora_targets: Annotated[str, typer.Option(help="all-linear, or names with commas between.")] = "all-linear",
    lora_dropout: Annotated[float, typer.Option(min=0, max=1, help="Dropout before the first factor.")] = 0.0,
    rank_pattern: Annotated[
        list[str] | None, typer.Option(help="Another rank for some modules, as in q_proj=16; may be repeated.")
    ] = None,
    modules_to_save: Annotated[str, typer.Option(help="Modules trained whole, with commas between.")] = "",
    quantization: Annotated[Literal["nf4", "fp4"], typer.Option(help="QLoRA's 4-bit type.")] = "nf4",
    quantization_block: Annotated[int, typer.Option(min=1, help="Weights of one quantization constant.")] = 64,
    double_quantization: Annotated[bool, typer.Option(help="Quantize the constants too.")] = True,
    strategy: Annotated[str, typer.Option(help="A strategy's name, or all.")] = "all",
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each machine, one rank each.")] = 1,
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU.")] = "80GiB",
    host_memory: Annotated[str, typer.Option(help="Memory of one machine.")] = "512GiB",
    micro_batch: Annotated[int, typer.Option(min=1, help="Rows of one forward pass.")] = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Forward passes of one optimizer step.")] = 1,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of the longest row.")] = 4096,
    activation_checkpointing: Annotated[bool, typer.Option(help="Keep each layer's input only.")] = False,
    attention: Annotated[Attention, typer.Option(help="Implementation of attention.")] = "sdpa",
    precision: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Of weights and activations.")] = "bf16",
    loss: Annotated[Loss, typer.Option(help="Logits of all positions, supervised ones, or by chunks.")] = "full",
    supervised_span: Annotated[
        int | None, typer.Option(min=1, help="Positions of a row with logits, with --loss supervised or fused.")
    ] = None,
    reserve: Annotated[str, typer.Option(help="Per GPU, for CUDA context, NCCL and fragmentation.")] = "1.5GiB",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a strategy, in bytes.")] = False,
) -> None:
    """Predict the bytes per GPU, host and disk of a strategy, or of all; nothing is loaded."""
    from zerolora.memory import estimate as stage

    if settings is not None:
        if packing is None or output is None:
            raise UserError("--settings needs --packing and --output too")
        from zerolora.files import write_json

        result = stage.estimate(settings, model, packing)
        write_json(output, result)
        REPORT.info(stage.table(result))
        return
    from zerolora.memory.adapters import Finetuning
    from zerolora.memory.predict import Plan

    how = Finetuning(
        method,
        r=lora_r,
        targets=lora_targets if lora_targets == "all-linear" else tuple(lora_targets.split(",")),
        dropout=lora_dropout,
        rank_pattern=tuple(_pair(text) for text in rank_pattern or []),
        modules_to_save=tuple(name for name in modules_to_save.split(",") if name),
        quantization=quantization,
        double_quantization=double_quantization,
        block=quantization_block,
    )
    plan = Plan(
        strategy="zero0",
        finetuning=how,
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        micro_batch=micro_batch,
        accumulation=accumulation,
        length=sequence_length,
        activation_checkpointing=activation_checkpointing,
        attention=attention,
        precision=precision,
        loss=loss,
        logits=supervised_span or 0,
        reserve=_bytes("--reserve", reserve),
    )
    capacity = stage.Capacity(_bytes("--gpu-memory", gpu_memory), _bytes("--host-memory", host_memory))
    found = stage.standalone(model, plan, capacity, strategy)
    if found[0]["counted_from"] != "config.json":
        REPORT.info("the model's family is not in the table: counted on the meta device, activations as of any decoder")
    typer.echo("\n".join(json.dumps(entry) for entry in found) if as_json else stage.rows(found, capacity))


def _bytes(option: str, text: str) -> int:
    from zerolora.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def _pair(text: str) -> tuple[str, int]:
    name, _, r = text.partition("=")
    if not r.isdigit() or not int(r):
        raise UserError(f"--rank-pattern {text}: write a module and its rank, as in q_proj=16")
    return name, int(r)


@app.command()
def probe(
    output: Output,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What ranks compute on.")] = "cpu",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each machine, measuring at once.")] = 1,
) -> None:
    """Measure this machine, or those of the Slurm job, for the choice of a strategy (hardware.probe)."""
    from zerolora.probe.probe import probe as measure

    measure(output, device, ranks)


@app.command()
def render(
    settings: Settings,
    estimate: Annotated[Path, typer.Option(help="The run's estimate.json.")],
    output: Output,
    reasons: Annotated[Path, typer.Option(help="Where the reasons and overrides go.")],
) -> None:
    """Choose how the run trains, and write what training reads: the DeepSpeed JSON with the choice beside it."""
    from zerolora.files import write_json
    from zerolora.planner.render import lines
    from zerolora.planner.render import render as stage

    rendered, why = stage(settings, estimate)
    write_json(reasons, why)
    write_json(output, rendered)
    REPORT.info(lines(why))


@app.command()
def train(
    settings: Settings,
    data: Data,
    packing: Packing,
    zero: Annotated[Path, typer.Option(help="The run's DeepSpeed JSON.")],
    weights: Stamp,
    checkpoints: Annotated[Path, typer.Option(help="Directory of the run's checkpoints.")],
    output: Output,
    logs: Annotated[Path, typer.Option(help="Directory for the ranks' logs.")],
) -> None:
    """Train the adapter: one rank, several here, or one Slurm task of many. Goes on from the last checkpoint."""
    from zerolora.files import canonical
    from zerolora.train.launch.launcher import launch, place
    from zerolora.train.telemetry.trackers import check

    check(settings["tracker"])
    where = place(os.environ, settings["nodes"], settings["ranks_per_node"])
    paths = {
        "data": data,
        "packing": packing,
        "zero": zero,
        "weights": weights,
        "checkpoints": checkpoints,
        "output": output,
    }
    arguments = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    launch(where, ["--settings", canonical(settings), *arguments], settings["device"], logs)


@app.command()
def merge(
    weights: Stamp,
    adapter: Adapter,
    place: Annotated[Path, typer.Option(help="Where the merged weights go.")],
    output: Output,
) -> None:
    """Add the adapter to the base weights."""
    from zerolora.manifest import located
    from zerolora.merge.merge import merge as stage

    stage(located(weights), adapter, output, place)


@app.command()
def merged_weights(
    weights: Stamp,
    adapter: Adapter,
    manifest: Annotated[Path, typer.Option(help="manifest.json of the merged model.")],
) -> None:
    """Make sure the merged weights are on this machine; merge again if they are not."""
    from zerolora.manifest import located
    from zerolora.merge.merge import restore

    restore(located(weights), adapter, manifest)


@app.command()
def evaluate(
    settings: Settings,
    data: Data,
    weights: Stamp,
    output: Output,
    answers: Annotated[Path, typer.Option(help="Where every answer goes.")],
) -> None:
    """Ask a model the held-out rows and judge its answers."""
    from zerolora.evaluate.evaluate import evaluate as stage
    from zerolora.manifest import located

    stage(settings, data, located(weights), output, answers)


@app.command()
def report(
    settings: Settings,
    run: Annotated[str, typer.Option(help="Name of the run.")],
    model: ModelDirectory,
    data: Data,
    packing: Packing,
    base: Annotated[Path, typer.Option(help="Directory of the base model's evaluation.")],
    results: Annotated[Path, typer.Option(help="Directory of the run's results.")],
    lock: Annotated[Path, typer.Option(help="The lock file of the environment.")],
    config: Annotated[Path, typer.Option(help="The config.")],
    usage: Annotated[Path, typer.Option(help="Where goes what training used, beside what was predicted.")],
    output: Output,
    accounting: Annotated[
        dict[str, Any] | None,
        typer.Option(
            parser=json.loads, metavar="JSON", help="What the scheduler accounted of training; null for none."
        ),
    ] = None,
) -> None:
    """Write the run's page: before and after, loss, memory, provenance."""
    from zerolora.report.report import report as stage

    stage(settings, run, model, data, packing, base, results, config, lock, accounting, usage, output)


@app.command()
def show(
    results: Annotated[Path, typer.Option(help="The results directory.")] = Path("results"),
) -> None:
    """Print accuracy before and after of every run."""
    from zerolora.report.show import table

    REPORT.info(table(results))


def main() -> None:
    """Run the command.

    Exits with 2 after a line for each mistake of the user or refusal of the operating system, and with STOPPED after
    a request to stop. Standard input is closed, so that nothing a stage calls can wait for an answer.
    """
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        app()
    except Stopped as stopped:
        REPORT.warning("zerolora: %s", stopped)
        sys.exit(STOPPED)
    except UserError as error:
        for line in str(error).splitlines():
            REPORT.error("zerolora: %s", line)
        sys.exit(2)
    except OSError as error:
        REPORT.error("zerolora: %s", explained(error))
        sys.exit(2)
