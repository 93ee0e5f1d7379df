"""CPU seconds of the accountant's stated speeds; peers in the same run where they finish in reason."""

import statistics
import subprocess
import sys
import time

import numpy as np

import accounting
from accounting import conversions, optimize, tree


def cpu(function, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def startup(module: str) -> float:
    """CPU seconds that a fresh interpreter spends on an import, beyond starting."""
    code = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"
    run = [sys.executable, "-c", code]
    return statistics.median(
        float(subprocess.run(run, capture_output=True, text=True, check=True).stdout) for _ in range(5)
    )


def main():
    setting = {"num_rounds": 2000, "min_separation": 314, "max_participations": 6}
    deltas = np.geomspace(1e-300, 0.5, 1000)
    compare = {**setting, "noise_multiplier": 7.0, "delta": 1e-10, "adjacency": "zero-out"}
    accounting.epsilon_from_rho(0.5, delta=1e-5, known="gaussian")  # imports scipy
    conversions.epsilon_by_peer(0.5, delta=1e-5, method="pld")  # imports dp-accounting
    rows = [
        ("import accounting", startup("accounting"), "0.3"),
        (
            "tree 2000 / 314 / 6",
            cpu(lambda: tree.squared_sensitivity([2000], min_separation=314, max_participations=6)),
            "0.1",
        ),
        (
            "tree 4096, b 128, k 32",
            cpu(lambda: tree.squared_sensitivity([4096], min_separation=128, max_participations=32)),
            "1",
        ),
        (
            "100,000 rounds, b 314, k 319, restarts every 2,000",
            cpu(lambda: tree.squared_sensitivity([2000] * 50, min_separation=314, max_participations=319)),
            "5",
        ),
        (
            "the same, k 200 (the budget binds)",
            cpu(lambda: tree.squared_sensitivity([2000] * 50, min_separation=314, max_participations=200)),
            "5",
        ),
        (
            "100,000 rounds, b 314, k 319, one tree",
            cpu(lambda: tree.squared_sensitivity([100_000], min_separation=314, max_participations=319), 1),
            "",
        ),
        (
            "100,000 rounds, b 10, k 10,000, one tree",
            cpu(lambda: tree.squared_sensitivity([100_000], min_separation=10, max_participations=10_000)),
            "",
        ),
        (
            "the same, k 5,000 (the budget binds)",
            cpu(lambda: tree.squared_sensitivity([100_000], min_separation=10, max_participations=5_000), 1),
            "",
        ),
        (
            "epsilon(delta), 1,000 points",
            cpu(lambda: accounting.epsilon_curve(0.8, deltas, known="gaussian")),
            "0.1",
        ),
        (
            "one epsilon by PLD (peer)",
            cpu(lambda: conversions.epsilon_by_peer(0.8, delta=1e-10, method="pld")),
            "",
        ),
        (
            "one epsilon, exact",
            cpu(lambda: accounting.epsilon_from_rho(0.8, delta=1e-10, known="gaussian")),
            "",
        ),
        ("BLT, 4 buffers, 2000 / 314 / 6", cpu(lambda: optimize.blt(**setting), 3), "10"),
        ("BandMF, 314 bands, 2000 / 314 / 6", cpu(lambda: optimize.banded(**setting, bands=314), 3), "10"),
        ("compare, 8 mechanisms", cpu(lambda: accounting.compare(**compare), 1), ""),
    ]
    print(f"{'':52} {'CPU s':>9} {'target':>7}")
    for name, seconds, target in rows:
        print(f"{name:52} {seconds:9.4f} {target:>7}")
