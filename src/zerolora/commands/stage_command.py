"""`zerolora stage`, which runs one stage, and the commands that restore weights before it."""

import os
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from zerolora.commands.long_argument import settings_of
from zerolora.commands.options import Adapter, ModelDirectory, Stamp, TrainedOn, Weights, stoppable
from zerolora.compat.left_out import leave_out
from zerolora.config.stages import ALL_STAGES, Stage
from zerolora.errors import UserError, shown
from zerolora.machine.devices import obey
from zerolora.types import Device

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def stage(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="STAGE [NAME]...", help="The stage, and its run, model or data set.")],
    settings: Annotated[
        dict[str, Any] | None,
        typer.Option(parser=settings_of, metavar="JSON|@FILE", help="Its settings. Default: as `resolve` wrote them."),
    ] = None,
    names: Annotated[
        str, typer.Option(metavar="NAME=VALUE,...", help="Names in its paths. Default: as `resolve` wrote them.")
    ] = "",
    prefix: Annotated[str, typer.Option(help="Folder of the project in another Snakemake workflow.")] = "",
) -> None:
    """Run one stage, as in `zerolora stage train default`; --FILE PATH replaces the path of one of its files."""
    if name not in ALL_STAGES:
        raise UserError(f"{shown(name)} is no stage; use one of {', '.join(ALL_STAGES)}")
    chosen = ALL_STAGES[name]
    if not chosen.downloads:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if name != "export_target":
        leave_out("torchao")
    from zerolora.commands.stage_arguments import arguments_of, names_in

    function = function_of(chosen)
    function(**arguments_of(chosen, function, context.args, settings, names_in(names), prefix))


def function_of(stage: Stage) -> Callable[..., None]:
    """Return the function of a stage: in stage_functions.py, or else in the stage's first module."""
    from zerolora.commands import stage_functions

    own: Callable[..., None] | None = vars(stage_functions).get(stage.name)
    return own or resolve_name(f"zerolora.{stage.modules[0]}:{stage.name}")


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
