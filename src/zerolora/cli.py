"""The `zerolora` command: common setup, and errors reported in one line.

It imports all modules in commands/, which import nothing heavy.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command_name

from zerolora import __version__
from zerolora import log as messages
from zerolora.commands import stage_command, standard_input, user_commands
from zerolora.compat.left_out import leave_out
from zerolora.compat.transformers_import import import_quickly
from zerolora.errors import EXPECTED, message_of
from zerolora.log import LOGGER
from zerolora.machine import parents
from zerolora.train.launch.stop_signals import STOPPED, Stopped

INTERRUPTED = 130  # as in shells: 128 + SIGINT
SENTENCE = 200  # maximum characters of a command's summary


class TwoGroups(TyperGroup):
    """Lists the commands for users before those that rules call, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the two lists."""
        for title, group in (("Commands", user_commands.app), ("For rules of Snakemake", stage_command.app)):
            known = [(info.name, info.callback) for info in group.registered_commands]
            names = [name or get_command_name(callback.__name__) for name, callback in known if callback]
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(SENTENCE)) for name in names])


app = typer.Typer(
    help="Reproducible LoRA fine-tuning under DeepSpeed ZeRO. `zerolora run` runs the whole pipeline.",
    cls=TwoGroups,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # loading rich would double the time of --help
)
app.add_typer(stage_command.app)
app.add_typer(user_commands.app)


def _version(wanted: bool) -> None:
    if wanted:
        messages.say(f"zerolora {__version__}")
        raise typer.Exit


@app.callback()
def start(
    context: typer.Context,
    log: Annotated[Path | None, typer.Option(help="Write all output to this file instead of the terminal.")] = None,
    _: Annotated[bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Set up messages, and disable the network for commands that do not download or upload."""
    if log:
        messages.redirect(log)
    if context.invoked_subcommand == "run":
        return  # Snakemake's jobs set themselves up
    if context.invoked_subcommand not in ("init", "pin", "stage", "weights", "memory", "push", "rebuild"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    if context.invoked_subcommand not in ("export", "stage"):
        leave_out("torchao")
    import_quickly()
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    quiet["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # it would search all installed packages for some
    quiet["RUST_BACKTRACE"] = "0"  # of a panic, which is reported in one line (model/bounded_tokenizer.py)
    for name, value in quiet.items():
        os.environ.setdefault(name, value)


def _usage(error: TyperException) -> int:
    """Print a usage error as one line and return the exit code."""
    context = getattr(error, "ctx", None)
    text = error.format_message()
    if context and text == context.get_help():  # a command without arguments
        typer.echo(text, err=True)
    else:
        remedy = f"; `{context.command_path} --help` lists the options" if context else ""
        LOGGER.error("%s", " ".join(text.split()).rstrip(".") + remedy)
    return error.exit_code


def _interrupt(*_: object) -> NoReturn:
    """Raise KeyboardInterrupt once, so that a second Ctrl-C cannot interrupt the cleanup."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Run the command.

    Exits with 2 after printing user errors and OS errors in one line each, with STOPPED after a request to stop, and
    with INTERRUPTED after Ctrl-C in a command without state to save. Standard input is closed, so that no library can
    wait for an answer, and `chat` opens it again.
    """
    standard_input.close()
    messages.set_up()
    parents.end_with_engine()
    try:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # as __main__.py has set it
            signal.signal(signal.SIGINT, _interrupt)
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of KeyboardInterrupt
            raise KeyboardInterrupt
        sys.exit(code)
    except TyperException as error:
        sys.exit(_usage(error))
    except Stopped as stopped:
        LOGGER.warning("%s", stopped)
        sys.exit(STOPPED)
    except (KeyboardInterrupt, typer.Abort):
        LOGGER.warning("stopped by Ctrl-C; run the same command again")
        sys.exit(INTERRUPTED)
    except EXPECTED as error:
        LOGGER.error("%s", message_of(error))
        sys.exit(2)
