"""Slow, obvious twins of `accounting`: enumeration of schedules, explicit matrices, 60-digit arithmetic."""

import itertools
from collections.abc import Iterator

import numpy as np


def schedules(n: int, b: int, k: int) -> Iterator[tuple[int, ...]]:
    """All sets of at most k of n rounds, any two at least b apart (the empty one too)."""

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield chosen
        if len(chosen) < k:
            for t in range(chosen[-1] + b if chosen else 0, n):
                yield from extend((*chosen, t))

    return extend(())


def node_matrix(trees: list[int], *, completion: bool) -> np.ndarray:
    """One row a released node of a forest, 1 at the rounds it holds."""
    n, start, rows = sum(trees), 0, []
    for tree in trees:
        padded = 1
        while padded < tree:
            padded *= 2
        size = 1
        while size <= (padded if completion else tree):
            for first in range(0, tree, size):
                inside = [t for t in range(first, first + size) if t < tree]
                if len(inside) == size or completion:
                    row = np.zeros(n, int)
                    row[[start + t for t in inside]] = 1
                    rows.append(row)
            size *= 2
        start += tree
    return np.array(rows)


def worst_case(matrix: np.ndarray, b: int, k: int) -> float:
    """max over schedules of |sum of the columns|^2, for matrices whose columns' products are non-negative."""
    return max(float((matrix[:, list(s)].sum(axis=1) ** 2).sum()) for s in schedules(matrix.shape[1], b, k))


def worst_case_signed(matrix: np.ndarray, b: int, k: int) -> float:
    """The same over all signs of scalar contributions: a lower bound on the true worst case over vectors."""
    best = 0.0
    for s in schedules(matrix.shape[1], b, k):
        for signs in itertools.product((-1.0, 1.0), repeat=len(s)):
            moved = matrix[:, list(s)] @ np.array(signs)
            best = max(best, float(moved @ moved))
    return best


def toeplitz(column: np.ndarray) -> np.ndarray:
    """The lower-triangular matrix of a first column."""
    n = len(column)
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


def prefix_variances(strategy: np.ndarray) -> np.ndarray:
    """Variance of each prefix sum of A C^-1 w, densely."""
    n = len(strategy)
    return ((np.tril(np.ones((n, n))) @ np.linalg.inv(strategy)) ** 2).sum(axis=1)


def tree_prefix_variances(n: int, estimator: str) -> np.ndarray:
    """Variance of each prefix from one tree's noisy nodes, by dense (least) squares."""
    nodes = node_matrix([n], completion=False)
    spans = [np.flatnonzero(row) for row in nodes]
    variances = []
    for t in range(1, n + 1):
        target = (np.arange(n) < t).astype(float)
        if estimator == "plain":
            variances.append(float(bin(t).count("1")))
            continue
        if estimator == "least_squares":
            usable = nodes
        else:  # honaker, streaming: only nodes inside each block of the binary decomposition of t
            usable = nodes[[span[-1] < t for span in spans]]
        weights = np.linalg.pinv(usable.T.astype(float))  # usable.T @ w = target with the least |w|
        variances.append(float(((weights @ target) ** 2).sum()))
    return np.array(variances)


def gaussian_delta(eps, rho):
    """Balle and Wang's delta(eps), in mpmath's working precision."""
    import mpmath as mp

    mu = mp.sqrt(2 * mp.mpf(rho))
    eps = mp.mpf(eps)

    def upper(x):
        return mp.erfc(x / mp.sqrt(2)) / 2

    return upper(eps / mu - mu / 2) - mp.exp(eps) * upper(eps / mu + mu / 2)


def worst_case_by_ends(trees, b, k, completion):
    """`worst_case` for a hundred rounds or so: every node by its first round, its last and how many it holds."""

    def join(left, m1, right, m2):
        """[first, last, count] -> best value of a stretch m1 + m2 long, from those of its halves."""
        size = min(k, left.shape[2] + right.shape[2] - 2) + 1
        best = np.full((m1 + m2, m1 + m2, size), -np.inf)
        c1, c2 = min(left.shape[2], size), min(right.shape[2], size)
        best[:m1, :m1, :c1] = left[:, :, :c1]
        best[m1:, m1:, :c2] = np.maximum(best[m1:, m1:, :c2], right[:, :, :c2])
        # not_before[f]: the best of the right half whose first round is f or later.
        not_before = np.maximum.accumulate(right[::-1], axis=0)[::-1]
        for last in range(m1):
            first = max(last + b - m1, 0)
            for count in range(1, c1):
                reach = min(right.shape[2], size - count)
                if first < m2 and reach > 1:
                    new = left[:, last, count][:, None, None] + not_before[first][None, :, :reach]
                    window = best[:m1, m1:, count : count + reach]
                    np.maximum(window, new, out=window)
        return best

    def node(height, width):
        if height == 0:
            return np.array([[[-np.inf, 1.0]]])
        half = 1 << (height - 1)
        if width <= half:
            best = node(height - 1, width)
        else:
            best = join(node(height - 1, half), half, node(height - 1, width - half), width - half)
        is_released = completion or width == 1 << height
        return best + is_released * np.arange(best.shape[2]) ** 2

    whole, length = np.zeros((0, 0, 1)), 0
    for rounds in trees:
        if completion:
            parts = [((rounds - 1).bit_length(), rounds)]
        else:
            parts = [(h, 1 << h) for h in range(rounds.bit_length() - 1, -1, -1) if rounds >> h & 1]
        for height, width in parts:
            stretch = node(height, width)
            whole = stretch if not length else join(whole, length, stretch, width)
            length += width
    return int(whole.max())
