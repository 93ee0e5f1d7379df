"""Benchmarks: print tables, assert nothing. `python -m tests.bench [NAME ...]`."""
