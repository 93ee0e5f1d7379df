"""Optimized noise strategies for a run, cached on disk, with coefficients as they will be applied.

Optimized in float64 by `accounting.optimize` (a second or so), rounded to float32 because that is how noise is
made, and returned as float64 arrays of those float32 values: what is accounted is what is applied. The cache
holds the JSON that `jaxpriv account matrix --strategy FILE` reads.
"""

import json
import pathlib

import numpy as np

from accounting import optimize, strategies
from trainers.common import files

CACHE_VERSION = 1  # raise it when the optimizer's result changes


def blt(
    *,
    num_rounds: int,
    min_separation: int,
    max_participations: int,
    buffers: int = 4,
    objective: str = "max",
) -> strategies.BLT:
    """Returns the BLT (`theta`, `omega`) with the least error x sensitivity at (n, b, k).

    Args:
      buffers: copies of the model that the noise state holds; 4 is within 0.1 % of more at 2000 / 314 / 6.
      objective: "max" for the worst prefix, "rms" for the root mean square over prefixes.
    """
    setting = (num_rounds, min_separation, max_participations, buffers, objective)

    def make() -> strategies.Strategy:
        return optimize.blt(
            num_rounds=num_rounds,
            min_separation=min_separation,
            max_participations=max_participations,
            buffers=buffers,
            objective=objective,
        )

    found = _cached("blt", setting, make)
    assert isinstance(found, strategies.BLT)
    return found


def banded(
    *,
    num_rounds: int,
    min_separation: int,
    max_participations: int,
    bands: int | None = None,
    objective: str = "max",
) -> strategies.Toeplitz:
    """Returns the banded Toeplitz strategy (BandMF, `coefficients`) with the least error x sensitivity.

    Args:
      bands: at most `min_separation` (the default); the noise state holds `bands` - 1 copies of the model.
      objective: as in `blt`.
    """
    width = min(min_separation, num_rounds) if bands is None else bands
    setting = (num_rounds, min_separation, max_participations, width, objective)

    def make() -> strategies.Strategy:
        return optimize.banded(
            num_rounds=num_rounds,
            min_separation=min_separation,
            max_participations=max_participations,
            bands=width,
            objective=objective,
        )

    found = _cached("banded", setting, make)
    assert isinstance(found, strategies.Toeplitz)
    return found


def _cached(kind: str, setting: tuple, make) -> strategies.Strategy:
    path = _path(kind, setting)
    types = {"blt": strategies.BLT, "banded": strategies.Toeplitz}
    try:
        return types[kind](**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass  # absent, or cut short by something outside our control: make it again
    found = strategies.applied(make())
    data = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(found).items()
    }
    with files.atomic_write(path) as file:
        json.dump(data, file)
    return found


def _path(kind: str, setting: tuple) -> pathlib.Path:
    name = "-".join(str(part) for part in (kind, f"v{CACHE_VERSION}", *setting))
    return files.cache_dir("strategies") / f"{name}.json"
