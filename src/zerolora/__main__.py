"""The `zerolora` command, also as `python -m zerolora`."""

import sys

from zerolora.fetch.ready import nothing_to_restore


def main() -> None:
    """Run the command."""
    if nothing_to_restore(sys.argv[1:]):
        return
    # After the check above, since it takes longer to import.
    from zerolora.cli import main as run

    run()


if __name__ == "__main__":
    main()
