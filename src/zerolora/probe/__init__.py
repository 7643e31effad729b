"""Benchmarks of a machine, whose results the cost model reads."""
