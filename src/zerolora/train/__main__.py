"""One rank, started by launcher.py: python -m zerolora.train --settings JSON …, with RANK and the rest set."""

import gc


def main() -> None:
    """Load the libraries, and run the rank."""
    # They make much and throw away nothing: a fifth of their time goes to a collector that finds nothing. rank.py lets
    # it begin.
    gc.disable()
    from zerolora.train import rank

    rank.main()


if __name__ == "__main__":
    main()
