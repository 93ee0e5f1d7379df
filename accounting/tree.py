"""The exact worst-case cost of tree aggregation, by dynamic programming over the forest.

A device that takes part in the set of rounds S pays the sum of |S n node|^2 over the released nodes. The
worst S among the allowed ones (rounds of one device at least b apart, at most k of them) is found exactly:
below size b a node holds at most one participation, so a set matters only through the nodes it touches and
through the first and last rounds it can be squeezed into. A subtree of width m is summarised by tuples

    (count c, value v, latest A, earliest L)

: c participations worth v fit whenever the first may not start before offset a <= A, and the last of them
then falls, at the earliest, on offset max(L, a + (c - 1) b). Two neighbours compose in closed form, so the
Pareto front of these tuples is a (max, +) algebra; nothing is approximated and nothing assumes equal spacing.
Everything is an integer.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

IMPOSSIBLE = np.int64(-(2**62))
PAIRS_AT_ONCE = 1 << 21  # bounds the memory of one (max, +) product to a few hundred megabytes


class Front(NamedTuple):
    """The undominated ways to place at least one participation in a subtree (int64 arrays of one length)."""

    count: np.ndarray
    value: np.ndarray
    latest: np.ndarray
    earliest: np.ndarray


def segments(num_rounds: int, restarts: Sequence[int]) -> list[int]:
    """Returns the number of rounds of each tree: a new one starts after `r` rounds for r in `restarts`."""
    edges = [0, *restarts, num_rounds]
    return [stop - start for start, stop in itertools.pairwise(edges) if stop > start]


def squared_sensitivity(
    trees: Sequence[int], *, min_separation: int, max_participations: int, completion: bool = False
) -> int:
    """Returns the largest sum of |S n node|^2 over all allowed S, exactly, in units of clip norm squared.

    Args:
      trees: rounds of each tree, in order (`segments`).
      min_separation: least difference b between two rounds of one device, also across trees.
      max_participations: most rounds k of one device.
      completion: False counts complete nodes only (Kairouz et al. 2021, arXiv:2103.00039); True also those
        nodes that virtual leaves complete, up to each tree's next power of two.
    """
    num_rounds = sum(trees)
    if num_rounds == 0 or max_participations < 1:
        return 0
    b = min(min_separation, num_rounds)
    k = min(max_participations, -(-num_rounds // b))
    if b == 1 and k == num_rounds:
        return sum(size * size for tree in trees for size in _node_sizes(tree, completion))
    # If k can never bind, the count need not be remembered from tree to tree, and more is never worse.
    binds = k < -(-num_rounds // b)
    fronts = _Fronts(b, k, binds)
    budget = k if binds else 0
    state = np.full((budget + 1, b), IMPOSSIBLE)  # [participations so far, rounds until the next may be]
    state[0, 0] = 0
    for tree in trees:
        for width, front in fronts.of_tree(tree, completion):
            state = _advance(state, width, front, b, budget)
    return int(state.max())


def schedule_cost(rounds: Sequence[int] | np.ndarray, trees: Sequence[int], completion: bool = False) -> int:
    """Returns the sum of |S n node|^2 of one device's actual rounds (0-based)."""
    rounds = np.asarray(rounds, np.int64)
    return int(schedule_costs(np.zeros(len(rounds), np.int64), rounds, trees, completion).max(initial=0))


def schedule_costs(
    devices: np.ndarray, rounds: np.ndarray, trees: Sequence[int], completion: bool = False
) -> np.ndarray:
    """Returns each device's sum of |S n node|^2, indexed by device number.

    Args:
      devices, rounds: int arrays of one length, one entry a participation.
    """
    devices, rounds = np.asarray(devices, np.int64), np.asarray(rounds, np.int64)
    costs = np.zeros(int(devices.max(initial=-1)) + 1, np.int64)
    starts = np.concatenate([[0], np.cumsum(np.asarray(trees, np.int64))])
    if rounds.size and (rounds.min() < 0 or rounds.max() >= starts[-1]):
        raise ValueError(f"rounds must lie in [0, {starts[-1]}), got {rounds.min()} to {rounds.max()}")
    segment = np.searchsorted(starts, rounds, side="right") - 1
    offset = rounds - starts[segment]
    length = np.asarray(trees, np.int64)[segment]
    level = 0
    while rounds.size:
        node = offset >> level
        released = (1 << level) < 2 * length if completion else ((node + 1) << level) <= length
        if not released.any():
            break
        key = np.stack([devices, segment, node])[:, released]
        nodes, held = np.unique(key, axis=1, return_counts=True)
        np.add.at(costs, nodes[0], held * held)
        level += 1
    return costs


def _node_sizes(tree: int, completion: bool) -> Iterator[int]:
    """Yields how many rounds each released node of one tree holds."""
    level = 0
    while (1 << level) < 2 * tree if completion else (1 << level) <= tree:
        size = 1 << level
        yield from [size] * (tree // size)
        if completion and tree % size:
            yield tree % size
        level += 1


class _Fronts:
    """Pareto fronts of complete and of virtually completed subtrees, each computed once."""

    def __init__(self, b: int, k: int, binds: bool):
        self.b, self.k, self.binds = b, k, binds
        self._known: dict[tuple[int, int], Front] = {}

    def of_tree(self, rounds: int, completion: bool) -> Iterable[tuple[int, Front]]:
        """Yields (width, front) of the subtrees whose costs add up to the tree's, from left to right."""
        if completion:
            yield rounds, self._node((rounds - 1).bit_length(), rounds)
            return
        for height in range(rounds.bit_length() - 1, -1, -1):
            if rounds >> height & 1:
                yield 1 << height, self._node(height, 1 << height)

    def _node(self, height: int, width: int) -> Front:
        """The front of a node of 2^height leaves of which the first `width` are real rounds."""
        if (height, width) not in self._known:
            self._known[height, width] = self._build(height, width)
        return self._known[height, width]

    def _build(self, height: int, width: int) -> Front:
        if width <= self.b:  # at most one participation, in every node from its leaf to here
            return Front(*(np.array([x], np.int64) for x in (1, height + 1, width - 1, 0)))
        half = 1 << (height - 1)
        if width <= half:
            inner = self._node(height - 1, width)
            return inner._replace(value=inner.value + inner.count**2)
        left, right = self._node(height - 1, half), self._node(height - 1, width - half)
        if self.b == 1:
            return _packed(left, right, self.k)
        front = _product(left, half, right, width - half, self.b, self.k)
        front = front._replace(value=front.value + front.count**2)
        return front if self.binds else _worth_keeping(front, width, self.b)


def _packed(left: Front, right: Front, k: int) -> Front:
    """`_product` for b = 1, where no round ever blocks the next: a plain (max, +) convolution."""
    a = np.concatenate([[0], left.value])
    b = np.concatenate([[0], right.value])
    best = np.zeros(min(len(a) + len(b) - 2, k) + 1, np.int64)
    for i, value in enumerate(a[: len(best)]):
        stop = min(i + len(b), len(best))
        np.maximum(best[i:stop], b[: stop - i] + value, out=best[i:stop])
    count = np.arange(1, len(best))
    zeros = np.zeros_like(count)
    return Front(count, best[1:] + count**2, zeros, zeros + (len(a) + len(b) - 3))


def _product(left: Front, m1: int, right: Front, m2: int, b: int, k: int) -> Front:
    """All undominated ways to use two neighbours of widths m1 and m2 together."""
    moved = right._replace(latest=right.latest + m1, earliest=right.earliest + m1)
    found = _undominated(Front(*map(np.concatenate, zip(left, moved))), m1 + m2, b)
    for i, j in _pairs(left, m1, right, m2, b, k):
        count = left.count[i] + right.count[j]
        latest = np.minimum(left.latest[i], right.latest[j] - left.count[i] * b + m1)
        fits = (left.earliest[i] + b - m1 <= right.latest[j]) & (latest >= 0)
        pairs = Front(
            count[fits],
            (left.value[i] + right.value[j])[fits],
            latest[fits],
            np.maximum(right.earliest[j] + m1, left.earliest[i] + right.count[j] * b)[fits],
        )
        found = _undominated(Front(*map(np.concatenate, zip(found, pairs))), m1 + m2, b)
    return found


def _pairs(
    left: Front, m1: int, right: Front, m2: int, b: int, k: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Indices of the ways, at most `PAIRS_AT_ONCE` or so at a time, that together may be undominated.

    Two free ways side by side are one: pairs of counts whose best values together are less than those of
    free ones of the same total are left out.
    """
    free = [_best(Front(*(x[_is_free(f, width, b)] for x in f)), f) for f, width in ((left, m1), (right, m2))]
    best = [_best(left, left), _best(right, right)]
    most = min(k, len(best[0]) + len(best[1]) - 2)
    low = np.full(most + 1, IMPOSSIBLE)
    for one in free:
        np.maximum(low[: len(one)], one[: most + 1], out=low[: len(one)])
    for c in np.flatnonzero(free[0][: most + 1] >= 0):
        window = low[c : c + len(free[1])]
        np.maximum(window, free[0][c] + free[1][: len(window)], out=window)
    starts = [np.searchsorted(f.count, np.arange(len(one) + 1)) for f, one in zip((left, right), best)]
    first, second, waiting = [], [], 0
    for c in np.flatnonzero(best[0][: most + 1] >= 0):
        window = low[c : c + len(best[1])]
        partners = np.flatnonzero(best[0][c] + best[1][: len(window)] >= np.maximum(window, 0))
        begin, end = starts[1][partners], starts[1][partners + 1]
        total = int((end - begin).sum())
        j = np.arange(total) + np.repeat(begin - (np.cumsum(end - begin) - (end - begin)), end - begin)
        i = np.arange(starts[0][c], starts[0][c + 1])
        worth = left.value[i, None] + right.value[None, j] >= low[c + right.count[j]][None]
        row, column = np.nonzero(worth)
        first.append(i[row])
        second.append(j[column])
        waiting += len(row)
        if waiting >= PAIRS_AT_ONCE:
            yield np.concatenate(first), np.concatenate(second)
            first, second, waiting = [], [], 0
    if waiting:
        yield np.concatenate(first), np.concatenate(second)


def _is_free(front: Front, width: int, b: int) -> np.ndarray:
    """Which ways fit whatever the neighbours do: they may start b - 1 late, and even then end b before the edge."""
    last = np.maximum(front.earliest, front.count * b - 1)
    return (front.latest >= b - 1) & (last <= width - b)


def _best(front: Front, whole: Front) -> np.ndarray:
    """The best value by count, up to the largest of `whole`."""
    best = np.full(int(whole.count[-1]) + 1, IMPOSSIBLE)
    np.maximum.at(best, front.count, front.value)
    return best


def _undominated(front: Front, width: int, b: int) -> Front:
    """Drops ways that another one of equal count beats in value, latest and earliest at once."""
    # Beyond these limits neither end can matter to a neighbour: a wait is shorter than b.
    latest = np.minimum(front.latest, b - 1)
    earliest = np.maximum(front.earliest, width - b)
    counts, i = np.unique(front.count, return_inverse=True)
    latests, j = np.unique(-latest, return_inverse=True)
    earliests, l = np.unique(earliest, return_inverse=True)
    kept = []
    rows = max(1, PAIRS_AT_ONCE // (len(latests) * len(earliests)))
    order = np.argsort(i, kind="stable")
    for start in range(0, len(counts), rows):
        stop = min(start + rows, len(counts))
        mine = order[np.searchsorted(i[order], start) : np.searchsorted(i[order], stop)]
        best = np.full((stop - start, len(latests), len(earliests)), IMPOSSIBLE)
        np.maximum.at(best, (i[mine] - start, j[mine], l[mine]), front.value[mine])
        beaten = np.full_like(best, IMPOSSIBLE)
        reach = np.maximum.accumulate(np.maximum.accumulate(best, axis=1), axis=2)
        beaten[:, 1:, :] = reach[:, :-1, :]
        beaten[:, :, 1:] = np.maximum(beaten[:, :, 1:], reach[:, :, :-1])
        c, a, e = np.nonzero(best > beaten)
        kept.append(Front(counts[c + start], best[c, a, e], -latests[a], earliests[e]))
    return Front(*map(np.concatenate, zip(*kept)))


def _worth_keeping(front: Front, width: int, b: int) -> Front:
    """Drops ways that a free one with more participations beats, where nothing limits their number: put in their
    place it lets every other round of the schedule stay, and costs no less in any node.
    """
    free = _best(Front(*(x[_is_free(front, width, b)] for x in front)), front)
    with_more = np.append(np.maximum.accumulate(free[::-1])[::-1][1:], IMPOSSIBLE)
    kept = front.value > with_more[front.count]
    return Front(*(array[kept] for array in front))


def _advance(state: np.ndarray, width: int, front: Front, b: int, budget: int) -> np.ndarray:
    """Moves past one subtree: state[c, wait] is the best value so far with that wait left at its edge."""
    reach = np.maximum.accumulate(state, axis=1)
    new = np.full_like(state, IMPOSSIBLE)
    new[:, 0] = reach[:, min(width, b - 1)]
    if width < b - 1:
        new[:, 1 : b - width] = state[:, width + 1 :]
    for count, value, latest, earliest in zip(*(array.tolist() for array in front)):
        used = count if budget else 0
        source, target = state[: budget + 1 - used], new[used:]
        if not len(target):
            continue
        free = earliest - (count - 1) * b  # up to this wait the earliest last round is not delayed
        column = max(earliest + b - width, 0)
        best = reach[: budget + 1 - used, min(free, latest)] + value
        np.maximum(target[:, column], best, out=target[:, column])
        if latest > free:
            shift = count * b - width
            window = target[:, free + 1 + shift : latest + 1 + shift]
            np.maximum(window, source[:, free + 1 : latest + 1] + value, out=window)
    return new
