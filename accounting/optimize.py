"""Strategies found by optimization, in float64 and seconds: banded Toeplitz (BandMF) and BLT.

Both minimise log(squared sensitivity x squared prefix error) over the strategy's coefficients, with the
gradient in closed form. Let d = 1 / c as power series, e = d / (1 - x) the noise in prefix sums and h = e d:

    error = sum_j w_j e_j^2,   d error / d c_i = -2 sum_j w_j e_j h_(j - i),

w = 1 for the last (worst) prefix, 1 - j / n for the mean over prefixes. The sensitivity is that of k columns
b apart, exact for non-increasing non-negative coefficients, which the parametrisation keeps. scipy is
imported on first use.
"""

import math

import numpy as np

from accounting import _checks, strategies
from accounting.strategies import convolve, invert

OBJECTIVES = ("max", "rms")
LARGEST_LOGIT = 14.0  # 1 - theta stays above 8e-7, so that float32 does not round theta to 1


def banded(
    *, num_rounds: int, min_separation: int, max_participations: int, bands: int, objective: str = "max"
) -> strategies.Toeplitz:
    """Returns the best Toeplitz strategy of at most `bands` <= b bands (BandMF; McKenna, arXiv:2405.15913).

    With that few bands columns b apart do not overlap, so sensitivity is the root of the sum of their norms.
    """
    n, b, k, weight = _setting(num_rounds, min_separation, max_participations, objective)
    bands = min(_checks.integer("bands", bands, minimum=1), n)
    if bands > b:
        raise ValueError(f"bands must be at most min_separation = {b} (columns would overlap), got {bands}")
    starts = b * np.arange(k)

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        column = np.zeros(n)
        column[0], column[1:bands] = 1.0, free
        # Coefficient i is in every column that has not run over the end.
        times = np.searchsorted(starts, n - np.arange(n)).astype(float)
        squared, slope = float(times @ column**2), 2 * times * column
        return _log_loss(column, weight, squared, slope, slice(1, bands))

    start = strategies.banded_square_root(bands).coefficients[1:]
    found = _minimise(loss, start, [(0.0, 1.0)] * (bands - 1)) if bands > 1 else start
    return strategies.Toeplitz(np.concatenate([[1.0], found]), "BandMF")


def blt(
    *,
    num_rounds: int,
    min_separation: int,
    max_participations: int,
    buffers: int = 4,
    objective: str = "max",
) -> strategies.BLT:
    """Returns the best BLT found with `buffers` buffers (McMahan et al. 2024, arXiv:2408.08868).

    Starts from the rational approximation of A^(1/2) at several horizons and keeps the best.
    """
    n, b, k, weight = _setting(num_rounds, min_separation, max_participations, objective)
    buffers = _checks.integer("buffers", buffers, minimum=1)
    lags = np.arange(max(n - 1, 1))

    def unpack(free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # theta = 1 / (1 + e^-u); omega = share_i / (1 + sum of shares), so that c_1 <= c_0 and c decreases.
        shares = np.exp(free[buffers:])
        return 1 / (1 + np.exp(-free[:buffers])), shares / (1 + shares.sum())

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        theta, omega = unpack(free)
        powers = np.exp(lags * np.log(theta)[:, None])
        column = np.concatenate([[1.0], omega @ powers])[:n]
        total = np.zeros(n)
        for i in range(k):
            total[i * b :] += column[: n - i * b]
        slope = np.zeros(n)
        for i in range(k):
            slope[: n - i * b] += 2 * total[i * b :]
        value, gradient = _log_loss(column, weight, float(total @ total), slope, slice(1, n))
        by_omega = powers[:, : n - 1] @ gradient
        by_theta = omega / theta * ((powers * lags)[:, : n - 1] @ gradient)
        by_share = omega * (by_omega - omega @ by_omega)
        return value, np.concatenate([by_theta * theta * (1 - theta), by_share])

    best: tuple[float, np.ndarray] | None = None
    for horizon in sorted({n, min(n, 4 * b), min(n, b)}):
        guess = strategies.rational_blt(horizon, buffers)
        logit = np.log(guess.theta) - np.log1p(-guess.theta)
        rest = max(1 - guess.omega.sum(), 0.05)
        found = _minimise(
            loss,
            np.concatenate([logit, np.log(guess.omega / rest)]),
            [(-25.0, LARGEST_LOGIT)] * buffers + [(-25.0, 25.0)] * buffers,
        )
        value = loss(found)[0]
        if best is None or value < best[0]:
            best = value, found
    assert best is not None
    theta, omega = unpack(best[1])
    order = np.argsort(-theta)
    return strategies.BLT(theta[order], omega[order], "BLT")


def _setting(
    num_rounds: int, min_separation: int, max_participations: int, objective: str
) -> tuple[int, int, int, np.ndarray]:
    n = _checks.integer("num_rounds", num_rounds, minimum=1)
    b = _checks.integer("min_separation", min_separation, minimum=1)
    k = min(_checks.integer("max_participations", max_participations, minimum=1), -(-n // b))
    _checks.choice("objective", objective, OBJECTIVES)
    return n, b, k, np.ones(n) if objective == "max" else 1 - np.arange(n) / n


def _log_loss(
    column: np.ndarray, weight: np.ndarray, squared: float, slope: np.ndarray, free: slice
) -> tuple[float, np.ndarray]:
    """log(sensitivity^2 error^2) and its gradient with respect to column[free]."""
    n = len(column)
    inverse = invert(column, n)
    noise = np.cumsum(inverse)
    error = float(weight @ noise**2)
    later = convolve(noise, inverse, n)
    by_column = -2 * convolve((weight * noise)[::-1], later, n)[::-1]
    return math.log(squared) + math.log(error), (slope / squared + by_column / error)[free]


def _minimise(loss, start: np.ndarray, bounds: list[tuple[float, float]]) -> np.ndarray:
    from scipy.optimize import minimize

    options = {"maxiter": 600, "maxfun": 3000, "maxcor": 30, "ftol": 1e-13, "gtol": 1e-9}
    return minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
