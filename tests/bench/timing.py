"""Medians of CPU seconds and a plain table, for the benchmarks."""

import statistics
import time

import jax


def cpu_seconds(function, *args, repeats: int = 7) -> tuple[float, float]:
    """`(median CPU seconds of a call, wall seconds of the first call, which compiles)`."""
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    first = time.perf_counter() - start
    times = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(function(*args))
        times.append(time.process_time() - start)
    return statistics.median(times), first


def table(header: list[str], rows: list[list[str]]) -> None:
    """Prints rows under a header, columns aligned."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())
