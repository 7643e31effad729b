"""`python -m zerolora` is the `zerolora` command."""

from zerolora.cli import main

main()
