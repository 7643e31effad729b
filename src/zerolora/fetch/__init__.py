"""Stage fetch: base models and data sets, pinned and checked."""
