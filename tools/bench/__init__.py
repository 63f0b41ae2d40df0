"""Measurements: one file per claim, each runnable by `python -m tools.bench.NAME`."""
