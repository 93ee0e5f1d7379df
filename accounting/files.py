"""Strategies by name or from a JSON file."""

import json
import os
from typing import Any

from accounting import _json, optimize, strategies

NAMES = (
    "independent",
    "prefix",
    "square_root",
    "banded_square_root",
    "banded_inverse_square_root",
    "blt_closed_form",
    "blt",
    "bandmf",
)


def read_strategy(
    name: str,
    *,
    num_rounds: int,
    min_separation: int,
    max_participations: int,
    bands: int | None = None,
    buffers: int = 4,
) -> strategies.Strategy:
    """Returns a closed form, an optimized strategy, or the coefficients in a file.

    A file holds {"coefficients": [..]} (Toeplitz), {"theta": [..], "omega": [..]} (BLT) or {"matrix":
    [[..]]}.
    """
    bands = min(min_separation, num_rounds) if bands is None else bands
    setting: dict[str, Any] = {
        "num_rounds": num_rounds,
        "min_separation": min_separation,
        "max_participations": max_participations,
    }
    made = {
        "independent": strategies.independent,
        "prefix": lambda: strategies.prefix(num_rounds),
        "square_root": lambda: strategies.square_root(num_rounds),
        "banded_square_root": lambda: strategies.banded_square_root(bands),
        "banded_inverse_square_root": lambda: strategies.banded_inverse_square_root(num_rounds, bands),
        "blt_closed_form": lambda: strategies.rational_blt(num_rounds, buffers),
        "blt": lambda: optimize.blt(**setting, buffers=buffers),
        "bandmf": lambda: optimize.banded(**setting, bands=bands),
    }
    if name in made:
        return made[name]()
    if not os.path.exists(name):
        raise ValueError(f"strategy {name!r} is neither a file nor one of {', '.join(NAMES)}")
    with open(name, encoding="utf-8") as file, _json.refused(name, "a strategy"):
        data = json.load(file)
    for keys, make in (
        ({"coefficients"}, strategies.Toeplitz),
        ({"theta", "omega"}, strategies.BLT),
        ({"matrix"}, strategies.Dense),
    ):
        if isinstance(data, dict) and keys == set(data) - {"name"}:
            try:
                return make(**data)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    raise ValueError(
        f'{name}: must hold "coefficients", "theta" and "omega", or "matrix" (and may hold "name")'
    )
