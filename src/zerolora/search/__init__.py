"""Searches for the values of the lowest validation loss: what `zerolora search` does."""
