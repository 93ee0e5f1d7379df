"""All mechanisms on one axis: privacy at the same noise, and noise at the same privacy."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from accounting import guarantees, optimize, planning, strategies
from accounting.errors import prefix_error
from accounting.mechanisms import MatrixMechanism

REFERENCE = "tree_reduced (Honaker)"


class Compared(NamedTuple):
    """One mechanism at (n, b, k).

    max_error, rms_error: of prefix sums, per unit of z x C.
    max_ratio, rms_ratio: noise relative to the streaming Honaker tree, all at equal rho.
    noise_multiplier, rho, epsilon: what this mechanism needs and costs for the worst prefix noise that the
      Honaker tree has at the given z.
    """

    mechanism: str
    squared_sensitivity: float
    exact: bool
    max_error: float
    rms_error: float
    max_ratio: float
    rms_ratio: float
    noise_multiplier: float
    rho: float
    epsilon: float


def compare(
    *,
    num_rounds: int,
    min_separation: int,
    max_participations: int | None,
    noise_multiplier: float,
    delta: float,
    adjacency: str,
    extra: Mapping[str, strategies.Strategy] | None = None,
    optimized: bool = True,
) -> list[Compared]:
    """Returns the mechanisms from the noisiest to the best at equal rho.

    Args:
      noise_multiplier: z of the Honaker tree that the others are held against.
      extra: further strategies by name, e.g. coefficients from a file.
      optimized: whether to run the optimizers of BandMF and BLT (about a second); else their closed forms.
    """
    tree = planning.describe(
        "tree",
        num_rounds=num_rounds,
        min_separation=min_separation,
        max_participations=max_participations or -(-num_rounds // min_separation) or 1,
        adjacency=adjacency,
        noise_multiplier=noise_multiplier,
    )
    n, b, k = tree.num_rounds, tree.separation, max(tree.participations, 1)
    if n == 0:
        raise ValueError("num_rounds must be at least 1 to compare mechanisms")
    z = tree.noise_multiplier
    if not 0 < z < math.inf:
        raise ValueError(f"noise_multiplier must be positive and finite to compare mechanisms, got {z}")
    chosen: dict[str, strategies.Strategy] = {
        "independent": strategies.independent(),
        "square root": strategies.square_root(n),
        "banded square root": strategies.banded_square_root(min(b, n)),
        "BLT (closed form)": strategies.rational_blt(n, 4),
    }
    if optimized:
        chosen["BandMF"] = optimize.banded(
            num_rounds=n, min_separation=b, max_participations=k, bands=min(b, n)
        )
        chosen["BLT"] = optimize.blt(num_rounds=n, min_separation=b, max_participations=k)
    chosen |= extra or {}
    runs = {"tree": (tree, "plain"), REFERENCE: (tree, "honaker")}
    for name, strategy in chosen.items():
        run = MatrixMechanism(
            noise_multiplier=z,
            num_rounds=n,
            min_separation=b,
            max_participations=k,
            strategy=strategy,
            adjacency=adjacency,
        )
        runs[name] = (run, "honaker")
    reference = prefix_error(tree)
    root = math.sqrt(guarantees.squared_sensitivity(tree))
    rows = []
    for name, (run, estimator) in runs.items():
        error = prefix_error(run, estimator=estimator)
        found = guarantees.sensitivity_of(run)
        needed = z * (reference.max / error.max)
        same = dataclasses.replace(run, noise_multiplier=needed)
        rows.append(
            Compared(
                mechanism=name,
                squared_sensitivity=found.squared,
                exact=found.exact,
                max_error=error.max,
                rms_error=error.rms,
                max_ratio=math.sqrt(found.squared) * error.max / (root * reference.max),
                rms_ratio=math.sqrt(found.squared) * error.rms / (root * reference.rms),
                noise_multiplier=needed,
                rho=guarantees.rho(same),
                epsilon=guarantees.epsilon(same, delta=delta),
            )
        )
    return sorted(rows, key=lambda row: -row.max_ratio)
