"""The options that several commands have."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zerolora.commands.long_argument import settings_of

Settings = Annotated[
    dict[str, Any],
    typer.Option(parser=settings_of, metavar="JSON|@FILE", help="The stage's entry of results/config.json."),
]
Output = Annotated[Path, typer.Option(help="Output file or directory.")]
ModelDirectory = Annotated[Path, typer.Option("--model", help="resources/models/NAME, as fetch wrote it.")]
Data = Annotated[Path, typer.Option(help="Directory of the prepared data set.")]
TrainedOn = Annotated[
    Path | None,
    typer.Option("--data", help="Directory of the prepared data set, whose prompt format the merged model gets."),
]
Weights = Annotated[Path, typer.Option(help="Directory of downloaded weights, resources/weights/NAME.")]
EstimateFile = Annotated[Path, typer.Option(help="The run's estimate.json.")]
ZeroFile = Annotated[Path, typer.Option(help="The run's zero.json, as render wrote it.")]
Packing = Annotated[Path, typer.Option(help="Directory of the run's packing plan.")]
Stamp = Annotated[Path, typer.Option("--weights", help="File with the directory of the weights.")]
ModelDevice = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Device that the model computes on.")]
Adapter = Annotated[Path, typer.Option(help="Directory of the adapter.")]
