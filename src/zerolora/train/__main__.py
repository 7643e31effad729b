"""The ranks of training, started by launch/launcher.py: python -m zerolora.train --settings JSON …

With RANK and so on set, this process is a rank; with a request for forks (launch/fork.py), it loads and forks them.
"""

import gc


def main() -> None:
    # Imports create many objects and release few: collections would take a fifth of their time. rank.py enables them.
    gc.disable()
    from zerolora.compat.left_out import leave_out
    from zerolora.compat.transformers_import import import_quickly

    leave_out("torchao")
    import_quickly()
    from zerolora.train import rank

    rank.main()


if __name__ == "__main__":
    main()
