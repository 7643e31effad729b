"""Measurements of training while it runs."""
