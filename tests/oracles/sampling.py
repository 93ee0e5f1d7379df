"""Slow, obvious twins of the samplers: float64 inversion and exact rational arithmetic."""

from fractions import Fraction

import mpmath
import numpy as np
from scipy import special


def normal_from_words(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The normal whose two-sided tail probability is the 63 bits below the sign, plus half a unit."""
    out = []
    for a, b in zip(high.tolist(), low.tolist()):
        units = 2 * ((a & 0x7FFFFFFF) * 2**32 + b) + 1  # of 2^-64
        if units > 2**63:  # near the centre, from the other end
            x = np.sqrt(2) * special.erfinv((2**64 - units) / 2**64)
        else:
            x = -special.ndtri_exp(np.log(units) - 65 * np.log(2))
        out.append(-x if a >> 31 else x)
    return np.array(out)


def discrete_gaussian_law(stddev: float, largest: int) -> list:
    """P[|X| <= k] for k = 0..largest, in 60-digit arithmetic."""
    with mpmath.workdps(60):

        def weight(k):
            return mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * mpmath.mpf(stddev) ** 2))

        far = int(20 * stddev) + 20
        total = 1 + 2 * mpmath.fsum(weight(k) for k in range(1, far))
        running, law = mpmath.mpf(0), []
        for k in range(largest + 1):
            running += weight(k) * (1 if k == 0 else 2)
            law.append(running / total)
        return law


def level_from_uniform(uniform: int, counts: list[int], step: float) -> int:
    """The level where `uniform` / 2^128 falls, by the exact weights as fractions of 2^-300."""
    best = max(j for j, count in enumerate(counts) if count)
    with mpmath.workdps(120):
        weights = [
            Fraction(int(mpmath.floor(mpmath.exp(-mpmath.mpf(step) * (best - j)) * 2**300)), 2**300)
            for j in range(best + 1)
        ]
    masses = [count * weight for count, weight in zip(counts, weights)]
    point, running = Fraction(uniform, 2**128) * sum(masses), Fraction(0)
    for level, mass in enumerate(masses):
        running += mass
        if point < running:
            return level
    return best


def rounded_tail(border: int, stddev: float) -> int:
    """2^256 P[|X| >= border] for a normal rounded to integers, rounded up, in 120-digit arithmetic."""
    with mpmath.workdps(120):
        at = (mpmath.mpf(border) - mpmath.mpf("0.5")) / (mpmath.mpf(stddev) * mpmath.sqrt(2))
        return int(mpmath.ceil(mpmath.erfc(at) * mpmath.mpf(2) ** 256))
