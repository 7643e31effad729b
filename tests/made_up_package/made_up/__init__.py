"""One entry for each registry of zerolora: the examples of docs/extending.md."""
