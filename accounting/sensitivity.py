"""Squared sensitivities, in units of clip norm squared, and whether each is exact or an upper bound."""

from typing import NamedTuple

import numpy as np

from accounting import tree
from accounting.mechanisms import SENSITIVITY_FACTOR, MatrixMechanism, TreeAggregation
from accounting.strategies import Dense


class Sensitivity(NamedTuple):
    """A worst case over the allowed schedules.

    squared: an integer for trees.
    exact: False if it is an upper bound.
    how: one line for the statement.
    """

    squared: float
    exact: bool
    how: str


def of(mechanism: TreeAggregation | MatrixMechanism) -> Sensitivity:
    """Returns the squared sensitivity of the mechanism under its own adjacency."""
    factor = SENSITIVITY_FACTOR[mechanism.adjacency] ** 2
    if mechanism.num_rounds == 0:
        return Sensitivity(0, True, "nothing was released")
    b, k = mechanism.separation, mechanism.participations
    if isinstance(mechanism, TreeAggregation):
        squared = tree.squared_sensitivity(
            mechanism.segments, min_separation=b, max_participations=k, completion=mechanism.completion
        )
        nodes = (
            "every node, also those that virtual leaves complete"
            if mechanism.completion
            else "complete nodes"
        )
        return Sensitivity(squared * factor, True, f"exact worst case by dynamic programming over {nodes}")
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        if isinstance(mechanism.strategy, Dense):
            n = mechanism.num_rounds
            found = dense(mechanism.strategy.matrix[:n, :n], b, k)
        elif len(mechanism.segments) == 1:
            found = toeplitz(mechanism.strategy.column(mechanism.num_rounds), b, k)
        else:
            found = _blocks(mechanism, b, k)
    if not np.isfinite(found.squared):
        raise ValueError(
            "the strategy's coefficients are so large that its sensitivity overflows: scale it down"
        )
    return found._replace(squared=found.squared * factor)


def toeplitz(column: np.ndarray, b: int, k: int) -> Sensitivity:
    """Returns the worst case of a lower-triangular Toeplitz C of len(column) rounds.

    Exact if coefficients are non-negative and non-increasing (k columns b apart, from the first; Kalinin and
    Lampert 2024, arXiv:2405.13763, theorem 2) or if there are at most b bands; else an upper bound.
    """
    return _toeplitz_by_count(column, b, k)[-1]


def _toeplitz_by_count(column: np.ndarray, b: int, k: int) -> list[Sensitivity]:
    """`toeplitz` for 1, 2, .. k participations (as many as fit)."""
    n = len(column)
    k = min(k, -(-n // b))
    envelope = np.maximum.accumulate(np.abs(column[::-1]))[::-1]  # the least non-increasing majorant
    monotone = bool((envelope - column <= 1e-12 * column[0]).all())
    bands = int(np.flatnonzero(column)[-1]) + 1
    # Norms of columns 0, b, 2b, ..: each loses what falls beyond the last round.
    norms = np.cumsum(column**2)[n - 1 - b * np.arange(k)]
    if bands <= b:
        how = f"exact: columns b = {b} apart do not overlap ({bands} bands)"
        return [Sensitivity(float(s), True, how) for s in np.cumsum(norms)]
    aligned = np.cumsum(np.sqrt(norms)) ** 2
    total, spaced = np.zeros(n), []
    for i in range(k):
        total[i * b :] += envelope[: n - i * b]
        spaced.append(float(total @ total))
    if monotone:
        how = "exact: k columns spaced b apart, from the first (non-increasing Toeplitz)"
        return [Sensitivity(s, True, how) for s in spaced]
    how = "upper bound: coefficients replaced by their non-increasing majorant"
    first = Sensitivity(float(norms[0]), True, "exact: the largest column norm")
    return [first] + [Sensitivity(min(s, float(a)), False, how) for s, a in zip(spaced[1:], aligned[1:])]


def dense(matrix: np.ndarray, b: int, k: int) -> Sensitivity:
    """Returns the worst case of any lower-triangular C.

    Exact if no two columns b or more apart overlap, or for one participation; else the bound
    max over S of sum over i in S of max over S' of sum over j in S' of |C^T C|_ij (Choquette-Choo et al.
    2023, arXiv:2306.08153, section 4).
    """
    n = len(matrix)
    k = min(k, -(-n // b))
    rows, columns = np.nonzero(matrix)
    bands = int((rows - columns).max()) + 1
    norms = (matrix**2).sum(axis=0)
    if k == 1:
        return Sensitivity(float(norms.max()), True, "exact: the largest column norm")
    if bands <= b:
        how = f"exact: columns b = {b} apart do not overlap ({bands} bands)"
        return Sensitivity(float(_best_schedule(norms[None], b, k)[0]), True, how)
    gram = matrix.T @ matrix
    everything = b == 1 and k == n and bool((gram >= 0).all())
    partners = _best_schedule(np.abs(gram), b, k)
    bound = float(_best_schedule(partners[None], b, k)[0])
    how = "upper bound: worst partners of every round, then the worst rounds"
    return Sensitivity(bound, everything, "exact: every round" if everything else how)


def _best_schedule(weights: np.ndarray, b: int, k: int) -> np.ndarray:
    """Returns, for each row of weights >= 0, the largest sum over at most k entries at least b apart."""
    best = np.maximum.accumulate(weights, axis=1)
    for _ in range(k - 1):
        longer = weights.copy()
        longer[:, b:] += best[:, :-b]
        best = np.maximum.accumulate(np.maximum(longer, best), axis=1)
    return best[:, -1]


def _blocks(mechanism: MatrixMechanism, b: int, k: int) -> Sensitivity:
    """A fresh strategy a segment: the best split of k over segments that ignores b across restarts."""
    strategy = mechanism.strategy
    assert not isinstance(strategy, Dense)
    known: dict[int, np.ndarray] = {}
    best = np.zeros(k + 1)
    exact = k == 1
    for rounds in mechanism.segments:
        if rounds not in known:
            counts = _toeplitz_by_count(strategy.column(rounds), b, k)
            known[rounds] = np.array([0.0] + [found.squared for found in counts])
        gain = known[rounds]
        padded = np.concatenate([np.full(len(gain) - 1, -np.inf), best])
        windows = np.lib.stride_tricks.sliding_window_view(padded, len(gain))
        best = (windows + gain[::-1]).max(axis=1)
    how = "upper bound: block-diagonal strategy, the worst split of k over segments"
    return Sensitivity(float(best[-1]), exact, "exact: the largest column norm" if exact else how)


def observed(
    mechanism: TreeAggregation | MatrixMechanism, devices: np.ndarray, rounds: np.ndarray
) -> Sensitivity:
    """Returns the largest squared cost of any device under the rounds it actually took part in.

    Args:
      mechanism: num_rounds must be the released rounds; its b and k play no part here.
      devices, rounds: int arrays, one entry a participation.
    """
    factor = SENSITIVITY_FACTOR[mechanism.adjacency] ** 2
    if len(rounds) == 0:
        return Sensitivity(0, True, "no device took part")
    if isinstance(mechanism, TreeAggregation):
        costs = tree.schedule_costs(devices, rounds, mechanism.segments, mechanism.completion)
        return Sensitivity(int(costs.max()) * factor, True, "exact cost of each device's actual rounds")
    costs, exact = _pair_costs(mechanism, np.asarray(devices), np.asarray(rounds))
    how = "cost of each device's actual rounds" + ("" if exact else " (upper bound)")
    return Sensitivity(float(costs.max()) * factor, exact, how)


def _pair_costs(
    mechanism: MatrixMechanism, devices: np.ndarray, rounds: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Sums |C^T C| over all pairs of each device's rounds; a pair in two segments costs nothing."""
    order = np.lexsort((rounds, devices))
    devices, rounds = devices[order], rounds[order]
    trees = np.asarray(mechanism.segments)
    starts = np.concatenate([[0], np.cumsum(trees)])
    segment = np.searchsorted(starts, rounds, side="right") - 1
    offset, length = rounds - starts[segment], trees[segment]
    costs = np.zeros(int(devices.max()) + 1)
    strategy, exact = mechanism.strategy, True
    column = np.zeros(0) if isinstance(strategy, Dense) else strategy.column(int(trees.max()))
    products: dict[int, np.ndarray] = {}
    for apart in range(len(rounds)):
        first = np.arange(len(rounds) - apart)
        first = first[devices[first] == devices[first + apart]]
        if not len(first):
            break
        first = first[segment[first] == segment[first + apart]]
        lags = offset[first + apart] - offset[first]
        values = np.zeros(len(first))
        for lag in np.unique(lags).tolist():
            mine = lags == lag
            later = first[mine] + apart
            if isinstance(strategy, Dense):
                n = mechanism.num_rounds
                a, c = strategy.matrix[:n, rounds[later] - lag], strategy.matrix[:n, rounds[later]]
                values[mine] = (a * c).sum(axis=0)
            else:
                if lag not in products:
                    products[lag] = np.cumsum(column[: len(column) - lag] * column[lag:])
                values[mine] = products[lag][length[later] - offset[later] - 1]
        exact &= bool((values >= 0).all())
        np.add.at(costs, devices[first], np.abs(values) * (1 if apart == 0 else 2))
    return costs, exact
