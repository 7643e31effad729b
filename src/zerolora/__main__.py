"""The `zerolora` command, also as `python -m zerolora`."""

import signal
import sys


def main() -> None:
    """Run the command."""
    # Until there is something to save or to say, Ctrl-C ends it without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from zerolora.fetch.ready import nothing_to_restore

    if nothing_to_restore(sys.argv[1:]):
        return
    # After the check above, since it takes longer to import.
    from zerolora.cli import main as run

    run()


if __name__ == "__main__":
    main()
