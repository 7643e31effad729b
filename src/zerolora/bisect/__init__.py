"""Finds the changes between two revisions that cost quality: what `zerolora bisect` does."""
