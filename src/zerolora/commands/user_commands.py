"""The commands for users: start a project, plan and measure, show and publish results.

Each command imports its implementation when called, so that no other command, nor --help, loads it.
"""

import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zerolora.commands import standard_input
from zerolora.commands.long_argument import settings_of
from zerolora.commands.options import Adapter, Config, Data, ModelDirectory, Output, Sign, Stamp, stoppable
from zerolora.errors import UserError, shown
from zerolora.log import result, say
from zerolora.machine.devices import obey
from zerolora.memory.command import memory
from zerolora.types import Device
from zerolora.units import counted

app = typer.Typer()


@app.command()
def init(
    model: Annotated[
        str | None, typer.Option(help="Directory of a base model, or its NAME[@REVISION] on the Hugging Face Hub.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="File or directory of rows for --model, or NAME[@REVISION] of a data set.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Name of a recipe; of its training settings with --model and --data.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="Columns of the fields: prompt=question,completion=answer.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Columns to leave out: id,url.")] = None,
    output: Annotated[Path, typer.Option(help="The config to write.")] = Path("config/config.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace --output if it exists.")] = False,
) -> None:
    """Write a project's config for a model and rows, or from a recipe of config/recipes/; or list the recipes."""
    if model is not None or data is not None:
        if model is None or data is None:
            raise UserError("pass --model and --data, both, or --recipe alone")
        from zerolora.first_config.first_config import first_config

        mapped, ignored = _mapped(columns or []), [name for each in ignore or [] for name in each.split(",") if name]
        undecided = False
        for line in first_config(model, data, output, force, recipe, mapped, ignored):
            say(line)
            undecided |= line.startswith("undecided: ")
        first = "decide there what is undecided, then " if undecided else ""
        run = "make run" if Path("Makefile").is_file() else "zerolora run"
        result(f"{output} is written; {first}train with `{run}`")
        return
    from zerolora.config import recipes

    folder = recipes.find(Path.cwd())
    if recipe is None:
        say(recipes.listed(folder))
        return
    recipes.write_recipe(recipe, folder, output, force)
    result(f"{output} is the recipe {recipe}; its README is {folder / recipe / 'README.md'}")


def _mapped(given: list[str]) -> dict[str, str]:
    """Return the columns of --columns by field. Raises UserError for anything else than FIELD=COLUMN."""
    from zerolora.config.values import fields

    result = {}
    for entry in (part for each in given for part in each.split(",")):
        name, equals, column = entry.partition("=")
        if not equals or not column or name not in fields():
            raise UserError(
                f"--columns {shown(entry)}: use FIELD=COLUMN, as in prompt=question,completion=answer; the fields are "
                f"{', '.join(fields())}"
            )
        result[name] = column
    return result


@app.command()
def pin(config: Config = Path("config/config.yaml")) -> None:
    """Write the commit of each model, data set and adapter that the config names by a branch, a tag or its name."""
    from zerolora.first_config.pin import pin as pinned

    lines = list(pinned(config))
    for line in lines:
        say(line)
    result(f"{config}: {counted(len(lines), 'commit')} written" if lines else f"{config}: nothing to pin")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value of this run alone, as in train.max_steps=50."),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Short for --set render.strategy=…, as in zero3.", show_default=False)
    ] = None,
) -> None:
    """Run the pipeline of config/config.yaml here, with any options and targets of Snakemake."""
    from zerolora.commands.snakemake_command import start

    start(context.args, values or [], strategy)


@app.command()
def keep(
    runs: Annotated[list[str] | None, typer.Argument(help="Runs of config/config.yaml; by default, all.")] = None,
) -> None:
    """Keep results although the code that makes them has changed, if their inputs and settings have not."""
    from zerolora.commands.snakemake_command import keep as keep_results

    for line in keep_results(runs or []):
        say(line)


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="Config of axolotl or LLaMA-Factory, or a DeepSpeed JSON.")],
    source: Annotated[
        str | None,
        typer.Option("--from", help="The tool, as in docs/import.md; by default, detected from the keys."),
    ] = None,
    output: Annotated[Path, typer.Option(help="The config to write.")] = Path("config/config.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace --output if it exists.")] = False,
    as_sft: Annotated[
        bool,
        typer.Option("--as-sft", help="Import a file with another objective, method or modality as SFT on text."),
    ] = False,
) -> None:
    """Translate another tool's config key by key, and report each key that needs attention."""
    from zerolora.imports.formats.import_format import GROUPS
    from zerolora.imports.translate import import_config

    translated = import_config(file, source, output, force, as_sft)
    for line in translated.text:
        say(line)
    same = sum(line.kind == "translated" for line in translated.lines)
    counts = ", ".join(f"{group}: {len(translated.of(group))}" for group in GROUPS)
    result(f"{output}: {same} keys translated; {counts}")


@app.command()
def check(
    config: Annotated[
        Path | None, typer.Option(help="The config to compare with. Default: config/config.yaml, if it exists.")
    ] = None,
) -> None:
    """Show what this machine has against what the config needs; exit with 1 if anything is missing."""
    from zerolora.check.check_command import check as stage

    raise typer.Exit(stage(config))


@app.command()
def expand(config: Config = Path("config/config.yaml")) -> None:
    """Write config/runs.yaml, the list of runs for DVC. Both engines also do so automatically."""
    from zerolora.config.file import load
    from zerolora.config.runs_file import RUNS, write_runs

    checked = load(config)
    changed = write_runs(checked)
    say(f"{RUNS}: {counted(len(checked.all_runs), 'run')}, {'written' if changed else 'as before'}")


@app.command()
def search(
    name: Annotated[str, typer.Argument(help="Name of a search in the config.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Command that runs all runs, after --, e.g. snakemake --profile profiles/local all."),
    ] = None,
    config: Config = Path("config/config.yaml"),
) -> None:
    """Run a hyperparameter search: choose values, run the command, read the losses, repeat.

    Without a command, choose the values of one round, for either engine to run.
    """
    from zerolora.search import rounds
    from zerolora.search.outcomes import table

    say(table(name, rounds.search(name, config, command or [])))


@app.command()
def bisect(
    good: Annotated[str, typer.Argument(help="The revision of git with the better result.")],
    bad: Annotated[str, typer.Argument(help="The revision with the worse one.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Command that runs all runs, after --. Default: zerolora run."),
    ] = None,
    run: Annotated[str | None, typer.Option(help="The run; needed if the config has several.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="A number of summary.json or difference.json. Default: accuracy, or loss.")
    ] = None,
    better: Annotated[
        Literal["higher", "lower"] | None, typer.Option(help="Which way the metric is better, if it is not known.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each revision, and of a probe at most.")] = 3,
    yes: Annotated[bool, typer.Option("--yes", help="Start; without it, only the plan is printed.")] = False,
) -> None:
    """Find which change between two revisions cost the quality, by delta debugging; exit with 1 if none is found."""
    from zerolora.bisect.bisect_command import BisectRequest
    from zerolora.bisect.bisect_command import bisect as implementation

    raise typer.Exit(implementation(BisectRequest(good, bad, run, metric, better, seeds, yes, command or [])))


@app.command()
def keys(
    word: Annotated[str | None, typer.Argument(help="Part of a key, or another tool's name for one.")] = None,
) -> None:
    """List the keys of the config; with a word, those that have it, with meaning, unit and default."""
    from zerolora.config.known_keys import listed

    say(listed(word))


@app.command()
def schema(
    output: Annotated[Path | None, typer.Option(help="The file to write. Default: the terminal.")] = None,
) -> None:
    """Write the JSON Schema of the config for editors."""
    from zerolora.config.schema import Config
    from zerolora.files import as_json, write_json

    value = Config.model_json_schema()
    if output is None:
        say(as_json(value).rstrip("\n"))
    else:
        write_json(output, value)


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


app.command()(memory)


@app.command()
def probe(
    output: Output,
    device: Annotated[Device, typer.Option(help="Device of the ranks.")] = "cpu",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks per machine, which measure in parallel.")] = 1,
) -> None:
    """Measure this machine, or the nodes of the Slurm job, for hardware.probe."""
    from zerolora.probe.probe import probe as measure

    measure(output, device, ranks)


@app.command()
def show(
    results: Annotated[Path, typer.Option(help="The results directory.")] = Path("results"),
) -> None:
    """Print a table of all runs, finished or not, in at most 120 columns."""
    from zerolora.report.comparison_terminal import show as table

    colour = sys.stdout.isatty()
    say(table(results, colour=colour), coloured=colour)


@app.command()
def compare(
    runs: Annotated[list[str] | None, typer.Argument(help="Two runs, to compare row by row. Default: all.")] = None,
    results: Annotated[Path, typer.Option(help="The results directory.")] = Path("results"),
    output: Annotated[Path, typer.Option(help="Output directory of the comparison of all.")] = Path("work/compare"),
) -> None:
    """Compare all runs of the config in their current state, finished or not, or two runs row by row."""
    if not runs:
        from zerolora.report.comparison import compare_all

        say(compare_all(results, output))
        return
    if len(runs) != 2:
        raise UserError(f"compare: {counted(len(runs), 'run')} given; name two, or none to compare all")
    from zerolora.report.pair import compare_pair

    say(compare_pair(results, *runs))


@app.command()
def chat(
    models: Annotated[
        list[str], typer.Argument(metavar="RUN[/PART]...", help="A run, or its part: merged, adapter or base.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 256,
) -> None:
    """Talk to a trained model, or to several side by side; /new begins another conversation."""
    from zerolora.config.file import load
    from zerolora.config.resolve import resolve

    resolved = resolve(load(Path("config/config.yaml")))
    named = {run for name in models if (run := name.partition("/")[0]) in resolved.runs}
    obey("cuda" if any(resolved.runs[run].train.device == "cuda" for run in named) else "cpu")
    from zerolora.chatting import conversation

    opened = conversation.opened(models, resolved, max_new_tokens)
    standard_input.reopen()
    live = sys.stdout.isatty()
    if interruptible := live and sys.stdin.isatty():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # each Ctrl-C, not only the first
    write = partial(typer.echo, nl=False)
    conversation.chat(opened, conversation.asked(), write, live=live, interruptible=interruptible)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="RUN[/PART]", help="A run, or its part: merged, adapter or base.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """Serve a trained model with an API as OpenAI's, by transformers' own server."""
    from zerolora.chatting.model_server import serve as implementation
    from zerolora.config.file import load
    from zerolora.config.resolve import resolve

    implementation(model, resolve(load(Path("config/config.yaml"))), host, port)


@app.command()
def merge(
    base: Annotated[Path, typer.Option(help="Directory of a base model.")],
    adapter: Annotated[list[Path], typer.Option(help="Directory of an adapter; repeatable.")],
    output: Output,
    weight: Annotated[list[float] | None, typer.Option(help="Factor of each adapter, in order.")] = None,
    dequantized: Annotated[
        bool, typer.Option("--dequantized", help="Merge into dequantized QLoRA weights instead of the original ones.")
    ] = False,
) -> None:
    """Merge adapters into a base model by hand; the stage `merge` does so for a run."""
    obey("cpu")
    from zerolora.merge.user_merge import merge_by_hand

    with stoppable(f"{output} is unchanged"):
        merge_by_hand(base, adapter, weight or [], output, dequantized)


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
    """Export a run's result to another format by hand, load it, and let it answer three held-out rows."""
    from zerolora.commands.stage_functions import export_target

    export_target(settings, target, model, weights, adapter, merged, data, output, vllm_python, device)


@app.command()
def push(
    run: Annotated[str, typer.Option(help="Name of a finished run.")],
    what: Annotated[str, typer.Option(help="adapter or merged.")],
    to: Annotated[
        str, typer.Option(metavar="OWNER/NAME|DIRECTORY", help="A Hub repository, or a directory, e.g. ./NAME.")
    ],
    revision: Annotated[str | None, typer.Option(help="Branch of the repository. Default: main.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a new repository as private.")] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    sign: Sign = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="For `zerolora rebuild`: rows, or checkpoints; repeatable. Default: neither."),
    ] = None,
) -> None:
    """Publish a run's adapter or merged model, with card and statements, to a Hub repository or a directory."""
    from zerolora.publish.push import push as publish

    with stoppable(f"{to} has either all of the push or none of it"):
        say(publish(run, what, to, revision, private, message, sign, include or ()))


@app.command()
def attest(
    rebuild: Annotated[Path, typer.Argument(metavar="REBUILD.JSON", help="What `zerolora rebuild` wrote.")],
    output: Annotated[Path, typer.Option(help="The statement to write, NAME.json.")],
    sign: Sign = None,
) -> None:
    """Write the in-toto statement of a rebuild, for whoever published the model."""
    from zerolora.evidence.signing import attest as implementation

    result(f"{output} is written, {implementation(rebuild, output, sign).about}")


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="PATH", help="A directory that `push` wrote, or its download.")],
    allowed_signers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The SSH keys that you trust, as in ssh-keygen(1).")
    ] = None,
    identity: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=ISSUER", help="An identity of sigstore that you trust, and its OpenID provider."),
    ] = None,
) -> None:
    """Compare a published model with its statements and their signatures, offline; exit with 1 if anything is wrong."""
    from zerolora.evidence.verify import Trust
    from zerolora.evidence.verify import verify as implementation

    findings, rebuilt = implementation(directory, Trust.of(allowed_signers, identity or []))
    for finding in findings:
        say(str(finding))
    if rebuilt:
        result(rebuilt)
    raise typer.Exit(any(finding.word == "wrong" for finding in findings))


@app.command()
def rebuild(
    source: Annotated[
        str, typer.Argument(metavar="RUN[@REVISION]|DIRECTORY|OWNER/NAME[@REVISION]", help="What to make again.")
    ],
    audit: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Make only a share of the training's segments again.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed by which --audit draws segments. Default: a random one.", show_default=False),
    ] = None,
    rows: Annotated[list[Path] | None, typer.Option(help="File or directory with the pinned rows; repeatable.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Directory of the pinned base model, if it was a local one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory of the rebuild. Default: below work/rebuild.", show_default=False)
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--zerolora", metavar="VERSION", help="Rebuild with this other version, the installed."),
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run the Python files that come with a push.")
    ] = False,
) -> None:
    """Make a run again from what was recorded, and compare every product: exit code 0 if equal to the byte, 3 within
    bounds, 1 if different."""
    from zerolora.rebuild.rebuild import Options
    from zerolora.rebuild.rebuild import rebuild as make_again

    given = (*(rows or ()), *([model] if model else []))
    with stoppable("what is done is kept, and the same command continues"):
        code = make_again(source, Options(output, given, audit, seed, version, trust_code))
    raise typer.Exit(code)
