"""Stage compare: one row for each run, as a page, Markdown, CSV and metrics."""
