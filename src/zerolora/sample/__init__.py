"""Samples answers of a model: the stage sample."""
