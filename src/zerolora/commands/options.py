"""What several commands share: options, and cleaning up when stopped."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from zerolora.train.launch.stop_signals import Stopped


@contextlib.contextmanager
def stoppable(state: str) -> Iterator[None]:
    """Raise Stopped on SIGTERM and Ctrl-C inside the block, so that it cleans up; `state` describes the outcome."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}; {state}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Output = Annotated[Path, typer.Option(help="Output file or directory.")]
Config = Annotated[Path, typer.Option(help="The config.")]
ModelDirectory = Annotated[Path, typer.Option("--model", help="resources/models/NAME, written by fetch.")]
Data = Annotated[Path, typer.Option(help="Directory of the prepared data set.")]
TrainedOn = Annotated[
    Path | None,
    typer.Option("--data", help="Directory of the prepared data set whose prompt format the merged model gets."),
]
Weights = Annotated[Path, typer.Option(help="Directory of downloaded weights, resources/weights/NAME.")]
Stamp = Annotated[Path, typer.Option("--weights", help="File with the directory of the weights.")]
Adapter = Annotated[Path, typer.Option(help="Directory of the adapter.")]
Sign = Annotated[
    str | None,
    typer.Option(metavar="KEY|sigstore", help="Sign the statement with an SSH key, as ~/.ssh/id_ed25519, or sigstore."),
]
