"""Slow, obvious twins of the noise mechanisms: intervals of rounds, dense matrices, float64."""

import itertools

import numpy as np


def aligned_intervals(length: int) -> list[tuple[int, int]]:
    """The binary decomposition of the first `length` rounds as intervals, largest first."""
    out, start = [], 0
    for level in reversed(range(length.bit_length())):
        if length & (1 << level):
            out.append((start, start + (1 << level)))
            start += 1 << level
    return out


def tree_prefixes(num_rounds: int, restarts=(), completion: bool = False) -> list[set]:
    """The nodes `(tree, first round, end)` in the prefix after each round, by the paper's definition."""
    out, carried, tree, start = [], set(), 0, 0
    for t in range(1, num_rounds + 1):
        length = t - start
        ends = t in restarts
        if completion and ends:
            length = 1 << (length - 1).bit_length()
        current = {(tree, a, b) for a, b in aligned_intervals(length)}
        out.append(carried | current)
        if ends:
            carried, tree, start = carried | current, tree + 1, t
    return out


def tree_covariance(num_rounds: int, restarts=(), completion: bool = False) -> np.ndarray:
    """Covariance of the rounds' noises: differences of the prefixes, whose covariances count common nodes."""
    prefixes = tree_prefixes(num_rounds, restarts, completion)
    cov = np.array([[len(a & b) for b in prefixes] for a in prefixes], float)
    difference = np.eye(num_rounds) - np.eye(num_rounds, k=-1)
    return difference @ cov @ difference.T


def reduced_prefix_variance(t: int) -> float:
    """Honaker's estimates from below: variance 2^l / (2^(l + 1) - 1) a node of level l."""
    return sum(2.0**l / (2.0 ** (l + 1) - 1) for l in range(t.bit_length()) if t >> l & 1)


def blt_column(theta, omega, num_rounds: int) -> np.ndarray:
    """c_0 = 1, c_j = sum_i omega_i theta_i^(j - 1)."""
    return np.array(
        [1.0] + [sum(o * t ** (j - 1) for t, o in zip(theta, omega)) for j in range(1, num_rounds)]
    )


def strategy_covariance(column, num_rounds: int, restarts=()) -> np.ndarray:
    """(C^T C)^-1 for the block-diagonal C of Toeplitz blocks."""
    bounds = [0, *(r for r in restarts if r < num_rounds), num_rounds]
    strategy = np.zeros((num_rounds, num_rounds))
    for a, b in itertools.pairwise(bounds):
        for i in range(a, b):
            for j in range(a, i + 1):
                strategy[i, j] = column[i - j] if i - j < len(column) else 0.0
    inverse = np.linalg.inv(strategy)
    return inverse @ inverse.T
