"""The ranks of training, started by launch/launcher.py: python -m zerolora.train --settings JSON …

With RANK and the rest set, this process is a rank; asked for forks (launch/fork.py), it loads and forks them.
"""

import gc


def main() -> None:
    """Load the libraries, and run the rank."""
    # Imports create many objects and release few: collections would take a fifth of their time. rank.py turns it on.
    gc.disable()
    from zerolora.compat import torchao_patches

    torchao_patches.hide()
    from zerolora.train import rank

    rank.main()


if __name__ == "__main__":
    main()
