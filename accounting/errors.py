"""The noise left in prefix sums, per unit of the underlying Gaussians' standard deviation.

A mechanism's worth on one axis is sensitivity x prefix error: the standard deviation of a prefix sum, in clip
norms, at rho = 1/2. Everything here is a closed form or a linear recurrence; nothing is simulated.
"""

from typing import NamedTuple

import numpy as np

from accounting import _checks
from accounting.mechanisms import MatrixMechanism, TreeAggregation
from accounting.strategies import Dense, invert

ESTIMATORS = ("plain", "honaker", "least_squares")


class PrefixError(NamedTuple):
    """Standard deviation of the prefix sums: the worst, the root mean square over rounds, and each one."""

    max: float
    rms: float
    each: np.ndarray


def prefix_error(mechanism: TreeAggregation | MatrixMechanism, *, estimator: str = "honaker") -> PrefixError:
    """Returns the error of every released prefix sum, in units of z x C.

    Args:
      estimator: of a tree: "plain" adds the nodes of the binary decomposition; "honaker" replaces each by its
        best estimate from the nodes below it (what streams; Honaker 2015); "least_squares" uses all nodes of
        the tree, also later ones. Matrix mechanisms have one estimator and ignore this.
    """
    _checks.choice("estimator", estimator, ESTIMATORS)
    parts, carried = [], 0.0
    segments = mechanism.segments
    for index, rounds in enumerate(segments):
        if isinstance(mechanism, TreeAggregation):
            variance = _tree(rounds, estimator)
            if mechanism.completion and index < len(segments) - 1:
                variance[-1] = _tree(1 << (rounds - 1).bit_length(), estimator)[-1]
        elif isinstance(mechanism.strategy, Dense):
            n = mechanism.num_rounds
            noise = np.linalg.solve(mechanism.strategy.matrix[:n, :n].T, np.tril(np.ones((n, n))).T)
            variance = (noise**2).sum(axis=0)
        else:
            variance = np.cumsum(toeplitz_noise(mechanism.strategy.column(rounds)) ** 2)
        parts.append(variance + carried)
        carried = parts[-1][-1]
    if not parts:
        return PrefixError(0.0, 0.0, np.zeros(0))
    variance = np.concatenate(parts)
    return PrefixError(float(np.sqrt(variance.max())), float(np.sqrt(variance.mean())), np.sqrt(variance))


def toeplitz_noise(column: np.ndarray) -> np.ndarray:
    """Returns the first column of A C^-1: what one unit of noise does to this and later prefix sums."""
    return np.cumsum(invert(column, len(column)))


def _tree(rounds: int, estimator: str) -> np.ndarray:
    """Variance of each prefix of one tree of `rounds` leaves, unit noise on every complete node."""
    t = np.arange(1, rounds + 1)
    if estimator == "least_squares":
        return _least_squares(rounds)
    levels = np.arange(rounds.bit_length())
    # A node of level l estimated from everything below it has variance 2^l / (2^(l+1) - 1).
    node = np.ones(len(levels)) if estimator == "plain" else 2.0**levels / (2.0 ** (levels + 1) - 1)
    return (t[:, None] >> levels & 1) @ node


def _least_squares(rounds: int) -> np.ndarray:
    """All nodes of the forest used at once; blocks of the decomposition are independent.

    For a subtree let u be the variance of its sum, V_t that of a prefix and K_t their covariance. Two halves,
    then one more noisy observation of their common root (a Kalman update):
    """
    done, parts = 0.0, []
    for height in range(rounds.bit_length() - 1, -1, -1):
        if not rounds >> height & 1:
            continue
        u, prefix, covariance = 1.0, np.array([1.0]), np.array([1.0])
        for _ in range(height):
            prefix = np.concatenate([prefix, u + prefix])
            covariance = np.concatenate([covariance, u + covariance])
            prefix = prefix - covariance**2 / (2 * u + 1)
            covariance = covariance / (2 * u + 1)
            u = 2 * u / (2 * u + 1)
        parts.append(done + prefix)
        done += u
    return np.concatenate(parts)
